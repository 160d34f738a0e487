"""What changes over time: values between versions of a scorer, and what a run forgets."""

import math

import pytest

import storage
from tests.storage.replay_rows import Run
from tests.storage.rows import score

ROUNDING = 1e-12
Z = 1.959964  # the normal distribution's 97.5 % quantile

DRIFT = (
    "run_id", "scorer", "scorer_version", "previous_version", "num_targets", "mean_change",
    "mean_abs_change", "max_abs_change", "num_crossed", "correlation",
)  # fmt: skip
FORGETTING = (
    "iteration", "num_prompts_seen", "num_ever_solved", "num_lost", "num_recovered",
    "num_recovered_by_replay", "lost_rate",
)  # fmt: skip


def test_versions_are_compared_over_the_targets_both_judged(store: storage.Store):
    run, judge = Run(store), Run(store, "judge", kind="rescore")
    states = [run.cut(i) for i in run.sample([None] * 4)]
    judge.judge("v2", dict(zip(states, (0.2, 0.4, 0.6, 0.8), strict=True)), 1)
    run.judge("v1", dict(zip(states, (0.4, 0.4, 0.4, 1.0), strict=True)), 2)  # came later
    judge.judge("v3", {states[0]: 0.5, states[1]: 0.5, states[2]: None}, 3)
    first, second = store.view("value_drift")
    assert tuple(first) == DRIFT
    assert first == {
        "run_id": "r1",
        "scorer": "value",
        "scorer_version": "v1",
        "previous_version": "v2",
        "num_targets": 4,
        "mean_change": pytest.approx(0.05, abs=ROUNDING),  # (0.2 + 0 - 0.2 + 0.2) / 4
        "mean_abs_change": pytest.approx(0.15, abs=ROUNDING),
        "max_abs_change": pytest.approx(0.2, abs=ROUNDING),
        "num_crossed": 1,  # 0.6 became 0.4
        # deviations -0.3 -0.1 0.1 0.3 and -0.15 -0.15 -0.15 0.45
        "correlation": pytest.approx(0.18 / math.sqrt(0.2 * 0.27), abs=ROUNDING),
    }
    assert second == first | {
        "scorer_version": "v3",
        "previous_version": "v1",
        "num_targets": 2,
        "mean_change": pytest.approx(0.1, abs=ROUNDING),
        "mean_abs_change": pytest.approx(0.1, abs=ROUNDING),
        "max_abs_change": pytest.approx(0.1, abs=ROUNDING),
        "num_crossed": 2,  # 0.4 became 0.5, which is not below it
        "correlation": None,  # 0.4 twice, 0.5 twice
    }


def test_drift_is_told_for_each_run_and_scorer(store: storage.Store):
    runs, judge = [Run(store, name) for name in ("r1", "r2")], Run(store, "judge", kind="rescore")
    changes = {"r1": (1.0, 0.0, 1.0), "r2": (0.5, 0.75)}
    for run in runs:
        ids = run.sample([0.5] * len(changes[run.run_id]))
        newer = [
            score(i, v, scorer_version="2") for i, v in zip(ids, changes[run.run_id], strict=True)
        ]
        judge.append(scores=[*newer, score(ids[0], 1.0, scorer="other")])
    names = ("run_id", "scorer", "previous_version", "num_targets", "mean_change", "num_crossed")
    assert [tuple(row[n] for n in names) for row in store.view("value_drift")] == [
        ("r1", "exact", "1", 3, pytest.approx(0.5 / 3, abs=ROUNDING), 1),
        ("r2", "exact", "1", 2, 0.125, 0),
    ]
    past = [store.view("value_drift", as_of=store.head().number - n) for n in (2, 3)]
    assert [len(rows) for rows in past] == [1, 0]


def test_sums_of_changes_are_the_same_at_every_asking_and_after_compaction(store: storage.Store):
    run = Run(store)
    ids = run.sample([math.sin(n) ** 2 for n in range(200)])
    for version in ("2", "3"):
        run.append(
            scores=[
                score(i, math.cos(n * int(version)) ** 2, scorer_version=version)
                for n, i in enumerate(ids)
            ]
        )
    answers = {repr(store.view("value_drift")) for _ in range(3)}
    assert list(storage.compact(store, min_segments=2))
    answers |= {repr(storage.open(store.path).view("value_drift")) for _ in range(3)}
    assert len(answers) == 1


