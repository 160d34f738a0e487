"""Self-review in training: failures are reviewed, tried again, compared, and the fix distilled."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import storage
from flows import embedding, tasks
from flows.auditing import audit
from flows.commands import TrainRequest
from flows.commands import train as train_command
from flows.config import ConfigError, RunConfig, load_config
from flows.evaluate import EvaluateRequest, evaluate
from flows.metrics import distilled_share, iteration_metrics
from flows.planned import planned_steps
from flows.progress import Progress
from flows.reflecting import mode_cost
from flows.stepping import retake
from flows.summary import print_summary, run_summary
from flows.train import train
from flows.wiring import open_session, session_of, stored_config
from rrl_core.policy.sentences import load_sentence_model
from rrl_core.review import arms
from rrl_core.review.formats import load_format
from rrl_core.tasks.registry import build_task
from tests.flows.conftest import RUN_ID, fingerprint, run_here
from tests.flows.scripted_reviews import scripted_run, scripted_sampler
from tests.policy_model.models import bert_folder
from tests.storage.review_rows import ReviewRun
from tests.storage.rows import learned, planned

TABLES = ("rollouts", "rollout_tokens", "scores", "reviews", "embeddings", "distillations",
          "replays", "learned_samples", "updates", "policies")  # fmt: skip


NUM_ITERATIONS = 4
TASK = {
    "reward": "rrl_core.tasks.dense:contains_digit", "num_train": 12, "num_eval": 6,
}  # fmt: skip


def review_config(*overrides: str) -> RunConfig:
    ours = ["tracking.mlflow=false", f"run.iterations={NUM_ITERATIONS}"]
    return load_config(Path("smoke-review"), [*ours, *overrides])


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run of the smoke configuration with reviews; read it, never write to it."""
    return run_here(tmp_path_factory.mktemp("reviewed") / "store", review_config())


def read(store: storage.Store, table: str, **where: Any) -> list[dict[str, Any]]:
    return store.read(table, run_id=RUN_ID, **where)


def test_one_failed_attempt_of_a_prompt_is_reviewed_and_each_review_tried(reviewed: storage.Store):
    rollouts = {r["event_id"]: r for r in read(reviewed, "rollouts")}
    rewards = {s["target_id"]: s["value"] for s in read(reviewed, "scores")}
    reviews = [r for r in rollouts.values() if r["role"] == "review"]
    assert reviews
    of_attempt = Counter(r["parent_id"] for r in reviews)
    assert set(of_attempt.values()) == {3}
    for attempt_id in of_attempt:
        attempt = rollouts[attempt_id]
        group = [r for r in rollouts.values() if r["group_id"] == attempt["group_id"]]
        failed = [r["sample_index"] for r in group if rewards[r["event_id"]] < 1]
        assert attempt["sample_index"] == min(failed)
    seconds = [r for r in rollouts.values() if r["role"] == "second_attempt"]
    assert sorted(r["parent_id"] for r in seconds) == sorted(r["event_id"] for r in reviews)
    gated = {(r["iteration"], r["prompt_id"]) for r in reviews}
    attempts = [r for r in rollouts.values() if r["role"] == "attempt"]
    failing = {(r["iteration"], r["prompt_id"]) for r in attempts if rewards[r["event_id"]] < 1}
    assert gated == failing


def test_a_second_attempt_sees_the_review_and_not_the_attempt(reviewed: storage.Store):
    tokens = {t["rollout_id"]: t for t in read(reviewed, "rollout_tokens")}
    rollouts = {r["event_id"]: r for r in read(reviewed, "rollouts")}
    for row in read(reviewed, "reviews"):
        [second] = [r for r in rollouts.values() if r["parent_id"] == row["rollout_id"]]
        given = bytes(i for i in tokens[second["event_id"]]["prompt_ids"] if i < 256).decode()
        asked = bytes(i for i in tokens[row["rollout_id"]]["prompt_ids"] if i < 256).decode()
        attempt = rollouts[row["attempt_id"]]["completion"].strip()
        if len(attempt) > 3:
            assert attempt in asked
            assert attempt not in given


