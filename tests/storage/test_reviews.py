"""What came of reviews, and what they change elsewhere; expected numbers are worked out by hand."""

import math
from pathlib import Path

import pytest

import storage
from storage import console
from storage.sft import sft_examples
from tests.storage.review_rows import ReviewRun
from tests.storage.rows import Row, learned, planned, update

ROUNDING = 1e-12
CONTROLS = ("retry", "no_memory", "blank", "raw_feedback", "random_review")


@pytest.fixture
def store(memory_path: Path) -> storage.Store:
    return storage.open(memory_path / "store", create=True)


@pytest.fixture
def run(store: storage.Store) -> ReviewRun:
    run = ReviewRun(store)
    for prompt_id in ("p1", "p2", "p3"):
        run.prompt(prompt_id)
    run.begin(1)
    return run


def picked(rows: list[Row], *names: str) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


# --- review_outcomes


def test_an_outcome_is_a_second_attempt_with_its_review(run: ReviewRun):
    failed = run.attempt(0.0)
    earlier = run.review(failed)
    review_id = run.review(failed, shown=[earlier, "ro-x"], leak="gold", status="malformed")
    second = run.second(review_id, 0.999)
    run.distil(second, review_id)
    run.commit()
    [outcome] = run.store.view("review_outcomes")
    assert outcome == {
        "run_id": "r1",
        "iteration": 1,
        "prompt_id": "p1",
        "attempt_id": failed,
        "arm": "review",
        "rollout_id": second,
        "review_id": review_id,
        "review_status": "malformed",
        "leak": "gold",
        "num_memory": 2,
        "reward": 0.999,
        "is_success": True,
        "num_tokens": 10,
        "num_review_tokens": 7,
        "is_distilled": True,
        "policy_version": 0,
    }


def test_every_answer_has_an_outcome_scored_or_not_and_no_review_has_one(run: ReviewRun):
    failed = run.attempt(0.0)
    run.second(run.review(failed), None)
    bare = run.review(failed, arm="no_memory_review")
    for arm in CONTROLS:
        run.control(arm, bare if arm == "no_memory" else failed, 0.0)
    run.answer("control", None, "p1", failed, arm="retry", status="error")
    run.commit()
    names = ("arm", "attempt_id", "review_id", "num_review_tokens", "num_memory", "is_success")
    assert picked(run.store.view("review_outcomes"), *names) == [
        ("blank", failed, None, None, None, False),
        ("no_memory", failed, bare, 7, 0, False),
        ("random_review", failed, None, None, None, False),
        ("raw_feedback", failed, None, None, None, False),
        ("retry", failed, None, None, None, False),
        ("review", failed, run.store.read("reviews")[0]["rollout_id"], 7, 0, None),
    ]


# --- review_lifts


def gated(run: ReviewRun, prompt_id: str, treated: list[float], control: float | None, leak: str):
    """A gated prompt with second attempts and one answer of the arm `retry`."""
    failed = run.attempt(0.0, prompt_id)
    for reward in treated:
        run.second(run.review(failed, prompt_id, leak=leak), reward, prompt_id)
    run.control("retry", failed, control, prompt_id)


def test_a_lift_is_the_mean_paired_difference_from_thirty_pairs_on(run: ReviewRun):
    for n in range(29):
        rewards = [1.0, 1.0] if n < 18 else [0.0]
        gated(run, f"p{n:02}", rewards, float(n >= 24), "none" if n < 28 else "answer")
    gated(run, "p90", [1.0], None, "none")  # no pair: its control has no score
    run.control("blank", run.attempt(0.0, "p91"), 1.0, "p91")  # nor has this: no second attempt
    before = run.commit()
    gated(run, "p92", [1.0, 0.0, 0.5, 1.0], 1.0, "none")
    run.commit()
    after = {row["leak"]: row for row in run.store.view("review_lifts")}
    assert list(after) == ["all", "answer", "none"]
    # treated: 18 of one, one of a half, 11 of zero; control: 5 + 1 of one. Differences: 18 of 1,
    # 5 of -1, one of -1/2, 6 of 0; their mean 12.5 / 30, the sum of squares 23.25
    variance = (23.25 - 12.5**2 / 30) / 29
    half_width = 1.96 * math.sqrt(variance / 30)
    assert after["all"] == {
        "run_id": "r1",
        "arm": "retry",
        "leak": "all",
        "num": 30,
        "treated": pytest.approx(18.5 / 30, abs=ROUNDING),
        "control": pytest.approx(6 / 30, abs=ROUNDING),
        "lift": pytest.approx(12.5 / 30, abs=ROUNDING),
        "ci_low": pytest.approx(12.5 / 30 - half_width, abs=ROUNDING),
        "ci_high": pytest.approx(12.5 / 30 + half_width, abs=ROUNDING),
    }
    few = ("num", "treated", "control", "lift", "ci_low", "ci_high")
    assert picked([after["answer"]], *few) == [(1, 0.0, 1.0, None, None, None)]
    past = run.store.view("review_lifts", as_of=before)
    treated, control = pytest.approx(18 / 29), pytest.approx(5 / 29)
    assert picked(past[:1], *few) == [(29, treated, control, None, None, None)]
    assert list(storage.compact(run.store, min_segments=2))
    again = storage.open(run.store.path)
    assert again.view("review_lifts") == list(after.values())
    assert again.view("review_lifts", as_of=before) == past


