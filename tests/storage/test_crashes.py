"""Killed at any instant of its work on disk, a store is whole and the work can be done again.

The instants are those that a run without a kill passes; each is killed at once.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
import storage.log
from tests.storage import children
from tests.storage.rows import OPENED, prompt, rollout

pytestmark = pytest.mark.slow  # a process or a store for each instant

Prepare = Callable[[storage.Store], Callable[[], object]]
Step = tuple[str, str]
PLACED = ["temporary opened", "temporary written", "temporary synced", "linked"]
TABLES = ("runs", "prompts", "rollouts")


@pytest.fixture(autouse=True)
def checkpoint_in_an_append(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.log, "CHECKPOINT_EVERY", children.CHECKPOINT_EVERY)


@pytest.fixture
def store(memory_path: Path) -> storage.Store:
    return storage.open(memory_path / "store", create=True)


@pytest.fixture
def filled(store: storage.Store, writer: storage.StreamWriter) -> storage.Store:
    for i in (0, 1):
        batch = {"rollouts": [rollout("p0", i)], "prompts": [prompt(f"q{i}")]}
        writer.append(batch, f"b{i}")
    return store


@pytest.fixture
def compacted(filled: storage.Store) -> storage.Store:
    """A store with segments that were replaced, and a temporary file whose writer was killed."""
    children.compact(filled)()
    (filled.path / "_tmp" / "left").write_bytes(b"half")
    return filled


def steps_of(store: storage.Store, prepare: Prepare) -> list[Step]:
    """Do the work with a copy of the store and return the steps it takes on disk."""
    copy = storage.open(copied(store, "whole"))
    work, steps = prepare(copy), []
    copy.files.passed = lambda *step: steps.append(step)  # type: ignore[method-assign]
    work()
    return steps


def copied(store: storage.Store, name: str) -> Path:
    return Path(shutil.copytree(store.path, store.path.with_name(name)))


def killed(store: storage.Store, prepare: Prepare, instant: int) -> storage.Store:
    """Return what is left of a copy of the store whose process was killed at an instant."""
    path = copied(store, f"killed-{instant}")
    child = children.start(children.work_and_die, path, prepare, instant)
    child.join(60)
    assert child.exitcode == children.KILLED
    return storage.open(path)


def answers(store: storage.Store, up_to: int) -> list[Any]:
    """Return the rows of all tables as of every commit up to one; as of the last also in SQL."""
    read = [store.read(table, as_of=n) for n in range(up_to + 1) for table in TABLES]
    counts = ", ".join(f"(select count(*) from {table}({up_to}))" for table in TABLES)
    return [*read, store.sql(f"select {counts}").fetchall()]


def check_all_instants(
    store: storage.Store, prepare: Prepare, check_done: Callable[[storage.Store], None]
) -> list[Step]:
    """Kill the work at each of its steps, do it again, and return the steps."""
    head = store.head().number
    before = answers(store, head)
    steps = steps_of(store, prepare)
    opened = prepare is children.append  # which commits once before its steps are counted
    for instant in range(len(steps)):
        left = killed(store, prepare, instant)
        passed = steps[: instant + 1]
        linked = sum(s == "linked" and path.startswith("_log/") for s, path in passed)
        assert left.head().number == head + opened + linked, steps[instant]
        assert answers(left, head) == before
        assert not storage.verify(left, deep=True)
        seen = answers(left, left.head().number)
        prepare(left)()
        check_done(left)
        fresh = storage.open(left.path)
        assert answers(fresh, head + opened + linked) == seen
        assert not storage.verify(fresh, deep=True)  # no event is there twice, among others
    return steps


def test_a_killed_append_is_there_or_not_and_can_be_done_again(filled: storage.Store):
    def check_done(store: storage.Store) -> None:
        again = store.open_stream("r1", OPENED).append(children.crash_batch(), "crash")
        assert store.read("rollouts")[2:] == again.rows["rollouts"]
        assert len(store.read("rollouts")) == 4

    steps = check_all_instants(filled, children.append, check_done)
    assert [step for step, _ in steps] == [
        *PLACED, *PLACED, "folders synced", "folders synced",  # two segments
        *PLACED, "folders synced",  # the commit
        *PLACED,  # a checkpoint
    ]  # fmt: skip


def test_a_killed_compaction_changes_no_answer_and_can_be_done_again(filled: storage.Store):
    def check_done(store: storage.Store) -> None:
        assert children.compact(store)() == []
        live = store.log.refresh().segments.values()
        assert {s.table for s in live if s.is_compacted} == {"prompts", "rollouts"}

    steps = check_all_instants(filled, children.compact, check_done)
    assert [step for step, path in steps if path.startswith("_log")] == [
        "folders synced",  # the head, which another process may have been killed over
        "linked", "folders synced", "linked", "folders synced",  # a commit for each table
    ]  # fmt: skip


def test_a_killed_collection_deletes_nothing_that_counts_and_can_be_done_again(
    compacted: storage.Store,
):
    def check_done(store: storage.Store) -> None:
        found = {file.path for file in store.files.found("events")}
        assert found == set(store.log.refresh().segments)
        assert store.files.found("_tmp") == []
        assert not store.log.refresh().condemned

    steps = check_all_instants(compacted, children.collect, check_done)
    deleted = [path.split("/")[0] for step, path in steps if step == "deleted"]
    assert sorted(deleted) == ["_tmp", *["events"] * 4]


def test_an_uncommitted_segment_means_nothing_and_its_name_is_not_used_again(filled: storage.Store):
    instant = [step for step, _ in steps_of(filled, children.append)].index("linked")
    store = killed(filled, children.append, instant)
    live = store.log.refresh().segments
    [left] = [file.path for file in store.files.found("events") if file.path not in live]
    content = store.files.read(left)
    children.append(store)()
    assert left not in store.log.refresh().segments
    assert store.files.read(left) == content