def test_a_review_and_its_second_attempt_share_what_the_second_earned(reviewed: storage.Store):
    replays = read(reviewed, "replays")
    rollouts = {r["event_id"]: r for r in read(reviewed, "rollouts")}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in replays:
        if row["unit"] == "second_attempt":
            groups.setdefault(row["group_id"], []).append(row)
    reviews = {r["rollout_id"]: r for r in replays if r["unit"] == "review"}
    assert groups
    for rows in groups.values():
        mean = sum(row["reward"] for row in rows) / len(rows)
        for row in rows:
            assert row["advantage"] == pytest.approx(row["reward"] - mean)
            review = reviews[rollouts[row["rollout_id"]]["parent_id"]]
            assert (review["advantage"], review["reward"]) == (row["advantage"], row["reward"])


def test_a_distilled_answer_follows_the_prompt_alone(reviewed: storage.Store):
    tokens = {t["rollout_id"]: t for t in read(reviewed, "rollout_tokens")}
    targets = {row["event_id"]: row for row in read(reviewed, "distillations")}
    assert targets
    seen = 0
    for iteration in range(1, NUM_ITERATIONS + 1):
        for _, samples in planned_steps(reviewed, RUN_ID, iteration):
            for sample in samples:
                if sample.term == "distill":
                    target = targets[sample.rollout_id]
                    attempt, second = tokens[target["attempt_id"]], tokens[target["rollout_id"]]
                    assert list(sample.prompt_ids) == attempt["prompt_ids"]
                    assert list(sample.completion_ids) == second["completion_ids"]
                    assert sample.sampler_logprobs is None
                    seen += 1
    assert seen == len(targets)


def test_distilled_sequences_are_in_no_denominator(reviewed: storage.Store):
    replays = read(reviewed, "replays")
    for update in read(reviewed, "updates"):
        mine = [r for r in replays if r["iteration"] == update["iteration"]]
        assert update["num_sequences"] == sum(r["unit"] != "distill" for r in mine)


def test_controls_are_scored_and_never_learned_from(reviewed: storage.Store):
    controls = [r for r in read(reviewed, "rollouts") if r["role"] == "control"]
    assert controls
    scored = {s["target_id"] for s in read(reviewed, "scores")}
    assert {r["event_id"] for r in controls if r["arm"] != "no_memory_review"} <= scored
    learned = {r["rollout_id"] for r in read(reviewed, "replays")}
    assert not learned & {r["event_id"] for r in controls}


def test_the_audit_confirms_a_run_with_reviews(reviewed: storage.Store):
    audited = list(audit(reviewed, RUN_ID, review_config()))
    assert [str(d) for a in audited for d in a.differences] == []
    assert len(audited) == NUM_ITERATIONS


def test_a_step_with_distilled_answers_is_taken_again_to_the_same_adapter(reviewed: storage.Store):
    iteration = read(reviewed, "distillations")[0]["iteration"]
    with Progress(quiet=True) as progress:
        again = retake(reviewed, RUN_ID, review_config(), iteration, progress)
    assert again.digest == again.recorded_digest
    assert again.is_same


def test_what_was_sampled_is_counted_by_role(reviewed: storage.Store):
    sampled = run_summary(reviewed, RUN_ID)["sampled"]
    rollouts = read(reviewed, "rollouts")
    num = {(row["role"], row["arm"]): row["num_rollouts"] for row in sampled}
    assert num == Counter((r["role"], r["arm"]) for r in rollouts)
    assert num["attempt", None] == NUM_ITERATIONS * 6 * 4
    tokens = {(row["role"], row["arm"]): row["num_tokens"] for row in sampled}
    assert tokens["review", None] == sum(
        r["num_completion_tokens"] for r in rollouts if r["role"] == "review"
    )


