"""An append: all or nothing, each place once, and the caller gets what is committed."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storage
from storage.schemas import TABLES
from tests.storage.rows import (
    OPENED,
    facts_of,
    failure,
    learned,
    pin,
    planned,
    prompt,
    rollout,
    score,
    tokens,
    update,
)


def test_committed_rows_are_the_given_ones_in_order(writer: storage.StreamWriter):
    given = [rollout("p2"), rollout("p1", 1), rollout("p1", 0)]
    committed = writer.append({"rollouts": given}, "b")
    assert [facts_of(row) for row in committed.rows["rollouts"]] == given
    first = committed.rows["rollouts"][0]
    assert first["event_id"] == writer.event_id_of("rollouts", given[0])
    assert first["event_id"] == storage.event_id("rollouts", {**given[0], "run_id": "r1"})
    assert (first["run_id"], first["epoch"]) == ("r1", 1)
    assert first["recorded_at"].utcoffset().total_seconds() == 0


def test_committed_rows_are_those_that_are_read_back(
    store: storage.Store, writer: storage.StreamWriter
):
    rows = {
        "prompts": [prompt("p1"), prompt("p2")],
        "rollouts": [rollout("p1"), rollout("p2")],
        "rollout_tokens": [tokens("ro1"), tokens("ro2", sampler_logprobs=None)],
        "scores": [score("ro1", 1.0), score("ro2", None)],
        "replays": [planned("ro1")],
        "learned_samples": [learned("ro1")],
        "updates": [update()],
        "views_pinned": [pin()],
        "failures": [failure("b1")],
    }
    committed = writer.append(rows, "b")
    assert committed.commit == store.head().number == 2
    assert committed.sha256 == store.head().sha256
    for table in rows:
        assert store.read(table) == committed.rows[table]
        assert [facts_of(row) for row in committed.rows[table]] == [
            {k: v for k, v in row.items() if v is not None} for row in rows[table]
        ]


def test_appending_again_makes_no_commit(store: storage.Store, writer: storage.StreamWriter):
    rows = {"rollouts": [rollout("p1")], "scores": [score("ro1", 1.0)]}
    first = writer.append(rows, "b")
    writer.append({"rollouts": [rollout("p2")]}, "c")
    head = store.head()
    assert writer.append(rows, "again") == first
    assert store.head() == head


def test_overlapping_batches_commit_only_what_is_new(
    store: storage.Store, writer: storage.StreamWriter
):
    first = writer.append({"rollouts": [rollout("p1"), rollout("p2")]}, "b").rows["rollouts"]
    second = writer.append({"rollouts": [rollout("p3"), rollout("p2")]}, "c")
    assert second.rows["rollouts"][1] == first[1]
    assert store.sql("select count(*), max(_commit) from rollouts").fetchall() == [(3, 3)]


def test_the_first_commit_of_an_observed_place_wins(
    store: storage.Store, writer: storage.StreamWriter
):
    first = writer.append({"rollouts": [rollout(completion="one")]}, "b")
    second = writer.append({"rollouts": [rollout(completion="two")]}, "b")
    assert second.rows == first.rows
    assert [row["completion"] for row in store.read("rollouts")] == ["one"]


def test_another_content_of_a_derived_place_is_a_conflict(
    store: storage.Store, writer: storage.StreamWriter
):
    writer.append({"scores": [score("ro1", 1.0)]}, "b")
    head = store.head()
    with pytest.raises(storage.ConflictError, match="'target_id': 'ro1'"):
        writer.append(
            {"rollouts": [rollout()], "scores": [score("ro2", 0.0), score("ro1", 0.5)]}, "c"
        )
    assert store.head() == head
    assert store.read("rollouts") == []


def test_a_refused_append_leaves_no_files(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"scores": [score("ro1", 0.5)]}, "b")
    before = store.files.found("events")
    rows = {"rollout_tokens": [tokens("ro1")], "scores": [score("ro1", 0.6)]}
    with pytest.raises(storage.ConflictError):
        writer.append(rows, "c")
    found = [file.path for file in store.files.found("events")]
    assert found == [file.path for file in before]
    writer.append({"rollout_tokens": [tokens("ro1")]}, "c")
    assert len(store.read("rollout_tokens")) == 1


def test_another_timing_is_no_conflict(writer: storage.StreamWriter):
    first = writer.append({"scores": [score("ro1", 1.0, elapsed_ms=1.0)]}, "b")
    assert writer.append({"scores": [score("ro1", 1.0, elapsed_ms=9.0)]}, "b") == first


def test_a_place_given_twice_is_stored_once(store: storage.Store, writer: storage.StreamWriter):
    given = [failure("a", message="one"), failure("a", message="two")]
    rows = writer.append({"failures": given}, "b").rows["failures"]
    assert [row["message"] for row in rows] == ["one", "one"]
    assert len(store.read("failures")) == 1
    with pytest.raises(storage.ConflictError, match="the same append"):
        writer.append({"scores": [score("ro1", 1.0), score("ro1", 0.0)]}, "c")


def test_nothing_to_append_makes_no_commit(store: storage.Store, writer: storage.StreamWriter):
    committed = writer.append({"rollouts": []}, "b")
    assert committed.rows == {"rollouts": []}
    assert (committed.commit, committed.sha256) == (store.head().number, store.head().sha256)
    assert store.head().number == 1


def test_closing_an_iteration_is_a_commit_of_its_own(
    store: storage.Store, writer: storage.StreamWriter
):
    assert writer.last_closed_iteration is None
    assert writer.append({}, "close", closes_iteration=0).commit == 2
    assert writer.last_closed_iteration == 0
    assert writer.append({}, "close", closes_iteration=0).commit == 2
    assert store.open_stream("r1", OPENED).last_closed_iteration == 0
    with pytest.raises(storage.RowError, match="came -1"):
        writer.append({}, "close", closes_iteration=-1)


def test_a_closed_iteration_takes_no_new_rows_but_gives_its_own_back(
    store: storage.Store, writer: storage.StreamWriter
):
    first = writer.append({"rollouts": [rollout("p1")]}, "b", closes_iteration=1)
    writer.append({"rollouts": [rollout("p1", iteration=2)]}, "c", closes_iteration=2)
    head = store.head()
    for number in range(2):
        again = writer if number == 0 else store.open_stream("r1", OPENED)
        assert again.append({"rollouts": [rollout("p1")]}, "b").rows == first.rows
        with pytest.raises(storage.ClosedIterationError, match="after 2"):
            again.append({"rollouts": [rollout("p2"), rollout("p1", iteration=3)]}, "b")
    assert store.head().number == head.number + 1  # the opening


def test_a_conflict_with_a_closed_iteration_is_one(writer: storage.StreamWriter):
    writer.append({"scores": [score("ro1", 1.0)]}, "b", closes_iteration=3)
    with pytest.raises(storage.ConflictError):
        writer.append({"scores": [score("ro1", 0.0)]}, "b")


def test_rows_without_an_iteration_outlive_closed_ones(
    store: storage.Store, writer: storage.StreamWriter
):
    first = writer.append({"prompts": [prompt("p1")]}, "b", closes_iteration=5)
    writer.append({"prompts": [prompt("p2")]}, "c")
    again = store.open_stream("r1", OPENED)
    assert again.append({"prompts": [prompt("p1")]}, "b").rows == first.rows
    with pytest.raises(storage.ConflictError):
        again.append({"prompts": [prompt("p2", answer="5")]}, "b")


def test_a_resumed_run_knows_the_rows_of_its_open_iteration(
    store: storage.Store, writer: storage.StreamWriter
):
    first = writer.append({"rollouts": [rollout(completion="one")]}, "b")
    resumed = store.open_stream("r1", OPENED)
    assert resumed.epoch == 2
    assert resumed.append({"rollouts": [rollout(completion="two")]}, "b").rows == first.rows


def test_runs_do_not_see_each_others_places(store: storage.Store, writer: storage.StreamWriter):
    other = store.open_stream("r2", OPENED)
    writer.append({"scores": [score("ro1", 1.0)]}, "b")
    other.append({"scores": [score("ro1", 0.0)]}, "b")
    assert [row["value"] for row in store.read("scores", run_id="r2")] == [0.0]


def test_read_filters_and_keeps_the_order_of_commits(
    store: storage.Store, writer: storage.StreamWriter
):
    for iteration in (3, 1, 2):
        rows = [rollout("p2", 1, iteration), rollout("p1", 0, iteration)]
        writer.append({"rollouts": rows}, "b")
    assert [row["iteration"] for row in store.read("rollouts")] == [3, 3, 1, 1, 2, 2]
    assert [row["prompt_id"] for row in store.read("rollouts", iteration=1)] == ["p2", "p1"]
    wanted = writer.event_id_of("rollouts", rollout("p1", 0, 2))
    [row] = store.read("rollouts", event_ids=[wanted])
    assert (row["event_id"], row["iteration"]) == (wanted, 2)
    assert store.read("rollouts", run_id="other") == []
    assert len(store.read("rollouts", as_of=2)) == 2
    with pytest.raises(storage.RowError, match="no column `iteration`"):
        store.read("runs", iteration=1)


def test_concurrent_appends_of_one_process_all_arrive(
    store: storage.Store, writer: storage.StreamWriter
):
    from concurrent.futures import ThreadPoolExecutor

    batches = [[rollout(f"p{n}", i) for i in range(3)] for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rows: writer.append({"rollouts": rows}, "b"), batches + batches))
    assert store.sql("select count(*), count(distinct event_id) from rollouts").fetchall() == [
        (24, 24)
    ]


class Model:
    """The log as a dictionary: what each append must do, in a few plain lines."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[tuple, Any]] = {"failures": {}, "evaluations": {}}
        self.closed = -1

    def append(self, table: str, given: list[tuple[tuple, str]]) -> type[Exception] | list[str]:
        known = dict(self.rows[table])
        for place, content in given:
            if place not in known:
                if place[0] <= self.closed:
                    return storage.ClosedIterationError
                known[place] = content
            elif known[place] != content and TABLES[table].nature == "derived":
                return storage.ConflictError
        self.rows[table] = known
        return [known[place] for place, _ in given]


