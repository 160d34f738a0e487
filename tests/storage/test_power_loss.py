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


def clean(store: storage.Store, acknowledge: Callable[[int], None]) -> None:
    """Compact the store, condemn what that replaced, and delete it."""
    assert list(storage.compact(store, min_segments=2))
    acknowledge(store.head().number)
    for _ in range(2):
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
    base: Path, use_disk: Callable[[Disk], None], last: int | None = None, cleans: bool = False
) -> Recorded:
    """Let a process live below `base`; it is killed after operation `last`."""
    base.mkdir(exist_ok=True)
    disk = RecordingDisk(base, last)
    use_disk(disk)
    if not (base / "data").exists():
        disk.make_folder(base / "data")
    try:
        store = live(base / STORE, disk.acknowledge)
        if cleans:
            clean(store, disk.acknowledge)
    except PowerCut:
        return Recorded(disk.trace, [])
    store = storage.open(base / STORE)
    return Recorded(disk.trace, [answers(store, n) for n in range(store.head().number + 1)])


class Opener:
    """Opens what is left on a disk, and tells how far the store got or what is wrong with it."""

    def __init__(self, folder: Path, recorded: Recorded) -> None:
        self._folder, self._recorded = folder, recorded
        self._heads: dict[Tree, int | str | None] = {}

    @property
    def num_opened(self) -> int:
        return len(self._heads)

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
        row = rollout("later")
        store.open_stream("r", OPENED).append({"rollouts": [row]}, "d")
        after = storage.open(path)
        if [r["prompt_id"] for r in after.read("rollouts")][-1] != "later":
            return "the next append is lost"
        findings = storage.verify(after, deep=True)
        return str(findings) if findings else head


def test_what_was_acknowledged_survives_and_every_sync_is_needed(
    memory_path: Path, use_disk: Callable[[Disk], None]
):
    recorded = record(memory_path / "recorded", use_disk, cleans=True)
    use_disk(LazyDisk())
    opener = Opener(memory_path / "opened", recorded)
    found = list(states(recorded.trace))
    assert [(n, p) for n, told, tree in found if (p := opener.problem(told, tree))] == []
    assert len(found) > NUM_STATES
    syncs = [n for n, operation in enumerate(recorded.trace) if operation.is_sync]
    assert [recorded.trace[n] for n in syncs if not is_needed(recorded.trace, n, opener)] == []


def without(trace: Sequence[Operation], number: int) -> list[Operation]:
    return [*trace[:number], *trace[number + 1 :]]


def is_needed(trace: Sequence[Operation], sync: int, opener: Opener) -> bool:
    """Tell whether something is lost without a sync; looks where it is likely first."""
    trace = without(trace, sync)
    likely = when_told(trace)
    rest = ((told, tree) for length, told, tree in states(trace) if length >= sync)
    return any(opener.problem(told, tree) for told, tree in chain(likely, rest))


def test_what_a_killed_process_left_is_made_durable_by_the_next(
    memory_path: Path, use_disk: Callable[[Disk], None]
):
    """The next process cannot know how far the other got: it needs each of its syncs for some."""
    needed: dict[tuple[str, int], bool] = {}
    whole = record(memory_path / "recorded", use_disk)
    for last in unsynced(whole.trace):
        folder = memory_path / f"killed-{last}"
        killed = record(folder, use_disk, last)
        go_on = record(folder, use_disk)
        trace = [*killed.trace, *go_on.trace]
        use_disk(LazyDisk())
        opener = Opener(memory_path / "opened", go_on)
        start = len(killed.trace)
        left = when_told(trace, start)
        assert [p for told, tree in left if (p := opener.problem(told, tree))] == []
        for name, number in named_syncs(trace, start):
            if not needed.get(name):
                left = when_told(without(trace, number), start)
                needed[name] = any(opener.problem(told, tree) for told, tree in left)
    assert [name for name in needed if not needed[name]] == []


def unsynced(trace: Sequence[Operation]) -> list[int]:
    """Return the numbers of the operations after which folders are about to be synced."""
    numbers = [n for n, o in enumerate(trace) if o.kind not in ("unlink", "acknowledged")]
    return [
        a for a, b in pairwise(numbers)
        if trace[a].kind in ("make_folder", "link") and trace[b].kind == "sync_folder"
    ]  # fmt: skip


def named_syncs(trace: Sequence[Operation], start: int) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield the syncs from `start` on: what is synced, without random parts, and how often yet."""
    targets = {o.path: o.target for o in trace if o.kind == "link"}
    counts: Counter[str] = Counter()
    for number in range(start, len(trace)):
        if trace[number].is_sync:
            path = targets.get(trace[number].path, trace[number].path)
            name = re.sub(r"[0-9a-f]{16,}", "*", path)
            yield (name, counts[name]), number
            counts[name] += 1