def test_the_budget_is_printed_against_that_of_fresh_attempts_alone(
    reviewed: storage.Store, capsys: pytest.CaptureFixture[str]
):
    sampled = [r for r in read(reviewed, "rollouts") if r["role"] != "evaluation"]
    attempts = [r for r in sampled if r["role"] == "attempt"]
    num_tokens, num_fresh = (
        sum(r["num_completion_tokens"] for r in rows) for rows in (sampled, attempts)
    )
    print_summary(run_summary(reviewed, RUN_ID), reviewed, reviewed.path)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(sampled):,} rollouts, {num_tokens:,} tokens: attempt 96 (" in printed
    assert f"{len(sampled) / 96:.2f} times as large by rollouts" in printed
    assert f"{num_tokens / num_fresh:.2f} times by tokens" in printed


@pytest.mark.parametrize(("num_distilled", "is_warned"), [(6, False), (7, True)])
def test_above_three_tenths_of_distilled_tokens_a_warning_is_given(
    num_distilled: int, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = ReviewRun(storage.open(tmp_path / "store", create=True))
    run.begin(1)
    failed = run.attempt(0.0)
    review_id = run.review(failed)
    target = run.distil(run.second(review_id, 1.0), review_id)
    run.wait("replays", planned(failed, 2))
    run.wait("replays", planned(review_id, 3, unit="review"))
    for rollout_id, num_tokens in ((failed, 10), (review_id, 4), (target, num_distilled)):
        run.wait("learned_samples", learned(rollout_id, num_loss_tokens=num_tokens))
    run.commit()
    share = distilled_share(run.store, run.run_id, 1)
    assert share == num_distilled / (14 + num_distilled)
    with Progress() as progress:
        session = SimpleNamespace(store=run.store, run_id=run.run_id, progress=progress)
        tasks._note_distilled(session, 1)  # type: ignore[arg-type]
    warned = " ".join(capsys.readouterr().err.split())
    assert ("33% of the tokens trained on are distilled; above 30%" in warned) == is_warned


def test_reviews_are_measured(reviewed: storage.Store):
    metrics = iteration_metrics(reviewed, RUN_ID, 2)
    assert 0 < metrics["review/trigger_rate"] <= 1
    assert 0 <= metrics["review/success_rate"] <= 1
    assert metrics["distill/count"] == len(read(reviewed, "distillations", iteration=2))
    assert "review/lift_vs_retry" not in metrics  # none below 30 comparisons


def test_without_a_gate_nothing_is_reviewed(tmp_path: Path):
    config = review_config("review.gate=off", "run.iterations=1", "evaluation.every=off")
    store = run_here(tmp_path / "store", config)
    assert {r["role"] for r in read(store, "rollouts")} == {"attempt"}
    assert all(r["weight"] is None for r in read(store, "replays"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.algorithm=ppo"], r"`review.gate` = 'sample' .*`learner.algorithm` = 'ppo'"),
        (["review.reviews=1"], r"`review.reviews` = 1"),
        (["review.format=v0"], r"review format.*v1.*v0"),
        (["review.embedding_model=m"], r"`review.embedding_model` = 'm'.*`review.memory` = 'bm25'"),
        (["review.max_tokens=2048"], r"`review.max_tokens` = 2048"),
        (["run.mode=offline", "evaluation.every=off"], r"`run.mode` = 'offline'"),
    ],
)
def test_settings_that_contradict_reviews_are_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        review_config(*overrides)


def test_a_resumed_run_reviews_the_same(tmp_path: Path, reviewed: storage.Store):
    store = storage.open(tmp_path / "store", create=True)
    real, calls = tasks.try_again, []

    def broken(run_id: str, iteration: int) -> int:
        calls.append(iteration)
        if len(calls) == 3:
            session_of(run_id).should_stop = True
        return real(run_id, iteration)

    with pytest.MonkeyPatch.context() as patch, Progress(quiet=True) as progress:
        patch.setattr(tasks, "try_again", broken)
        assert train(store, review_config(), RUN_ID, "none", progress) == "interrupted"
    with Progress(quiet=True) as progress:
        assert train(store, review_config(), RUN_ID, "none", progress) == "finished"
    assert fingerprint(store, tables=TABLES) == fingerprint(reviewed, tables=TABLES)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory, reviewed: storage.Store) -> storage.Store:
    """A copy of the reviewing run's store that may be written to."""
    path = tmp_path_factory.mktemp("copied") / "store"
    shutil.copytree(reviewed.path, path)
    return storage.open(path)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[storage.Store]:
    """A run of the scripted policy in which every prompt gets a control, forked at iteration 2."""
    path = tmp_path_factory.mktemp("scripted") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arms, "SHARE", 1.0)
        changes = ("tracking.keep_optimizer=all", f"run.iterations={NUM_ITERATIONS}")
        store = scripted_run(path, *changes)
        request = TrainRequest(None, (), None, "fork", "none", False, f"{RUN_ID}@2")
        with scripted_sampler():
            train_command(request, path, True)
        yield store