def stored_row(table: str, place: tuple, content: str) -> dict[str, Any]:
    iteration, subject = place
    if table == "failures":
        return failure(subject, iteration, message=content)
    return {
        "iteration": iteration,
        "name": subject,
        "scorer": "exact",
        "scorer_version": "1",
        "policy_version": 0,
        "num_prompts": 1,
        "num_unscored": 0,
        "mean_score": float(ord(content)),
        "temperature": 0.0,
    }


def content_of(table: str, row: dict[str, Any]) -> str:
    return row["message"] if table == "failures" else chr(int(row["mean_score"]))


PLACES = st.tuples(st.integers(0, 3), st.sampled_from("ab"))
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["failures", "evaluations"]),
        st.lists(st.tuples(PLACES, st.sampled_from("xy")), max_size=4),
    ),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("reopen"), st.none()),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, max_size=8))
def test_any_appends_equal_a_dictionary(steps: list[tuple[str, Any]]):
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        store = storage.open(Path(folder) / "store", create=True)
        writer = store.open_stream("r1", OPENED)
        for name, detail in steps:
            if name == "reopen":
                writer = store.open_stream("r1", OPENED)
            elif name == "close":
                writer.append({}, "close", closes_iteration=detail)
                model.closed = max(model.closed, detail)
            else:
                rows = [stored_row(name, *row) for row in detail]
                expected = model.append(name, detail)
                if isinstance(expected, list):
                    committed = writer.append({name: rows}, "b").rows[name]
                    assert [content_of(name, row) for row in committed] == expected
                else:
                    with pytest.raises(expected):
                        writer.append({name: rows}, "b")
        for table, rows in model.rows.items():
            assert [content_of(table, row) for row in store.read(table)] == list(rows.values())
        assert not storage.verify(store, deep=True)
