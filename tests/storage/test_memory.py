"""The verified reviews: which they are, in which order, and what came of showing them."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

import storage
from tests.storage.review_rows import ReviewRun
from tests.storage.rows import Row, pin, prompt, score

COLUMNS = (
    "run_id", "iteration", "position", "review_id", "prompt_id", "task", "messages_json",
    "attempt_id", "second_attempt_id", "what_went_wrong", "what_to_do", "review", "leak",
    "num_tokens", "policy_version", "num_helpful", "num_harmful", "num_shown",
)  # fmt: skip
SEED = 7


@pytest.fixture
def store(memory_path: Path) -> storage.Store:
    return storage.open(memory_path / "store", create=True)


@pytest.fixture
def run(store: storage.Store) -> ReviewRun:
    run = ReviewRun(store)
    run.prompt("p1")
    run.begin(1)
    return run


def ids(rows: list[Row]) -> list[str]:
    return [row["review_id"] for row in rows]


def test_a_review_is_verified_by_the_second_attempt_after_it(run: ReviewRun):
    failed = run.attempt(0.0)
    good = run.review(failed, leak="answer", num_tokens=11)
    second = run.second(good, 0.999)
    run.second(run.review(failed, status="malformed", what_went_wrong=None), 1.0)
    run.second(run.review(failed), 0.998)
    run.second(run.review(failed), None)
    run.review(failed)  # no second attempt yet
    unscorable = run.second(run.review(failed), None)
    run.wait("scores", score(unscorable, None))
    run.control("no_memory", run.review(failed, arm="no_memory_review"), 1.0)
    run.control("retry", failed, 1.0)
    run.commit()
    [entry] = run.memory()
    assert tuple(entry) == COLUMNS
    assert entry == {
        "run_id": "r1",
        "iteration": 1,
        "position": 0,
        "review_id": good,
        "prompt_id": "p1",
        "task": "arithmetic",
        "messages_json": "[]",
        "attempt_id": failed,
        "second_attempt_id": second,
        "what_went_wrong": "The sign.",
        "what_to_do": "Mind the sign.",
        "review": "The sign. Mind the sign.",
        "leak": "answer",
        "num_tokens": 11,
        "policy_version": 0,
        "num_helpful": 0,
        "num_harmful": 0,
        "num_shown": 0,
    }


def test_uses_are_counted_by_what_came_of_them_well_formed_or_not(run: ReviewRun):
    failed = run.attempt(0.0)
    first = run.review(failed)
    run.second(first, 1.0)
    run.begin(2)
    failed = run.attempt(0.0, "p2")
    helped = run.review(failed, "p2", shown=[first])
    run.second(helped, 1.0, "p2")
    run.second(run.review(failed, "p2", shown=[first], status="malformed"), 0.0, "p2")
    run.second(run.review(failed, "p2", shown=[first, helped]), None, "p2")
    run.review(failed, "p2", shown=["ro-never"])
    run.commit()
    counts = ("review_id", "position", "num_shown", "num_helpful", "num_harmful", "task")
    assert [tuple(row[name] for name in counts) for row in run.memory()] == [
        (first, 0, 3, 1, 1, "arithmetic"),
        (helped, 1, 1, 0, 0, None),  # whose prompt is not in the log
    ]


def test_the_newest_pinned_scorer_decides_whoever_judged_by_it(run: ReviewRun):
    failed = run.attempt(0.0)
    reviews = [run.review(failed) for _ in range(2)]
    seconds = [run.second(i, reward) for i, reward in zip(reviews, (1.0, 0.0), strict=True)]
    run.commit()
    judge = ReviewRun(run.store, "judge", kind="rescore")
    judge.append(
        scores=[score(i, v, scorer_version="2") for i, v in zip(seconds, (0.0, 1.0), strict=True)]
    )
    assert ids(run.memory()) == reviews[:1]
    run.append(views_pinned=[pin(2, '{"exact": "2"}')])
    assert ids(run.memory()) == reviews[1:]


def verified(run: ReviewRun, iteration: int, shown: list[str]) -> str:
    """Commit an iteration with one review that led to a success."""
    run.begin(iteration)
    review_id = run.review(run.attempt(0.0), shown=shown)
    run.second(review_id, 1.0)
    run.commit()
    return review_id


def test_a_run_has_its_own_memory_and_a_fork_what_its_parent_had(store: storage.Store):
    parent, other = ReviewRun(store, "r1"), ReviewRun(store, "r3")
    first = verified(parent, 1, [])
    number = store.head().number
    late = verified(parent, 1, [first])  # the fork was begun before
    foreign = verified(other, 1, [first])
    forked = {"parent_run_id": "r1", "parent_iteration": 1, "parent_as_of": number}
    fork = ReviewRun(store, "r2", **forked)
    own = verified(fork, 2, [first])
    entries = {
        name: [(row["review_id"], row["position"], row["num_helpful"]) for row in rows]
        for name, rows in {n: parent.memory(run=n) for n in ("r1", "r2", "r3", None)}.items()
    }
    assert entries == {
        "r1": [(first, 0, 1), (late, 1, 0)],
        "r2": [(first, 0, 1), (own, 1, 0)],  # as if the parent had ended where it was forked
        "r3": [(foreign, 0, 0)],
        None: [(first, 0, 3), (late, 1, 0), (foreign, 2, 0), (own, 3, 0)],
    }
    assert parent.memory(run="nobody") == []
    assert store.view("memory", run_id="r2") == parent.memory()[3:]


def test_an_answer_as_of_a_commit_stays_also_after_compaction(run: ReviewRun):
    known: list[str] = []
    answers = {}
    for iteration in range(1, 4):
        known.append(verified(run, iteration, known[-2:]))
        answers[run.store.head().number] = run.memory()
    assert [len(rows) for rows in answers.values()] == [1, 2, 3]
    assert list(storage.compact(run.store, min_segments=2))
    again = storage.open(run.store.path)
    for number, expected in answers.items():
        for arguments in ({}, {"run": "r1"}):
            assert again.view("memory", arguments=arguments, as_of=number) == expected
        called = again.sql(f"from memory({number}) order by position").fetchall()
        assert called == [tuple(row.values()) for row in expected]


def test_the_view_says_what_loops_over_the_rows_say(store: storage.Store):
    chance = Random(SEED)
    runs = [ReviewRun(store, "r1"), ReviewRun(store, "r2")]
    known: list[str] = []
    for iteration in range(1, 7):
        if iteration == 4:
            forked = {"parent_run_id": "r1", "parent_iteration": 2}
            runs.append(ReviewRun(store, "r3", **forked, parent_as_of=store.head().number))
        for run in runs:
            improvise(chance, run, iteration, known)
    whole = {"r1": 6, "r2": 6, "r3": 6}  # the last iteration of each
    of_run = {"r1": {"r1": 6}, "r2": {"r2": 6}, "r3": {"r3": 6, "r1": 2}, None: whole}
    seen = set()
    for name, sources in of_run.items():
        expected = oracle(store, sources)
        assert store.view("memory", arguments={"run": name}) == expected
        seen |= {(r["num_helpful"] > 0, r["num_harmful"] > 0, r["num_shown"] > 0) for r in expected}
    assert len(expected) > 20
    assert len(seen) >= 4


def improvise(chance: Random, run: ReviewRun, iteration: int, known: list[str]) -> None:
    """One iteration of whatever may happen to reviews."""
    run.begin(iteration)
    if iteration == 1:
        for prompt_id in ("p1", "p2"):
            run.wait("prompts", prompt(prompt_id, run.run_id))
    reviewed = []
    for prompt_id in chance.sample(["p1", "p2", "p3"], 2):
        failed = run.attempt(0.0, prompt_id)
        for _ in range(3):
            shown = chance.sample(known, min(len(known), chance.choice([0, 0, 1, 2])))
            status = chance.choice(["ok", "ok", "ok", "malformed", "parrot"])
            leak = chance.choice(["none", "answer", "gold"])
            tokens = chance.randrange(5, 50)
            review_id = run.review(
                failed, prompt_id, shown=shown, status=status, leak=leak, num_tokens=tokens
            )
            reviewed.append(review_id)
            for _ in range(chance.choice([0, 1, 1, 1, 2])):
                run.second(review_id, chance.choice([None, 0.0, 0.5, 0.999, 1.0]), prompt_id)
    run.commit()
    known += reviewed


def oracle(store: storage.Store, sources: dict[str, int]) -> list[Row]:
    """The view by loops: over the reviews of these runs, up to these iterations."""
    rows = {name: store.read(name) for name in ("rollouts", "reviews", "scores", "prompts")}
    rollouts = {row["event_id"]: row for row in rows["rollouts"]}
    values = {row["target_id"]: row["value"] for row in rows["scores"]}
    prompts = {(row["run_id"], row["prompt_id"]): row for row in rows["prompts"]}
    answers: dict[str, list[tuple[str, bool]]] = {}
    for row in rows["rollouts"]:
        value = values.get(row["event_id"])
        if row["role"] == "second_attempt" and value is not None:
            answers.setdefault(row["parent_id"], []).append((row["event_id"], value >= 0.999))
    own = [r for r in rows["reviews"] if r["iteration"] <= sources.get(r["run_id"], -1)]
    found: list[dict[str, Any]] = []
    for row in own:
        good = [i for i, is_ok in answers.get(row["rollout_id"], []) if is_ok]
        if row["status"] != "ok" or not good:
            continue
        shown = [
            answers.get(later["rollout_id"], [])
            for later in own
            if any(s["review_id"] == row["rollout_id"] for s in json.loads(later["memory_json"]))
        ]
        outcomes = [is_ok for of_one in shown for _, is_ok in of_one]
        sampled = rollouts[row["rollout_id"]]
        place = (row["run_id"], row["prompt_id"])
        asked = prompts.get(place, {})
        kept = ("run_id", "iteration", "prompt_id", "attempt_id", "what_went_wrong", "what_to_do",
                "review", "leak")  # fmt: skip
        found.append(
            {name: row[name] for name in kept}
            | {
                "position": len(found),
                "review_id": row["rollout_id"],
                "task": asked.get("task"),
                "messages_json": asked.get("messages_json"),
                "second_attempt_id": good[0],
                "num_tokens": sampled["num_completion_tokens"],
                "policy_version": sampled["policy_version"],
                "num_helpful": sum(outcomes),
                "num_harmful": len(outcomes) - sum(outcomes),
                "num_shown": len(shown),
            }
        )
    return found