def test_every_arm_gets_its_answers(scripted: storage.Store):
    controls = [r for r in read(scripted, "rollouts") if r["role"] == "control"]
    assert {r["arm"] for r in controls} == {*arms.ARMS, "no_memory_review"}
    assert all(row["kind"] == "reward" for row in read(scripted, "scores"))


def test_an_unchanged_fork_reviews_and_learns_what_its_parent_did(scripted: storage.Store):
    def told(run_id: str) -> list[tuple[Any, ...]]:
        rows = scripted.read("policies", run_id=run_id)
        digests = [row["adapter_digest"] for row in rows if row["policy_version"] >= 2]
        rollouts = scripted.read("rollouts", run_id=run_id)
        kept = ("role", "arm", "prompt_id", "seed", "completion")
        asked = [tuple(r[k] for k in kept) for r in rollouts if r["iteration"] > 2]
        shown = [r["memory_tokens"] for r in scripted.read("reviews", run_id=run_id)][-30:]
        assert any(shown)
        return [tuple(digests), tuple(shown), *asked]

    assert told("fork") == told(RUN_ID)


def test_the_audit_asks_again_what_was_reviewed_shown_and_compared(scripted: storage.Store):
    for run_id in (RUN_ID, "fork"):
        config = stored_config(scripted, run_id)
        audited = list(audit(scripted, run_id, config))
        assert [str(d) for a in audited for d in a.differences] == []
        assert len(audited) > 2


def test_memory_is_shown_from_earlier_iterations_and_never_of_the_same_problem(
    scripted: storage.Store,
):
    reviews = {row["rollout_id"]: row for row in read(scripted, "reviews")}
    shown = [(row, m) for row in reviews.values() for m in json.loads(row["memory_json"])]
    assert shown
    for row, entry in shown:
        source = reviews[entry["review_id"]]
        assert source["iteration"] < row["iteration"]
        assert source["prompt_id"] != row["prompt_id"]
        assert source["status"] == "ok"


def test_reviews_of_another_run_are_shown_where_the_whole_store_is_asked(tmp_path: Path):
    path = tmp_path / "store"
    scripted_run(path, "run.iterations=2", "evaluation.every=off")
    config = ("run.iterations=1", "evaluation.every=off", "review.memory_runs=store")
    store = scripted_run(path, *config, run_id="second")
    shown = [row for row in store.read("reviews", run_id="second") if row["memory_tokens"]]
    assert shown
    others = {row["review_id"] for row in store.view("memory", arguments={"run": RUN_ID})}
    assert {m["review_id"] for row in shown for m in json.loads(row["memory_json"])} <= others


def test_a_sentence_model_ranks_memory_and_its_weights_are_held_to(tmp_path: Path):
    path, folder = tmp_path / "store", bert_folder(tmp_path / "encoder")
    changes = ("review.memory=embedding", f"review.embedding_model={folder}",
               "evaluation.every=off", "run.iterations=3")  # fmt: skip
    store = scripted_run(path, *changes)
    name = load_sentence_model(str(folder)).name
    stored = read(store, "embeddings")
    assert {(row["model"], len(row["vector"])) for row in stored} == {(name, 32)}
    vectors = {row["target_id"]: np.array(row["vector"]) for row in stored}
    prompt_of = {row["rollout_id"]: row["prompt_id"] for row in read(store, "reviews")}
    shown = [(r, m) for r in read(store, "reviews") for m in json.loads(r["memory_json"])]
    assert shown
    for row, entry in shown:
        cosine = vectors[row["prompt_id"]] @ vectors[prompt_of[entry["review_id"]]]
        assert entry["similarity"] == pytest.approx(cosine, abs=1e-5)
    config = stored_config(store, RUN_ID)
    assert [str(d) for a in audit(store, RUN_ID, config) for d in a.differences] == []
    embedding._sentence_model.cache_clear()
    bert_folder(folder, seed=2)
    with (
        pytest.raises(ConfigError, match="weights of the sentence model changed"),
        Progress(quiet=True) as progress,
        open_session(store, RUN_ID, config, progress),
    ):
        pass


