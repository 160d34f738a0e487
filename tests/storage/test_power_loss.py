"""Power lost at any instant: what was acknowledged is there, and no sync could be left out."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

import storage
import storage.files
import storage.log
from storage.files import Disk
from tests.storage.power import (
    Ending,
    LazyDisk,
    Operation,
    PowerCut,
    RecordingDisk,
    Tree,
    materialise,
    states,
    when_told,
)
from tests.storage.rows import OPENED, prompt, rollout, score

pytestmark = pytest.mark.slow  # hundreds of stores as the disk may have left them

STORE = "data/x/store"  # somebody made `data` a moment ago, `x` is missing
NUM_STATES = 200  # fewer, and the model has lost some
TABLES = ("runs", "prompts", "rollouts", "scores", "policies")
POLICY = {
    "policy_version": 1,
    "iteration": 1,
    "base_digest": "b",
    "adapter_digest": "a",
    "policy_digest": "p",
}


@pytest.fixture(autouse=True)
def few_commits_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.log, "CHECKPOINT_EVERY", 4)


@pytest.fixture
def use_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disk], None]:
    def use(disk: Disk) -> None:
        monkeypatch.setattr(storage.files, "Disk", lambda: disk)

    return use


def live(path: Path, acknowledge: Callable[[int], None]) -> storage.Store:
    """Create a store and fill it, and tell each commit that the caller may rely on.

    Done again after it was interrupted, it goes on.
    """
    store = storage.open(path, create=True)
    acknowledge(0)
    writer = store.open_stream("r", OPENED)
    acknowledge(store.head().number)
    first = {"prompts": [prompt("p1")], "rollouts": [rollout("p1")]}
    acknowledge(writer.append(first, "a").commit)
    second = {"prompts": [prompt("p2")], "scores": [score("s", 0.5)]}
    acknowledge(writer.append(second, "b", closes_iteration=0).commit)
    policy = {**POLICY, "adapter_artifact": store.artifacts.put(b"weights", "adapter")}
    acknowledge(writer.append({"policies": [policy]}, "c").commit)
    return store


def live_and_clean(path: Path, acknowledge: Callable[[int], None]) -> None:
    store = live(path, acknowledge)
    for work in (compact, collect, collect):
        work(store, acknowledge)


def compact(at: storage.Store | Path, acknowledge: Callable[[int], None]) -> None:
    store = storage.open(at) if isinstance(at, Path) else at
    assert list(storage.compact(store, min_segments=2))
    acknowledge(store.head().number)


def collect(at: storage.Store | Path, acknowledge: Callable[[int], None]) -> None:
    """Delete what was condemned, and condemn what was replaced."""
    store = storage.open(at) if isinstance(at, Path) else at
    storage.collect(store, grace_s=0)
    acknowledge(store.head().number)


@dataclass
class Recorded:
    """A trace, and what a reader is told as of every commit of the store it led to."""

    trace: list[Operation]
    answers: list[dict[str, list[dict[str, Any]]]]


def answers(store: storage.Store, as_of: int | None = None) -> dict[str, list[dict[str, Any]]]:
    return {table: store.read(table, as_of=as_of) for table in TABLES}


def record(
    base: Path,
    use_disk: Callable[[Disk], None],
    *works: Callable[[Path, Callable[[int], None]], None],
    has_ended: Ending = lambda trace: False,
) -> Recorded:
    """Let a process do its works on the store below `base`, killed where its trace ends."""
    disk = RecordingDisk(base, has_ended)
    use_disk(disk)
    if not base.exists():
        base.mkdir()
        disk.make_folder(base / "data")
    try:
        for work in works:
            work(base / STORE, disk.acknowledge)
    except PowerCut:
        return Recorded(disk.trace, [])
    store = storage.open(base / STORE)
    return Recorded(disk.trace, [answers(store, n) for n in range(store.head().number + 1)])


class Opener:
    """Opens what is left on a disk, and tells how far the store got or what is wrong with it."""

    def __init__(self, folder: Path, recorded: Recorded, goes_on: bool = True) -> None:
        self._folder, self._recorded, self._goes_on = folder, recorded, goes_on
        self._heads: dict[Tree, int | str | None] = {}

    def problem(self, told: int | None, tree: Tree) -> str | None:
        if tree not in self._heads:
            self._folder.mkdir()
            try:
                materialise(tree, self._folder)
                self._heads[tree] = self._open(self._folder / STORE)
            except Exception as error:
                self._heads[tree] = f"{type(error).__name__}: {error}"
            finally:
                shutil.rmtree(self._folder)
        head = self._heads[tree]
        if isinstance(head, str):
            return head
        if told is not None and (head is None or head < told):
            return f"commit {told} was acknowledged and the head is {head}"
        return None

    def _open(self, path: Path) -> int | str | None:
        try:
            store = storage.open(path)
            head = store.head().number
        except storage.StoreNotFoundError:
            store, head = storage.open(path, create=True), None
        if answers(store) != self._recorded.answers[head or 0]:
            return f"commit {head} is not whole"
        if self._goes_on:
            writer = store.open_stream("r", OPENED)
            writer.append({"rollouts": [rollout("later")]}, "d")
            store = storage.open(path)
            if store.read("rollouts")[-1]["prompt_id"] != "later":
                return "the next append is lost"
        findings = storage.verify(store, deep=True)
        return str(findings) if findings else head


def test_what_was_acknowledged_survives_and_every_sync_is_needed(
    memory_path: Path, use_disk: Callable[[Disk], None]
):
    recorded = record(memory_path / "recorded", use_disk, live_and_clean)
    use_disk(LazyDisk())
    opener = Opener(memory_path / "opened", recorded)
    found = list(states(recorded.trace))
    assert [(n, p) for n, told, tree in found if (p := opener.problem(told, tree))] == []
    assert len(found) > NUM_STATES
    syncs = [n for n, operation in enumerate(recorded.trace) if operation.is_sync]
    assert [recorded.trace[n] for n in syncs if not is_needed(recorded.trace, n, opener)] == []


def without(trace: Sequence[Operation], number: int) -> list[Operation]:
    return [*trace[:number], *trace[number + 1 :]]


def is_needed(trace: Sequence[Operation], sync: int, opener: Opener, start: int = 0) -> bool:
    """Tell whether something is lost without a sync.

    Looked at are the states right after each acknowledgement from `start` on, where it is likely,
    and all states between the sync and the next acknowledgement.
    """
    trace = without(trace, sync)
    told_next = next(n for n in range(sync, len(trace)) if trace[n].kind == "acknowledged")
    before = [(told, tree) for n, told, tree in states(trace[: told_next + 1]) if n >= sync]
    left = chain(when_told(trace, start), before)
    return any(opener.problem(told, tree) for told, tree in left)


def test_what_a_killed_process_left_is_made_durable_by_the_next(
    memory_path: Path, use_disk: Callable[[Disk], None]
):
    """The next process cannot know how far the other got: it needs each of its syncs for some."""
    needed: dict[tuple[str, str, int], bool] = {}
    whole = record(memory_path / "recorded", use_disk, live)
    for last in unsynced(whole.trace):
        folder = memory_path / f"killed-{last}"
        killed = record(
            folder, use_disk, live, has_ended=lambda trace, last=last: len(trace) > last
        )
        go_on = record(folder, use_disk, live)
        trace = [*killed.trace, *go_on.trace]
        use_disk(LazyDisk())
        opener = Opener(memory_path / "opened", go_on, goes_on=False)
        start = len(killed.trace)
        left = when_told(trace, start)
        assert [p for told, tree in left if (p := opener.problem(told, tree))] == []
        for name, number in named_syncs(trace, start):
            if not needed.get(name):
                needed[name] = is_needed(trace, number, opener, start)
    assert [name for name in needed if not needed[name]] == []


def unsynced(trace: Sequence[Operation]) -> list[int]:
    """Return the numbers of the operations after which folders are about to be synced."""
    numbers = [n for n, o in enumerate(trace) if o.kind not in ("unlink", "acknowledged")]
    return [
        a for a, b in pairwise(numbers)
        if trace[a].kind in ("make_folder", "link") and trace[b].kind == "sync_folder"
    ]  # fmt: skip


def named_syncs(
    trace: Sequence[Operation], start: int
) -> Iterator[tuple[tuple[str, str, int], int]]:
    """Yield the syncs from `start` on: what is synced, which part of the store was linked last.

    And how often that was so before. Checkpoints do not count: they come at any time.
    """
    targets = {o.path: o.target for o in trace if o.kind == "link"}
    counts: Counter[tuple[str, str]] = Counter()
    linked = ""
    for number, operation in enumerate(trace[start:], start):
        if operation.kind == "link" and "_checkpoints" not in operation.target:
            linked = Path(operation.target).relative_to(STORE).parts[0]
        if operation.is_sync:
            name = without_random(targets.get(operation.path, operation.path)), linked
            yield (*name, counts[name]), number
            counts[name] += 1


def without_random(path: str) -> str:
    return re.sub(r"[0-9a-f]{16,}|\d+", "*", path)


def test_no_commit_survives_alone(memory_path: Path, use_disk: Callable[[Disk], None]):
    """C compacts and is killed when it has its number, A condemns and is killed so too; B deletes.

    Would A not make C's commit durable first, A's could survive without it, which no reader could
    tell from damage; and B would delete what is live again.
    """

    def has_its_number(trace: Sequence[Operation]) -> bool:
        return bool(trace) and trace[-1].kind == "link" and "/_log/" in trace[-1].target

    base = memory_path / "recorded"
    trace = record(base, use_disk, live).trace
    start = len(trace)
    for work in (compact, collect):
        trace += record(base, use_disk, work, has_ended=has_its_number).trace
    last = record(base, use_disk, collect)
    trace += last.trace
    assert any(operation.kind == "unlink" for operation in last.trace)
    use_disk(LazyDisk())
    opener = Opener(memory_path / "opened", last)
    found = [(told, tree) for length, told, tree in states(trace) if length >= start]
    assert [p for told, tree in found if (p := opener.problem(told, tree))] == []
