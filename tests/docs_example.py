"""The example store that docs/sql.md asks, and the answers it gives.

Two runs of four iterations on small sums (`sums-a`; `sums-b`, which was interrupted, takes two
steps an iteration, fits value models and replays states and old rollouts), and a stream that judges
`sums-a` once more with a newer scorer. Everything but nonces and moments is a function of this
file: tokens are bytes, and seconds are made up. What stands below the heading `SECOND` is asked of
the store of `docs_reviews.py`.

    python -m tests.docs_example FOLDER    make the store in a new folder, the second in FOLDER-2
    python -m tests.docs_example --write   put the present answers into docs/sql.md
"""

import argparse
import json
import re
import tempfile
from pathlib import Path
from statistics import fmean

import storage
from storage import console
from tests import docs_reviews
from tests.docs_replay import continue_states, refit
from tests.docs_sums import (
    EVAL,
    GROUP_SIZE,
    MAX_TOKENS,
    PICKED,
    REFUSED,
    SUMS_A,
    SUMS_B,
    TRAIN,
    VERSIONS,
    Run,
    Sum,
    completion_text,
    prompt_id,
    prompt_row,
    right_answer,
    sampled_facts,
    score_row,
    wrong_answer,
)
from tests.storage import rows as make
from tests.storage.rows import Row

DOC = Path(__file__).resolve().parent.parent / "docs/sql.md"
QUESTION = re.compile(
    r"^```sql\n(?P<query>.*?)^```\n(\n```text\n(?P<answer>.*?)^```\n)?", re.M | re.S
)

SECOND = "\n## Reviews and imports\n"
RESCORED = "rescore-final-number-2"


def build(path: Path) -> storage.Store:
    """Make the example store in a new folder; never add to a store that somebody trained."""
    path.mkdir(parents=True)
    store = storage.open(path, create=True)
    for run in (SUMS_A, SUMS_B):
        Training(store, run).run_all()
    _judge_again(store, SUMS_A)
    return store


def answer(store: storage.Store, query: str) -> str:
    """Return what `rrl sql` prints for `query` below its first line, which names the store."""
    return console.answer(store, query).split("\n", 1)[1]


def answered(text: str, store: storage.Store, second: storage.Store) -> str:
    """Return `text` with an answer behind each SQL block; `second` is asked below `SECOND`."""
    above, heading, below = text.partition(SECOND)
    return _answered(above, store) + heading + _answered(below, second)


def _answered(text: str, store: storage.Store) -> str:
    return QUESTION.sub(
        lambda found: (
            f"```sql\n{found['query']}```\n\n```text\n{answer(store, found['query'])}```\n"
        ),
        text,
    )