def test_a_prompt_that_is_gated_again_is_another_pair(run: ReviewRun):
    gated(run, "p1", [1.0], 0.0, "none")
    run.begin(2)
    gated(run, "p1", [0.0], 1.0, "none")
    run.begin(3)
    failed = run.attempt(0.0)
    run.second(run.review(failed), 1.0)  # no control this time
    run.commit()
    rows = run.store.view("review_lifts")
    assert picked(rows[:1], "leak", "num", "treated", "control") == [("all", 2, 0.5, 0.5)]


# --- review_history


def test_review_history(run: ReviewRun):
    run.attempt(1.0, "p1")
    run.commit()  # iteration 1 has no review
    run.begin(2)
    for reward in (0.0, 1.0):
        run.attempt(reward, "p1")
    failed = run.attempt(0.5, "p2")
    run.attempt(None, "p3")
    for prompt_id in ("p1", "p2"):
        run.control("retry", failed, 1.0, prompt_id)
    run.review(failed, "p2", arm="no_memory_review", status="malformed")
    first = run.review(failed, "p2", leak="answer")
    good = run.second(first, 1.0, "p2")
    run.distil(good, first, "p2")
    run.second(run.review(failed, "p2", leak="gold", shown=[first], status="empty"), 0.0, "p2")
    run.second(run.review(failed, "p2", status="malformed"), None, "p2")
    number = run.commit()
    run.begin(3)
    for reward in (1.0, 0.0, 1.0, None):
        run.attempt(reward, "p2")
    run.attempt(0.0, "p1")
    run.commit()
    rows = run.store.view("review_history")
    assert rows[0] == {
        "run_id": "r1",
        "iteration": 2,
        "num_attempted": 3,
        "num_failed_prompts": 2,
        "num_gated": 1,
        "trigger_rate": pytest.approx(1 / 3),
        "num_reviews": 3,
        "num_ok": 1,
        "num_malformed": 1,
        "num_empty": 1,
        "num_truncated": 0,
        "num_parrot": 0,
        "frac_malformed": pytest.approx(1 / 3),
        "leak_answer": 1,
        "leak_gold": 1,
        "leak_rate": pytest.approx(2 / 3),
        "num_second_attempts": 3,
        "success_rate": 0.5,  # of the two with a reward
        "hit_rate": pytest.approx(1 / 3),
        "num_distilled": 1,
        "internalised_rate": None,  # distilled in this iteration
        "memory_size": 0,
    }
    names = ("iteration", "num_gated", "trigger_rate", "num_reviews", "leak_rate", "success_rate",
             "internalised_rate", "memory_size")  # fmt: skip
    rate = pytest.approx(2 / 3)  # p2's attempts with a reward
    assert picked(rows[1:], *names) == [(3, 0, 0.0, 0, None, None, rate, 1)]
    assert run.store.view("review_history", as_of=number) == rows[:1]
    assert list(storage.compact(run.store, min_segments=2))
    assert storage.open(run.store.path).view("review_history") == rows


def test_a_fork_remembers_what_its_parent_distilled_and_verified(run: ReviewRun):
    for iteration in (1, 2):
        run.begin(iteration)
        review_id = run.review(run.attempt(0.0, f"p{iteration}"), f"p{iteration}")
        run.distil(run.second(review_id, 1.0, f"p{iteration}"), review_id, f"p{iteration}")
        number = run.commit()
    forked = {"parent_run_id": "r1", "parent_iteration": 1, "parent_as_of": number}
    fork = ReviewRun(run.store, "r2", **forked)
    fork.begin(3)
    fork.attempt(1.0, "p2")  # distilled by the parent, but after the fork
    fork.review(fork.attempt(0.0, "p1"))
    fork.commit()
    [row] = run.store.view("review_history", run_id="r2")
    assert (row["internalised_rate"], row["memory_size"]) == (0.0, 1)


# --- sampled_budget


def test_a_budget_is_told_by_role_and_by_arm_of_the_controls(run: ReviewRun):
    failed = run.attempt(0.0)
    run.attempt(0.0, num_completion_tokens=5)
    run.second(run.review(failed), 1.0)
    run.control("retry", failed, 0.0)
    run.control("no_memory", run.review(failed, arm="no_memory_review", num_tokens=3), 0.0)
    run.answer("evaluation", 1.0, "p9")
    run.answer("attempt", None, "p9", status="error", num_completion_tokens=0)
    run.commit()
    columns = ("run_id", "role", "arm", "num_rollouts", "num_tokens", "is_training")
    rows = run.store.view("sampled_budget")
    assert tuple(rows[0]) == columns
    assert picked(rows, *columns[1:]) == [
        ("attempt", None, 2, 15, True),
        ("control", "no_memory", 1, 10, True),
        ("control", "no_memory_review", 1, 3, True),
        ("control", "retry", 1, 10, True),
        ("evaluation", None, 1, 10, False),
        ("review", None, 1, 7, True),
        ("second_attempt", None, 1, 10, True),
    ]


