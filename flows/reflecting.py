"""Review at test time: each held-out answer is reviewed by the policy itself, and given again.

Nobody knows then whether an answer is right, so the review is asked for without a verdict and
without feedback, of every answer. Where a review or a second attempt does not fit the context, the
first answer stands: both modes are judged over the same prompts. What is direct and what took a
review is counted apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from flows import tasks
from flows.evaluation import evaluation_rows
from flows.generation import Group, Phase, evaluation_phase, generate_phase
from flows.reviewed import review_facts
from flows.translate import Row
from flows.wiring import Session
from rrl_core.review.formats import ReviewFormat, load_format
from rrl_core.review.messages import reflect_messages, second_messages
from rrl_core.tasks.protocol import Prompt
from storage import Store

Mode = Literal["direct", "reflect"]
SUFFIX = "_reflect"  # of the name of what took a review
ROLES = {"direct": ("evaluation",), "reflect": ("evaluation", "review", "second_attempt")}


@dataclass(frozen=True)
class Cost:
    """What the answers of a mode took: tokens sampled, of them reviews, and seconds in batches.

    `num_standing` first answers stand, since reviewing them did not fit the context.
    """

    mode: Mode
    num_answers: int
    num_sampled_tokens: int
    num_review_tokens: int
    num_standing: int
    seconds: float


def evaluated(session: Session, version: int, name: str, mode: Mode) -> list[Row]:
    """Sample, judge and append what the stream lacks; return its `evaluations` rows."""
    direct = evaluation_phase(session, version)
    generate_phase(session, direct)
    tasks.score(session.run_id, version, "evaluation")
    if mode == "reflect":
        _review_and_try_again(session, direct)
        tasks.score(session.run_id, version, "reflection")
    read = partial(session.store.read, run_id=session.run_id, iteration=version)
    rollouts = [row for row in read("rollouts") if row["status"] == "ok"]
    scores = read("scores")
    rows = [row | {"name": name} for row in evaluation_rows(_of(rollouts, "evaluation"), scores)]
    if mode == "reflect":
        cost = mode_cost(session.store, session.run_id, version, mode)
        tokens = cost.num_sampled_tokens / max(1, cost.num_answers)
        rows += [
            row | {"name": name + SUFFIX, "mean_completion_tokens": tokens}
            for row in evaluation_rows(_last_answers(rollouts), scores)
        ]
    key = f"i{version:06d}-evaluation"
    return session.writer.append({"evaluations": rows}, batch_key=key).rows["evaluations"]


def _review_and_try_again(session: Session, direct: Phase) -> None:
    texts = load_format(session.config.review.format)
    prompts = {prompt.prompt_id: prompt for prompt in session.prompts("eval")}
    review_params = replace(direct.params, max_tokens=session.config.review.max_tokens)
    reviews = [
        Group(
            "review",
            prompts[answer["prompt_id"]],
            1,
            answer["event_id"],
            messages=reflect_messages(texts, prompts[answer["prompt_id"]], answer["completion"]),
            opening=texts.opening,
            is_judged=False,
        )
        for answer in _rollouts(session, direct.iteration, "evaluation")
    ]
    name = "evaluation_review"
    generate_phase(session, Phase(direct.iteration, name, reviews, review_params, has_turns=False))
    notes = _note_reviews(session, direct.iteration, prompts, texts)
    again = [
        Group(
            "second_attempt",
            prompts[note["prompt_id"]],
            1,
            note["rollout_id"],
            messages=second_messages(texts, prompts[note["prompt_id"]], note["review"]),
        )
        for note in notes
    ]
    generate_phase(session, Phase(direct.iteration, "reflection", again, direct.params))


def _note_reviews(
    session: Session, iteration: int, prompts: Mapping[str, Prompt], texts: ReviewFormat
) -> list[Row]:
    """Append how the reviews are read, as in training, and return the rows."""
    answers = {r["event_id"]: r for r in _rollouts(session, iteration, "evaluation")}
    shown = {"feedback": "", "memory_json": "[]", "memory_tokens": 0}
    rows = []
    for review in _rollouts(session, iteration, "review"):
        prompt, answer = prompts[review["prompt_id"]], answers[review["parent_id"]]
        asked = {"attempt_id": answer["event_id"], "prompt_id": prompt.prompt_id} | shown
        place = {"iteration": iteration, "rollout_id": review["event_id"]}
        rows.append(place | asked | review_facts(texts, prompt, answer, review))
    key = f"i{iteration:06d}-reviews"
    return session.writer.append({"reviews": rows}, batch_key=key).rows["reviews"]


def mode_cost(store: Store, stream: str, version: int, mode: Mode) -> Cost:
    """Return what the answers of a mode took in an evaluation of a policy version."""
    rollouts = store.read("rollouts", run_id=stream, iteration=version)
    used = [row for row in rollouts if row["role"] in ROLES[mode] and row["status"] == "ok"]
    batches = {row["batch_key"]: row["generate_s"] for row in used}
    answers = _last_answers(used)
    return Cost(
        mode,
        len(answers),
        sum(row["num_completion_tokens"] for row in used),
        sum(row["num_completion_tokens"] for row in _of(used, "review")),
        len(_of(answers, "evaluation")) if mode == "reflect" else 0,
        sum(batches.values()),
    )


def _last_answers(rollouts: Sequence[Row]) -> list[Row]:
    """Return the second attempt at each prompt, the first where there is none."""
    answers = {row["prompt_id"]: row for row in _of(rollouts, "evaluation")}
    return [*(answers | {r["prompt_id"]: r for r in _of(rollouts, "second_attempt")}).values()]


def _rollouts(session: Session, iteration: int, role: str) -> list[Row]:
    rows = session.store.read("rollouts", run_id=session.run_id, iteration=iteration)
    return [row for row in _of(rows, role) if row["status"] == "ok"]


def _of(rollouts: Sequence[Row], role: str) -> list[Row]:
    return [row for row in rollouts if row["role"] == role]
