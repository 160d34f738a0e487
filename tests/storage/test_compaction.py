"""Compaction changes no answer, collection deletes nothing that counts; races written down."""

from pathlib import Path
from typing import Any

import pytest

import storage
from storage.schemas import TABLES
from tests.storage.rows import OPENED, planned, prompt, rollout, score, tokens, update

NUM_APPENDS = 5


def fill(writer: storage.StreamWriter, iterations: range = range(NUM_APPENDS)) -> None:
    for i in iterations:
        rollouts = [rollout(f"p{i}", k, i) for k in range(3)]
        ids = [writer.event_id_of("rollouts", row) for row in rollouts]
        writer.append(
            {
                "prompts": [prompt(f"p{i}")],
                "rollouts": rollouts,
                "rollout_tokens": [tokens(event_id, i) for event_id in ids],
                "scores": [score(event_id, 0.25 * k, i) for k, event_id in enumerate(ids)],
                "replays": [planned(event_id, k, i) for k, event_id in enumerate(ids)],
                "updates": [update(i)],
            },
            f"i{i}",
            closes_iteration=i - 1 if i else None,
        )


def answers(store: storage.Store, up_to: int) -> dict[Any, Any]:
    """Everything a reader can be told, as of every commit up to one; of empty tables as of it."""
    found: dict[Any, Any] = {}
    filled = {segment.table for segment in store.log.refresh().segments.values()}
    for number in range(up_to + 1):
        for table in TABLES if number == up_to else filled:
            found[table, number] = store.read(table, as_of=number)
            query = f"select * from {table}({number}) order by _commit, _row"
            found[table, number, "sql"] = store.sql(query).fetchall()
        for view in ("latest_scores", "training_history", "replay_audit", "run_overview"):
            found[view, number] = store.view(view, as_of=number)
    return found


def compact(store: storage.Store, **options: Any) -> list[storage.Compacted]:
    return list(storage.compact(store, min_segments=2, **options))


def parquet_files(store: storage.Store) -> set[str]:
    return {
        p.relative_to(store.path).as_posix() for p in (store.path / "events").rglob("*.parquet")
    }


def live_files(store: storage.Store) -> set[str]:
    return set(store.log.refresh().segments)


def test_compaction_and_collection_change_no_answer(
    store: storage.Store, writer: storage.StreamWriter
):
    fill(writer)
    head = store.head().number
    before = answers(store, head)
    done = compact(store)
    assert {(c.table, c.num_before, c.rows) for c in done} >= {
        ("rollouts", NUM_APPENDS, 3 * NUM_APPENDS), ("updates", NUM_APPENDS, NUM_APPENDS),
    }  # fmt: skip
    assert answers(store, head) == before == answers(storage.open(store.path), head)
    assert storage.collect(store, grace_s=0).num_condemned == 6 * NUM_APPENDS
    assert storage.collect(store, grace_s=0).num_deleted == 6 * NUM_APPENDS
    assert parquet_files(store) == live_files(store)
    assert answers(store, head) == before == answers(storage.open(store.path), head)
    assert not storage.verify(store, deep=True)


def test_compacted_segments_grow_with_later_ones(
    store: storage.Store, writer: storage.StreamWriter
):
    fill(writer, range(3))
    compact(store)
    fill(writer, range(3, 6))
    head = store.head().number
    before = answers(store, head)
    assert [c.num_before for c in compact(store) if c.table == "scores"] == [4]
    assert answers(store, head) == before
    assert not compact(store)
    assert not storage.verify(store, deep=True)


def test_large_segments_are_left_alone(store: storage.Store, writer: storage.StreamWriter):
    fill(writer)
    sizes = [s.size_bytes for s in store.log.refresh().segments.values()]
    assert not compact(store, target_bytes=min(sizes))
    assert compact(store, target_bytes=2 * max(sizes) + 2)
    assert not storage.verify(store, deep=True)


def test_runs_and_tables_are_kept_apart(store: storage.Store, writer: storage.StreamWriter):
    fill(writer)
    fill(store.open_stream("r2", OPENED))
    compact(store, run_id="r2")
    segments = store.log.refresh().segments.values()
    assert {s.run_id for s in segments if s.is_compacted} == {"r2"}
    assert storage.num_small_segments(store, "r2") == 1  # `runs`, with one row only
    assert storage.num_small_segments(store, "r1") == 1 + 6 * NUM_APPENDS


def test_an_append_that_is_repeated_after_compaction_gets_the_committed_rows(
    store: storage.Store, writer: storage.StreamWriter
):
    rows = {"rollouts": [rollout("p1", 0, 1), rollout("p2", 0, 1)], "scores": [score("x", 0.5)]}
    first = writer.append(rows, "b")
    writer.append({"rollouts": [rollout("p3", 0, 1)], "scores": [score("y", 0.5)]}, "c")
    compact(store)
    storage.collect(store, grace_s=0)
    storage.collect(store, grace_s=0)
    head = store.head()
    again = writer.append({**rows, "rollouts": [rollout("p2", 0, 1, completion="other")]}, "b")
    assert again.rows["rollouts"] == [first.rows["rollouts"][1]]
    assert again.commit == first.commit
    assert store.head() == head
    with pytest.raises(storage.ConflictError, match=rf"commit {first.commit}\b"):
        writer.append({"scores": [score("x", 0.75)]}, "d")
    resumed = storage.open(store.path).open_stream("r1", OPENED)
    assert resumed.append(rows, "b").rows == first.rows


