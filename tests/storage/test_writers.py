"""Several writers at once: one per stream goes on, streams do not disturb each other."""

from pathlib import Path

import pytest

import storage
from storage.files import Files
from tests.storage import children
from tests.storage.rows import OPENED, rollout


def race(path: Path, run_ids: list[str], batches: int) -> list[tuple[int, str, int]]:
    start_together, results = children.barrier(len(run_ids)), children.queue()
    processes = [
        children.start(children.append_many, path, run_id, batches, start_together, results)
        for run_id in run_ids
    ]
    ended = [results.get(timeout=60) for _ in run_ids]
    for process in processes:
        process.join(60)
    return sorted(ended)


def test_of_two_writers_of_a_run_the_later_one_goes_on(store: storage.Store):
    batches = 12
    first, second = race(store.path, ["r1", "r1"], batches)
    assert first[:2] in [(1, "superseded"), (1, "done")]  # done: it was through before the other
    assert second == (2, "done", batches)
    rows = store.read("rollouts")
    assert len(rows) == len({row["event_id"] for row in rows}) == 3 * batches
    assert sum(row["epoch"] == 1 for row in rows) == 3 * first[2]
    assert not storage.verify(store, deep=True)


def test_runs_that_append_at_once_make_one_chain(store: storage.Store):
    batches = 8
    ended = race(store.path, ["r1", "r2", "r3"], batches)
    assert ended == [(1, "done", batches)] * 3
    assert store.head().number == 3 * (1 + batches)
    assert len(list((store.path / "_log").iterdir())) == 3 * (1 + batches)
    for run_id in ("r1", "r2", "r3"):
        assert len(store.read("rollouts", run_id=run_id)) == 3 * batches
    assert not storage.verify(store, deep=True)


def test_a_superseded_writer_stops_and_appends_nothing(
    store: storage.Store, writer: storage.StreamWriter
):
    other = storage.open(store.path).open_stream("r1", OPENED)
    head = store.head()
    with pytest.raises(storage.SupersededError, match=r"epoch 2.*epoch 1.*resume the run"):
        writer.append({"rollouts": [rollout()]}, "b")
    assert store.head() == head
    assert other.append({"rollouts": [rollout()]}, "b").commit == head.number + 1


def test_a_writer_superseded_while_it_writes_does_not_take_the_next_number(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    opened = []

    def open_again(step: str, path: str) -> None:
        if step == "folders synced" and path.startswith("events/") and not opened:
            opened.append(storage.open(store.path).open_stream("r1", OPENED))

    monkeypatch.setattr(store.files, "passed", open_again)
    with pytest.raises(storage.SupersededError):
        writer.append({"rollouts": [rollout()]}, "b")
    assert store.read("rollouts") == []


def test_a_number_taken_by_another_stream_is_followed_by_the_next(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    other = storage.open(store.path).open_stream("r2", OPENED)
    real, numbers = Files.publish, []

    def publish(files: Files, path: str, data: bytes) -> None:
        if files is store.files and path.startswith("_log/"):
            numbers.append(path[-7:-5])
            if len(numbers) == 1:
                other.append({"rollouts": [rollout()]}, "faster")
        real(files, path, data)

    monkeypatch.setattr(Files, "publish", publish)
    assert writer.append({"rollouts": [rollout()]}, "b").commit == 4
    assert numbers == ["03", "04"]
    assert not storage.verify(store, deep=True)


def test_a_commit_that_arrived_although_its_writer_saw_an_error_is_recognised(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    real = Files.publish

    def publish_twice(files: Files, path: str, data: bytes) -> None:
        real(files, path, data)
        if path.startswith("_log/"):
            real(files, path, data)  # as a retry below us would: the name is taken, by us

    monkeypatch.setattr(Files, "publish", publish_twice)
    assert writer.append({"rollouts": [rollout()]}, "b").commit == 2
    assert store.head().number == 2


def test_an_append_that_failed_after_its_commit_is_not_doubled(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    def fail(step: str, path: str) -> None:
        if step == "linked" and path.startswith("_log/"):
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store.files, "passed", fail)
        with pytest.raises(OSError, match="Input/output"):
            writer.append({"rollouts": [rollout()]}, "b")
    assert writer.append({"rollouts": [rollout()]}, "b").commit == 2
    assert len(store.read("rollouts")) == 1