class Training:
    """Appends a run the way the training flow does: the same tables in the same commits."""

    def __init__(self, store: storage.Store, run: Run) -> None:
        self.store = store
        self.run = run
        self.writer = store.open_stream(run.run_id, run.opened)
        self.past: dict[int, list[tuple[Row, Row]]] = {}  # scored rollouts with their scores
        self.pick_of: dict[str, Row] = {}  # by the rollout it brought
        self.pinned = 0

    def run_all(self) -> None:
        for iteration in range(5):
            self._pin(iteration)
            if iteration in self.run.continued:
                continue_states(self, iteration)
            if iteration > 0:
                self._attempts(iteration)
            self._learn(iteration)
            if iteration in self.run.refitted:
                refit(self, iteration)
            if iteration in self.run.held_out:
                self._evaluate(iteration)
            if iteration == self.run.interrupted_after:
                self._end("interrupted")
                self.writer = self.store.open_stream(self.run.run_id, self.run.opened)
        self._end("finished")

    def _pin(self, iteration: int) -> None:
        head = self.store.head()
        self.pinned = head.number
        row = make.pin(iteration, json.dumps(VERSIONS))
        row |= {"as_of": head.number, "as_of_sha256": head.sha256}
        self.writer.append({"views_pinned": [row]}, f"i{iteration}-pin")

    def _attempts(self, iteration: int) -> None:
        """Sample in two batches, the first try of the second having failed; then judge."""
        rollouts: list[Row] = []
        picked = PICKED[iteration]
        for batch in (0, 1):
            key = f"i{iteration}-attempt-{batch}"
            if (self.run.run_id, iteration, batch) == ("sums-a", 3, 1):
                self._fail(iteration, "generate", key, "SamplerError", "the engine stopped")
            numbers = picked[2 * batch : 2 * batch + 2]
            of_batch = [
                self._attempt(iteration, number, index, key)
                for number in numbers
                for index in range(GROUP_SIZE)
            ]
            rollouts += self._append_rollouts(of_batch, [TRAIN[n] for n in numbers], "train", key)
        judged = self.judge(iteration, "attempt", rollouts)
        self.past[iteration] = self.past.get(iteration, []) + judged

    def _attempt(self, iteration: int, number: int, index: int, batch_key: str) -> Row:
        run, problem = self.run, TRAIN[number]
        num_right = run.right[iteration][PICKED[iteration].index(number)]
        is_right = (index + iteration) % GROUP_SIZE < num_right
        text = run.texts.get((iteration, number, index))
        if text is None:
            guess = (
                right_answer(problem)
                if is_right
                else wrong_answer(problem, run.run_id, iteration, index)
            )
            num_thoughts = min(iteration - 1, 2) if is_right else iteration - 1 + index % 2
            has_line = iteration > 1 or index % 2 == 1
            text = completion_text(problem, guess, num_thoughts, has_line)
        place = make.rollout(prompt_id(problem), index, iteration, role="attempt")
        return place | sampled_facts(problem, text) | self._policy(iteration - 1, 1.0, batch_key)

    def _evaluate(self, iteration: int) -> None:
        key = f"i{iteration}-evaluation-0"
        rollouts = []
        for number, (problem, is_right) in enumerate(
            zip(EVAL, self.run.held_out[iteration], strict=True)
        ):
            guess = right_answer(problem) + (0 if is_right else 1)
            row = make.rollout(prompt_id(problem), 0, iteration, role="evaluation")
            row |= sampled_facts(problem, completion_text(problem, guess, 0, has_line=True))
            row |= self._policy(iteration, 0.0, key)
            if (self.run.run_id, iteration, number) == REFUSED:
                error = "expected at most 9 prompt tokens, came 10"
                row |= {"status": "error", "error": error, "finish_reason": "error"}
                row |= {"completion": "", "num_completion_tokens": 0}
                self._fail(iteration, "generate", row["prompt_id"], "prompt_refused", error)
            rollouts.append(row)
        committed = self._append_rollouts(rollouts, EVAL, "eval", key)
        judged = self.judge(iteration, "evaluation", committed)
        values = [score["value"] for _, score in judged]
        evaluation = {
            "iteration": iteration, "name": "held_out", "scorer": "final_number",
            "scorer_version": "1", "policy_version": iteration, "num_prompts": len(values),
            "num_unscored": 0, "mean_score": fmean(values), "temperature": 0.0,
            "mean_completion_tokens": fmean(r["num_completion_tokens"] for r, _ in judged),
        }  # fmt: skip
        self.writer.append({"evaluations": [evaluation]}, f"i{iteration}-evaluation")
        if self.run.run_id == "sums-b":
            self._fail(iteration, "track", "mlflow", "ConnectionError", "no answer within 5 s")

    def _append_rollouts(
        self, rollouts: list[Row], problems: tuple[Sum, ...] | list[Sum], split: str, key: str
    ) -> list[Row]:
        seconds = round(0.5 + 0.01 * sum(r["num_completion_tokens"] for r in rollouts), 2)
        group = f"{self.run.run_id}-{key.split('-')[0]}"
        rows = [
            r | {"batch_key": key, "generate_s": seconds, "group_id": f"{group}-{r['prompt_id']}"}
            for r in rollouts
        ]
        tokens = [
            make.tokens(
                self.writer.event_id_of("rollouts", r),
                r["iteration"],
                prompt_ids=list(r["prompt_id"].encode()),
                completion_ids=list(r["completion"].encode()),
                sampler_logprobs=[-(byte % 8) / 8 for byte in r["completion"].encode()],
            )
            for r in rows
        ]
        prompts = [prompt_row(problem, split) for problem in problems]
        committed = self.writer.append(
            {"prompts": prompts, "rollouts": rows, "rollout_tokens": tokens}, key
        )
        return committed.rows["rollouts"]

    def judge(self, iteration: int, role: str, rollouts: list[Row]) -> list[tuple[Row, Row]]:
        """Judge by both scorers; return the rollouts with a reward, and their reward."""
        ok = [r for r in rollouts if r["status"] == "ok"]
        scores = [score_row(r, name, "1") for name in VERSIONS for r in ok]
        again = []
        for place, status in ((1, "timeout"), (2, "scorer_error")):  # two judgements fail
            if (role, iteration) == ("attempt", 2):
                scores[place] |= {"value": None, "status": status}
                again = [
                    score_row(ok[1], "final_number", "1") | {"attempt": 1}
                ]  # one is tried again
        key = f"i{iteration}-{role}-scores"
        committed = self.writer.append({"scores": scores}, key).rows["scores"]
        if again:
            committed += self.writer.append({"scores": again}, f"{key}-1").rows["scores"]
        rewards = {
            row["target_id"]: row
            for row in committed
            if row["scorer"] == "final_number" and row["value"] is not None
        }
        return [(r, rewards[r["event_id"]]) for r in ok if r["event_id"] in rewards]

    def _learn(self, iteration: int) -> None:
        """Take the steps of an iteration and publish; iteration 0 only publishes."""
        replays: list[Row] = []
        updates: list[Row] = []
        learned: list[Row] = []
        for step in range(self.run.epochs if iteration else 0):
            planned = self._planned(iteration, step)
            replays += planned
            learned += [self._learned(row) for row in planned]
            updates.append(
                make.update(
                    iteration, step, batch_id=planned[0]["batch_id"], algorithm="dr_grpo",
                    loss=round(-0.02 * iteration, 4), policy_loss=round(-0.02 * iteration, 4),
                    learning_rate=self.run.learning_rate, num_sequences=len(planned),
                    num_loss_tokens=sum(r["num_loss_tokens"] for r in learned[-len(planned) :]),
                    learn_s=2.5 + 0.25 * iteration,
                )
            )  # fmt: skip
        if replays:
            self.writer.append({"replays": replays}, f"i{iteration}-batch")
        adapter = f"{self.run.run_id} {iteration}".encode()
        policy = {
            "policy_version": iteration, "iteration": iteration, "base_digest": "base",
            "adapter_digest": f"adapter-{iteration}", "policy_digest": f"policy-{iteration}",
            "adapter_artifact": self.store.artifacts.put(adapter, "adapter"),
        }  # fmt: skip
        self.writer.append(
            {"updates": updates, "learned_samples": learned, "policies": [policy]},
            f"i{iteration}-publish",
        )

    def _planned(self, iteration: int, step: int) -> list[Row]:
        """Return the samples of a step: the iteration's, and the best of an old iteration."""
        entries = self.past[iteration]
        if iteration in self.run.replayed:
            old = self.past[self.run.replayed[iteration]]
            entries = entries + [(r, s) for r, s in old if s["value"] == 1.0][:2]
        rows = []
        for position, (rollout, score) in enumerate(entries):
            group = [
                s["value"]
                for r, s in self.past[rollout["iteration"]]
                if r["group_id"] == rollout["group_id"]
            ]
            rows.append(
                make.planned(
                    rollout["event_id"], position, iteration, step=step,
                    batch_id=f"b-{self.run.run_id}-{iteration}-{step}",
                    source_run_id=self.run.run_id, group_id=rollout["group_id"],
                    score_id=score["event_id"], reward=score["value"],
                    advantage=score["value"] - fmean(group),
                    age=iteration - 1 - rollout["policy_version"],
                    **self._replay_facts(rollout, iteration, fmean(group)),
                )
            )  # fmt: skip
        return rows

    def _replay_facts(self, rollout: Row, iteration: int, group_mean: float) -> Row:
        """Return what `replays` says of a sample that is not fresh."""
        if rollout["iteration"] < iteration:
            facts = {"unit": "trajectory", "priority": 0.5, "probability": 0.25}
            return facts | {"pick_kind": "prioritised"}
        picked = self.pick_of.get(rollout["event_id"])
        if picked is None:
            return {}
        copied = ("priority", "probability", "pick_kind", "prefix_tokens")
        prompt_mean = picked["prompt_value"]
        return {name: picked[name] for name in copied} | {
            "unit": "state",
            "pick_id": picked["event_id"],
            "prefix_advantage": max(0.0, group_mean - prompt_mean) / 0.3,
        }

    def _learned(self, planned: Row) -> Row:
        """Return how a sample entered its step: not at all run when it has no gradient."""
        iteration, step = planned["iteration"], planned["step"]
        rollout = next(
            r for of_one in self.past.values() for r, _ in of_one
            if r["event_id"] == planned["rollout_id"]
        )  # fmt: skip
        row = make.learned(planned["rollout_id"], iteration, step=step)
        row |= {"num_loss_tokens": rollout["num_completion_tokens"]}
        if planned["advantage"] == 0 and self.run.kl_coef == 0:
            return row
        spread = rollout["sample_index"] / 100
        mismatch = 0.01 + self.run.drift * (iteration - 1 + planned["age"])
        return row | {
            "policy_logprob_mean": -0.5,
            "mismatch_mean": round(mismatch * (1 + spread), 6),
            "mismatch_max": round(mismatch * (8 + spread), 6),
            "importance_mean": round(1 - mismatch * spread, 6),
            "ratio_mean": 1.0 if step == 0 else 1.02,
            "frac_clipped": 0.0 if step == 0 else 0.0625,
            "frac_truncated": 0.125 if planned["age"] else 0.0,
            "kl_mean": 0.005 * iteration if self.run.kl_coef else None,
            "entropy_mean": round(1.2 - (0.08 + 4 * self.run.drift) * iteration + spread, 6),
        }

    def _policy(self, version: int, temperature: float, batch_key: str) -> Row:
        return {
            "policy_version": version,
            "policy_digest": f"policy-{version}",
            "temperature": temperature,
            "max_tokens": MAX_TOKENS,
            "batch_key": batch_key,
        }

    def _fail(self, iteration: int, phase: str, subject: str, kind: str, message: str) -> None:
        row = make.failure(subject, iteration, message) | {"phase": phase, "kind": kind}
        self.writer.append({"failures": [row]}, f"i{iteration}-failure")

    def _end(self, what: str) -> None:
        row = self.run.opened | {"run_epoch": self.writer.epoch, "what": what}
        self.writer.append({"runs": [row]}, what)


def _judge_again(store: storage.Store, run: Run) -> None:
    """Judge the rollouts of a finished run by version 2 of `final_number`, from another stream."""
    opened = make.OPENED | {"planned_iterations": 0, "kind": "rescore"}
    writer = store.open_stream(RESCORED, opened)
    rollouts = [r for r in store.read("rollouts", run_id=run.run_id) if r["status"] == "ok"]
    scores = [score_row(rollout, "final_number", "2") for rollout in rollouts]
    writer.append({"scores": scores}, "scores")
    writer.append({"runs": [opened | {"run_epoch": 1, "what": "finished"}]}, "finished")


def main() -> None:
    """Make the store in a folder, or write its answers into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.folder:
        print(build(asked.folder).path)
        print(docs_reviews.build(asked.folder.with_name(f"{asked.folder.name}-2")).path)
    if asked.write:
        with tempfile.TemporaryDirectory() as folder:
            store = build(Path(folder) / "rrl-data")
            second = docs_reviews.build(Path(folder) / "reviews")
            text = answered(DOC.read_text(encoding="utf-8"), store, second)
            DOC.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