def test_a_changed_segment_is_not_compacted(store: storage.Store, writer: storage.StreamWriter):
    fill(writer)
    path = next(s.path for s in store.log.refresh().segments.values() if s.table == "rollouts")
    flip_a_bit(store.path / path)
    with pytest.raises(storage.DamagedError, match="was changed"):
        compact(store)
    assert path in live_files(store)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_of_two_compactors_the_later_one_merges_what_is_left(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """A reads the live segments and writes its merger; B merges the same; A takes a number.

    A finds that what it would remove is not live any more, gives up, and its file means nothing.
    """
    fill(writer)
    other, done = storage.open(store.path), []

    def compact_too(step: str, path: str) -> None:
        if step == "folders synced" and path.startswith("events/") and not done:
            done.extend(compact(other))

    before = answers(store, store.head().number)
    monkeypatch.setattr(store.files, "passed", compact_too)
    assert compact(store) == []
    assert len(done) == 6
    assert len(parquet_files(store) - live_files(store)) == 6 * NUM_APPENDS + 1
    assert answers(store, max(n for _, n, *_ in before)) == before
    assert not storage.verify(store, deep=True)


def test_a_stalled_writer_never_commits_what_was_condemned(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """W writes its segment and stalls; C condemns and deletes it; W goes on to take a number.

    W sees that files were condemned since it began, and writes its segment again: the commit names
    a file that is there.
    """
    other, collected = storage.open(store.path), []

    def collect_twice(step: str, path: str) -> None:
        if step == "folders synced" and path.startswith("events/") and not collected:
            collected.append(path)
            storage.collect(other, grace_s=0)
            assert storage.collect(other, grace_s=0).num_deleted == 1

    monkeypatch.setattr(store.files, "passed", collect_twice)
    committed = writer.append({"rollouts": [rollout("p1")]}, "b")
    assert collected
    assert collected[0] not in live_files(store)
    assert storage.open(store.path).read("rollouts") == committed.rows["rollouts"]
    assert not storage.verify(store, deep=True)


def test_what_becomes_live_while_it_is_condemned_stays(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """W writes its segment; C lists it; W commits it; C takes a number for its condemnation.

    C finds the file live, looks again, and condemns nothing.
    """
    other = storage.open(store.path)
    list_files, committed = other.files.found, []

    def list_and_commit(folder: str) -> Any:
        if folder == "events" and not committed:
            state = other.log.refresh()
            committed.append(writer.append({"rollouts": [rollout("p1")]}, "b"))
            monkeypatch.setattr(other.log, "refresh", Refreshed(other.log.refresh, first=state))
        return list_files(folder)

    monkeypatch.setattr(other.files, "found", list_and_commit)
    assert storage.collect(other, grace_s=0).num_condemned == 0
    assert store.read("rollouts") == committed[0].rows["rollouts"]


class Refreshed:
    """`Log.refresh` that answers with an older state the first times."""

    def __init__(self, refresh: Any, first: Any, times: int = 1) -> None:
        self._refresh, self._first = refresh, [first] * times

    def __call__(self) -> Any:
        return self._first.pop() if self._first else self._refresh()


def test_a_zombie_writer_loses_to_its_successor_and_its_file_is_collected(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """Z writes its segment and stalls; S opens the run (epoch 2) and commits the place; Z goes on.

    Z sees the higher epoch before it takes a number and stops; its segment is collected.
    """
    successor: list[Any] = []

    def resume(step: str, path: str) -> None:
        if step == "folders synced" and path.startswith("events/") and not successor:
            opened = storage.open(store.path).open_stream("r1", OPENED)
            successor.append(opened.append({"rollouts": [rollout("p1", completion="S")]}, "b"))

    with monkeypatch.context() as patched:
        patched.setattr(store.files, "passed", resume)
        with pytest.raises(storage.SupersededError):
            writer.append({"rollouts": [rollout("p1", completion="Z")]}, "b")
    assert [r["completion"] for r in store.read("rollouts")] == ["S"]
    storage.collect(store, grace_s=0)
    assert storage.collect(store, grace_s=0).num_deleted == 1
    assert not storage.verify(store, deep=True)


def test_a_log_that_was_replaced_under_a_writer_is_not_built_on(
    store: storage.Store, writer: storage.StreamWriter
):
    """ABA: W reads commit 2; the log is set back to commit 1 and another writer takes 2; W appends.

    Number 3 is free, but W's commit would name the hash of a commit that is gone.
    """
    writer.append({"rollouts": [rollout("p1")]}, "b")
    newest = store.path / "_log" / f"{2:020d}.json"
    newest.unlink()
    storage.open(store.path).open_stream("r2", OPENED)
    with pytest.raises(storage.DamagedError, match=r"commit 2 was .* the log was replaced"):
        writer.append({"rollouts": [rollout("p2")]}, "c")
    assert storage.open(store.path).head().number == 2


READERS = {
    "whole": lambda store, number: store.read("rollouts", as_of=number),
    "by id": lambda store, number: store.read("rollouts", as_of=number, event_ids=ALL_IDS),
    "sql": lambda store, number: (
        store.sql("from rollouts order by _commit, _row", as_of=number)
        .pl()
        .drop("_commit", "_row")
        .to_dicts()
    ),
}
ALL_IDS = [
    storage.event_id("rollouts", {**rollout(f"p{i}", k, i), "run_id": "r1"})
    for i in range(NUM_APPENDS)
    for k in range(3)
]


def test_a_question_whose_views_cannot_be_defined_is_asked_again(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """R checks that its segments are whole; they are compacted and deleted; R opens them."""
    fill(writer)
    reader, done = storage.open(store.path), []
    real = reader.check_hashes

    def check_and_lose(live: Any) -> None:
        real(live)
        if not done:
            done.append(delete_compacted(store))

    monkeypatch.setattr(reader, "check_hashes", check_and_lose)
    assert reader.sql("select count(*) from rollouts").fetchall() == [(3 * NUM_APPENDS,)]
    assert done


@pytest.mark.parametrize("how", READERS)
def test_a_reader_that_loses_its_files_asks_again(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch, how: str
):
    fill(writer)
    reader = storage.open(store.path)
    stale = reader.log.refresh()
    before = READERS[how](reader, stale.head.number)
    delete_compacted(store)
    monkeypatch.setattr(reader.log, "refresh", Refreshed(reader.log.refresh, stale, times=2))
    assert READERS[how](reader, stale.head.number) == before


def test_a_question_of_the_present_is_not_answered_from_the_past(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """R has got its connection; S, who still sees the commit before, gets one too; R asks."""
    fill(writer)
    stale = store.log.refresh()
    writer.append({"rollouts": [rollout("late", 0, NUM_APPENDS)]}, "late")
    real, done = store._connection, []

    def connect_and_be_overtaken(state: Any, *arguments: Any) -> Any:
        mine = real(state, *arguments)
        done.append(real(stale, *arguments))
        return mine

    monkeypatch.setattr(store, "_connection", connect_and_be_overtaken)
    query = f"select count(*) from rollouts({store.head().number})"
    assert store.sql(query).fetchall() == [(3 * NUM_APPENDS + 1,)]
    assert done


def delete_compacted(store: storage.Store) -> None:
    compact(store)
    for _ in range(2):
        storage.collect(store, grace_s=0)


def test_a_writer_that_loses_its_files_looks_again(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """A batch of closed iterations comes again while their segments are compacted and deleted."""
    fill(writer)
    stale = store.log.refresh()
    old = {"rollouts": [rollout("p0", 0, 0), rollout("p1", 0, 1)]}
    committed = writer.append(old, "again").rows
    delete_compacted(storage.open(store.path))
    for times in (1, 2):  # in loading, in looking for the ids
        with monkeypatch.context() as patched:
            patched.setattr(store.log, "refresh", Refreshed(store.log.refresh, stale, times))
            assert writer.append(old, "again").rows == committed


def test_a_stalled_compactor_never_commits_what_was_condemned(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """M writes a merger and stalls; C condemns and deletes it; M goes on to take a number.

    M sees that files were condemned since it began, and writes the merger again.
    """
    fill(writer)
    other, collected = storage.open(store.path), []

    def collect_twice(step: str, path: str) -> None:
        if step == "linked" and path.startswith("events/") and not collected:
            collected.append(path)
            storage.collect(other, grace_s=0)
            assert storage.collect(other, grace_s=0).num_deleted == 1

    before = answers(store, store.head().number)
    monkeypatch.setattr(store.files, "passed", collect_twice)
    compact(store)
    assert collected
    assert collected[0] not in live_files(store)
    assert answers(store, max(n for _, n, *_ in before)) == before
    assert not storage.verify(store, deep=True)


def test_verification_takes_no_work_of_others_for_damage(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    """V walks the commits; others commit, take a checkpoint, compact and delete; V goes on."""
    monkeypatch.setattr("storage.log.CHECKPOINT_EVERY", 1)
    fill(writer)
    verified = storage.open(store.path)
    real, done = verified.log.numbers, []

    def numbers() -> list[int]:
        walked = real()
        if not done:
            done.append(walked)
            delete_compacted(store)
        return walked

    monkeypatch.setattr(verified.log, "numbers", numbers)
    assert storage.verify(verified, deep=True) == []
    assert done


def test_a_file_that_is_young_is_left_to_its_writer(
    store: storage.Store, writer: storage.StreamWriter
):
    fill(writer)
    compact(store)
    assert storage.collect(store) == storage.Collected(0, 0, 0)
    storage.collect(store, grace_s=0)
    assert storage.collect(store, grace_s=3600).num_deleted == 0
    assert len(parquet_files(store)) == len(live_files(store)) + 6 * NUM_APPENDS