def test_what_is_lost_and_what_comes_back_iteration_by_iteration(store: storage.Store):
    run, idle = Run(store), Run(store, "r2")
    idle.pin(1)
    prompts = [f"p{n}" for n in range(1, 11)]
    run.pin(1)
    for prompt_id in prompts:
        run.sample([0.0 if prompt_id == "p3" else 1.0], prompt_id, 1)
    run.pin(2)
    for prompt_id in prompts:  # all but p2 (15 failures) and p3 (never solved) are lost
        run.sample([0.0] * (15 if prompt_id == "p2" else 16), prompt_id, 2)
    run.pin(3)
    run.sample([1.0], "p4", 3)
    for prompt_id in ("p5", "p10"):
        run.sample([1.0], prompt_id, 3, role="continuation", parent_id="st1")
    for prompt_id in ("p6", "p7"):
        run.pick("trajectory", f"ro-{prompt_id}", 3, prompt_id=prompt_id)
        run.sample([0.0], prompt_id, 3)
    run.sample([1.0], "p8", 3, role="retry")
    run.sample([1.0], "p9", 3)
    run.pin(4)
    run.sample([1.0], "p5", 4)  # its first success was the continuation: by replay
    for prompt_id in ("p7", "p10"):
        run.sample([0.0], prompt_id, 4)
    run.sample([0.0] * 16, "p9", 4)  # lost again
    run.pin(5)
    run.sample([1.0], "p6", 5)  # picked when it was tried last: by replay
    run.sample([1.0], "p7", 5)  # picked, but tried in vain since
    run.sample([1.0], "p10", 5)  # its first success was a continuation, tried in vain or not
    run.sample([0.0] * 16, "p8", 5)
    run.pin(6)
    run.sample([1.0, None], "p8", 6)  # by itself this time
    run.sample([0.0] * 40, "p1", 6, role="evaluation")
    run.pin(7)
    expected = [  # p1 stays lost
        (1, 10, 9, 0, 0, 0, 0.0),
        (2, 10, 9, 8, 0, 0, 8 / 9),
        (3, 10, 9, 5, 3, 1, 5 / 9),  # back: p4, p8 (by retry), p9
        (4, 10, 9, 5, 3, 2, 5 / 9),  # back: p4, p5, p8
        (5, 10, 9, 3, 5, 3, 3 / 9),  # back: p4, p5, p6, p7, p10
        (6, 10, 9, 2, 6, 3, 2 / 9),  # back: p4 to p8 and p10, by replay p5, p6, p10
        (7, 10, 9, 2, 6, 3, 2 / 9),
    ]
    rows = store.view("forgetting", run_id="r1")
    assert [tuple(row[n] for n in FORGETTING) for row in rows] == expected
    assert tuple(rows[0]) == ("run_id", *FORGETTING)
    [row] = store.view("forgetting", run_id="r2")
    assert tuple(row.values()) == ("r2", 1, 0, 0, 0, 0, 0, None)
    as_of = store.sql("select max(_commit) from views_pinned where iteration < 5").fetchall()[0][0]
    past = store.view("forgetting", run_id="r1", as_of=as_of)
    begun = (4, *expected[2][1:])  # nothing was sampled in it yet
    assert [tuple(row[n] for n in FORGETTING) for row in past] == [*expected[:3], begun]
    assert list(storage.compact(store, min_segments=2))
    assert storage.open(store.path).view("forgetting", run_id="r1") == rows


def test_sixteen_failures_are_what_the_wilson_interval_asks_for():
    def upper(num_ok: int, num: int) -> float:
        p = num_ok / num
        centre = p + Z**2 / (2 * num)
        spread = Z * math.sqrt(p * (1 - p) / num + Z**2 / (4 * num**2))
        return (centre + spread) / (1 + Z**2 / num)

    assert upper(0, 16) < 0.2 < min(upper(0, 15), upper(1, 16))


def test_the_last_sixteen_attempts_may_lie_in_several_iterations(store: storage.Store):
    run = Run(store)
    for iteration, rewards in enumerate(([0.0, 1.0] + [0.0] * 7, [0.0] * 8, [0.0], [1.0]), start=1):
        run.pin(iteration)
        run.sample(rewards, "p1", iteration)
    lost = [(row["iteration"], row["num_lost"]) for row in store.view("forgetting")]
    assert lost == [(1, 0), (2, 0), (3, 1), (4, 0)]  # 7, 15 and 16 failures since the success