# --- other views


def test_the_audit_follows_a_distilled_sample_to_its_second_attempt(run: ReviewRun):
    failed = run.attempt(0.0)
    review_id = run.review(failed)
    second = run.second(review_id, 1.0)
    target = run.distil(second, review_id, weight=0.25, source_run_id="r1")
    run.wait("replays", planned(second, 0, unit="second_attempt", weight=0.5))
    run.wait("replays", planned(failed, 2))
    run.wait("updates", update())
    run.wait("learned_samples", learned(target, num_loss_tokens=9))
    run.commit()
    names = ("rollout_id", "distilled_rollout_id", "prompt_id", "role", "policy_version", "unit",
             "weight", "state", "num_loss_tokens")  # fmt: skip
    assert picked(run.store.view("replay_audit"), *names) == [
        (second, None, "p1", "second_attempt", 0, "second_attempt", 0.5, "learned", None),
        (target, second, "p1", "second_attempt", 0, "distill", 0.25, "learned", 9),
        (failed, None, "p1", "attempt", 0, "fresh", None, "learned", None),
    ]


UNTOUCHED = (
    "training_history", "prompt_history", "lost_prompts", "forgetting", "replay_buffer",
)  # fmt: skip


def test_reviews_and_what_comes_of_them_change_nothing_of_what_is_known_of_attempts(
    run: ReviewRun,
):
    failed = run.attempt(0.0)
    run.attempt(1.0)
    for iteration in (2, 3):
        run.begin(iteration)
        run.attempt(0.0)
    run.commit()
    before = {name: run.store.view(name) for name in UNTOUCHED}
    assert all(before.values())
    p_hat = {row["p_hat"] for row in run.store.view("judged_rollouts")}
    for prompt_id in ("p1", "p2"):
        review_id = run.review(failed, prompt_id)
        run.distil(run.second(review_id, 1.0, prompt_id), review_id, prompt_id)
        bare = run.review(failed, prompt_id, arm="no_memory_review")
        for arm in CONTROLS:
            run.control(arm, bare if arm == "no_memory" else failed, 1.0, prompt_id)
    run.commit()
    assert {name: run.store.view(name) for name in UNTOUCHED} == before
    of_p1 = [r for r in run.store.view("judged_rollouts") if r["prompt_id"] == "p1"]
    assert {row["p_hat"] for row in of_p1} == p_hat


def test_a_review_is_not_exported_as_an_answer(run: ReviewRun):
    failed = run.attempt(0.0)
    review_id = run.review(failed)
    second = run.second(review_id, 1.0)
    run.review(failed, arm="no_memory_review")
    run.commit()
    rows = "select event_id as rollout_id from rollouts where "
    [(_, example)] = sft_examples(run.store, rows + "role = 'second_attempt'")
    assert (example["prompt_id"], example["reward"]) == ("p1", 1.0)
    for condition in (f"event_id in ('{review_id}', '{second}')", "arm = 'no_memory_review'"):
        with pytest.raises(
            storage.QueryError, match=r"1 ids .* or reviews, which answer no prompt"
        ):
            list(sft_examples(run.store, rows + condition))


def test_the_story_of_a_review_tells_what_it_reviewed_and_what_came_of_it(run: ReviewRun):
    failed = run.attempt(0.0)
    shown = run.review(failed)
    review_id = run.review(failed, shown=[shown])
    second = run.second(review_id, 1.0)
    target = run.distil(second, review_id)
    run.wait("learned_samples", learned(target))
    bare = run.review(failed, arm="no_memory_review")
    control = run.control("no_memory", bare, 0.0)
    run.commit()

    def of(event_id: str) -> dict[str, list[str]]:
        key = {"reviews": "rollout_id", "child_scores": "target_id", "scores": "target_id"}
        key |= {"parent_reviews": "rollout_id", "shown_reviews": "rollout_id"}
        told = console.story(run.store, event_id)
        return {name: [r[key.get(name, "event_id")] for r in rows] for name, rows in told.items()}

    replay, sample = (run.store.read(t)[0]["event_id"] for t in ("replays", "learned_samples"))
    assert of(review_id) == {
        "rollouts": [review_id, second],
        "reviews": [review_id],
        "distillations": [target],
        "parent_rollouts": [failed],
        "shown_reviews": [shown],
        "child_scores": [second],
    }
    assert of(second) == {
        "rollouts": [second],
        "scores": [second],
        "distillations": [target],
        "replays": [replay],
        "learned_samples": [sample],
        "parent_rollouts": [review_id, failed],
        "parent_reviews": [review_id],
        "shown_reviews": [shown],
    }
    assert of(control) == {
        "rollouts": [control],
        "scores": [control],
        "parent_rollouts": [bare, failed],
        "parent_reviews": [bare],
    }
    assert of(target) == {
        "distillations": [target], "replays": [replay], "learned_samples": [sample],
    }  # fmt: skip
    assert sorted(of(failed)["reviews"]) == sorted([shown, review_id, bare])
