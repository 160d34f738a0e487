"""What the report asks of the log: numbers by hand, and the shares of what is chosen."""

from typing import Any

import pytest

import storage
from tests.storage.replay_rows import Run, pick
from tests.storage.review_rows import ReviewRun
from tests.storage.rows import learned, planned, update

ROUNDING = 1e-12
Row = dict[str, Any]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(storage.open(tmp_path_factory.mktemp("report") / "store", create=True))
    run.prompt()
    run.pin(1)
    return run


def test_units_are_told_apart_with_their_weights(run: Run):
    """Weights 1 and 3: (1 + 3)^2 / (2 (1 + 9)) = 0.8; ages 0 and 4 have the mean 2."""
    ids = run.sample([1.0, 0.0, 1.0])
    weights = {ids[0]: (1.0, 10), ids[1]: (3.0, 30), ids[2]: (0.5, 0)}
    run.append(
        replays=[
            planned(ids[0], 0, unit="trajectory", age=0, reward=1.0),
            planned(ids[1], 1, unit="trajectory", age=4, reward=0.0),
            planned(ids[2], 2, age=0, reward=1.0),
        ],
        learned_samples=[
            learned(i) | {"importance_mean": weight, "num_loss_tokens": num}
            for i, (weight, num) in weights.items()
        ],
        updates=[update()],
    )
    fresh, old = run.store.view("learning_by_unit", run_id="r1")
    assert (old["unit"], old["num_planned"], old["num_learned"]) == ("trajectory", 2, 2)
    assert (old["num_loss_tokens"], old["age_mean"], old["age_max"]) == (40, 2.0, 4)
    assert old["importance_mean"] == pytest.approx(2.0, abs=ROUNDING)
    assert old["ess_frac"] == pytest.approx(0.8, abs=ROUNDING)
    assert old["reward_mean"] == 0.5
    # A sample without a token in the loss was planned, not learned.
    assert (fresh["unit"], fresh["num_planned"], fresh["num_learned"]) == ("fresh", 1, 0)
    assert fresh["importance_mean"] is None


def test_the_spread_is_over_prompts(run: Run):
    """Means 0.5 and 1 of two prompts: their mean 0.75, their deviation sqrt(2 * 0.25^2)."""
    run.sample([1.0, 0.0])
    run.sample([1.0, None], "p2")
    [row] = run.store.view("reward_spread", run_id="r1")
    assert (row["num_prompts"], row["mean_of_prompts"]) == (2, 0.75)
    assert row["std_of_prompts"] == pytest.approx(0.125**0.5, abs=ROUNDING)


def test_the_buffer_is_counted_by_what_its_entries_are(run: Run):
    run.sample([1.0, 0.0, 0.0, 0.0])
    entries = run.buffer()
    counted = run.store.view("buffer_counts", arguments={"run": "r1"})
    assert sum(row["num_entries"] for row in counted) == len(entries) > 0
    for row in counted:
        fits = [
            entry
            for entry in entries
            if (entry["unit"], entry["eligibility_reason"])
            == (row["unit"], row["eligibility_reason"])
            and row["min_age"] <= entry["age"] <= row["max_age"]
        ]
        assert row["num_entries"] == len(fits)


def sampled(run: Run, num: int | None = None) -> list[Row]:
    given = {"run": "r1"} | ({} if num is None else {"num": num})
    return run.store.view("rollout_sample", arguments=given)


def test_the_newest_evaluation_comes_first_then_what_was_replayed_and_what_failed(run: Run):
    run.sample([1.0] * 2, iteration=1, role="evaluation")
    newest = run.sample([1.0] * 3, iteration=2, role="evaluation")
    attempts = run.sample([0.0] * 20)
    unscored = run.sample([None] * 5, "p2")
    run.append(picks=[pick("trajectory", i, 2, rollout_id=i) for i in attempts[:9]])
    rows = sampled(run, 15)  # at most 6 replayed, 3 failed
    assert [row["rank"] for row in rows] == list(range(1, 16))
    assert {row["rollout_id"] for row in rows[:3]} == {*newest}
    assert [row["why"] for row in rows] == (
        ["newest_evaluation"] * 3 + ["replayed"] * 6 + ["failed"] * 3 + ["even"] * 3
    )
    assert {row["rollout_id"] for row in rows[3:9]} < {*attempts[:9]}
    assert {row["rollout_id"] for row in rows[9:12]} < {*unscored}
    assert {row["num_rollouts"] for row in rows} == {30}
    everything = sampled(run)
    assert len(everything) == 30
    assert [row["why"] for row in everything].count("replayed") == 9


def test_iterations_take_turns(run: Run):
    for iteration in range(1, 6):
        run.sample([0.0] * (10 if iteration == 1 else 2), iteration=iteration)
    rows = sampled(run, 5)
    chosen = run.store.read("rollouts", event_ids=[row["rollout_id"] for row in rows])
    assert sorted(row["iteration"] for row in chosen) == [1, 2, 3, 4, 5]


def test_what_other_runs_sampled_is_there_where_it_was_learned_from(run: Run):
    other = Run(run.store, "r2")
    other.pin(1)
    [theirs, _] = other.sample([1.0, 0.0])
    [own] = run.sample([0.0])
    run.append(replays=[planned(theirs, unit="trajectory", source_run_id="r2")])
    rows = {row["rollout_id"]: row for row in sampled(run)}
    assert rows.keys() == {own, theirs}
    assert (rows[theirs]["source_run_id"], rows[theirs]["num_steps"]) == ("r2", 1)
    assert (rows[theirs]["reward"], rows[own]["num_steps"]) == (1.0, 0)


def test_a_distilled_second_attempt_counts_its_steps(tmp_path_factory: pytest.TempPathFactory):
    run = ReviewRun(storage.open(tmp_path_factory.mktemp("report") / "store", create=True))
    run.prompt("p1")
    run.begin(1)
    review = run.review(run.attempt(0.0))
    second = run.second(review, 1.0)
    run.distil(second, review)
    run.commit()
    steps = {row["rollout_id"]: row["num_steps"] for row in sampled(run)}
    assert steps[second] == 1


def test_a_moment_reads_as_of_its_commit_and_only_what_it_is_asked_for(run: Run):
    first = run.sample([1.0, 0.0])
    moment = storage.Moment(run.store, run.store.head().number)
    assert len(moment.sha256) == 64
    run.sample([1.0], iteration=2)
    assert [row["event_id"] for row in moment.read("rollouts")] == first
    assert moment.read("rollouts", among={"event_id": first[1:]}, columns=("iteration",)) == [
        {"iteration": 1}
    ]
    assert moment.read("rollouts", run_id="r2") == moment.read("rollouts", iteration=2) == []
    with pytest.raises(storage.QueryError, match="expected a table or view, came `nothing`"):
        moment.read("nothing")


def test_a_moment_of_a_damaged_store_reads_what_is_left(run: Run):
    run.sample([1.0])
    number = run.store.head().number
    [segment] = (run.store.path / "events" / "scores").rglob("*.parquet")
    segment.unlink()
    store = storage.open(run.store.path)
    with pytest.raises(storage.DamagedError):
        storage.Moment(store, number).read("rollouts")
    moment = storage.Moment(store, number, allow_damaged=True)
    assert len(moment.read("rollouts")) == 1
    assert moment.read("scores") == []