def test_a_direct_evaluation_uses_no_review_and_a_reflective_one_counts_them(copied: storage.Store):
    with Progress(quiet=True) as progress:
        direct = EvaluateRequest(RUN_ID, prompts=4)
        [row, *_] = evaluate(copied, direct, progress)
        both = EvaluateRequest(RUN_ID, prompts=4, mode="reflect")
        rows = {r["name"]: r for r in evaluate(copied, both, progress)}
    version = row["policy_version"]
    assert {r["role"] for r in copied.read("rollouts", run_id=direct.stream)} == {"evaluation"}
    asked = {p.prompt_id: p.messages for p in build_task("arithmetic", TASK).prompts("eval")}
    tokens = {t["rollout_id"]: t for t in copied.read("rollout_tokens", run_id=direct.stream)}
    for rollout in copied.read("rollouts", run_id=direct.stream):
        given = bytes(i for i in tokens[rollout["event_id"]]["prompt_ids"] if i < 256).decode()
        assert given == f"user: {asked[rollout['prompt_id']][-1]['content']}\nassistant: "
    assert mode_cost(copied, direct.stream, version, "direct").num_review_tokens == 0
    took = mode_cost(copied, both.stream, version, "reflect")
    notes = copied.read("reviews", run_id=both.stream)
    reviews = [r for r in copied.read("rollouts", run_id=both.stream) if r["role"] == "review"]
    told = [(row["rollout_id"], row["attempt_id"], row["prompt_id"]) for row in notes]
    assert told == [(r["event_id"], r["parent_id"], r["prompt_id"]) for r in reviews]
    asked_with = ("format_sha256", "feedback", "memory_json", "memory_tokens")
    assert {tuple(row[n] for n in asked_with) for row in notes} == {
        (load_format().sha256, "", "[]", 0)
    }
    assert not copied.read("reviews", run_id=direct.stream)
    assert {row["run_id"] for row in copied.view("memory")} <= {RUN_ID}
    assert set(rows) == {"held_out", "held_out_reflect"}
    assert took.num_answers == 4
    assert 0 < took.num_review_tokens < took.num_sampled_tokens
    assert rows["held_out"]["mean_score"] == row["mean_score"]
    expected = pytest.approx(took.num_sampled_tokens / 4)
    assert rows["held_out_reflect"]["mean_completion_tokens"] == expected


def second_success(store: storage.Store, since: int) -> float:
    """Return the success rate of second attempts from an iteration on."""
    seconds = {
        r["event_id"]
        for r in read(store, "rollouts")
        if r["role"] == "second_attempt" and r["iteration"] >= since
    }
    values = [s["value"] for s in read(store, "scores") if s["target_id"] in seconds]
    return sum(values) / len(values)


def held_out(store: storage.Store) -> tuple[float, float]:
    """Return the mean score of unseen problems before and after training."""
    scores = {row["iteration"]: row["mean_score"] for row in read(store, "evaluations")}
    return scores[0], scores[max(scores)]


@pytest.mark.slow
def test_memory_and_distillation_have_their_effects_and_lose_them_when_removed(tmp_path: Path):
    whole = scripted_run(tmp_path / "whole" / "store")
    short = ("run.iterations=4", "evaluation.every=off")
    forgetful = scripted_run(tmp_path / "forgetful" / "store", "review.memory=off", *short)
    undistilled = scripted_run(tmp_path / "undistilled" / "store", "review.distill_coef=0")
    # a review is right by luck (1 in 4), or because a lesson of its class is before it
    assert second_success(whole, since=3) > 0.7
    assert second_success(forgetful, since=3) < 0.5
    (before, after), (_, after_without) = held_out(whole), held_out(undistilled)
    assert before < 0.25
    assert after > 0.5
    assert after_without < 0.25
