"""What the processes do that tests start, race and kill.

They come from a fork server that has done the slow imports, so that each costs milliseconds.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import storage
import storage.log
from tests.storage.rows import OPENED, prompt, rollout

KILLED = 17
CHECKPOINT_EVERY = 5  # commits: so an append to a store of three, opened again, writes one
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["storage.writer", "storage.segments", __name__])


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = _context.Process(target=work, args=arguments)
    process.start()
    return process


def barrier(parties: int) -> Any:
    return _context.Barrier(parties)


def queue() -> Any:
    return _context.Queue()


def append(store: storage.Store) -> Callable[[], object]:
    writer = store.open_stream("r1", OPENED)
    return lambda: writer.append(crash_batch(), "crash")


def compact(store: storage.Store) -> Callable[[], object]:
    return lambda: list(storage.compact(store, min_segments=2))


def collect(store: storage.Store) -> Callable[[], object]:
    """Condemn what is not live, then delete it."""
    return lambda: [storage.collect(store, grace_s=0) for _ in range(2)]


def work_and_die(path: Path, prepare: Callable[..., Callable[[], object]], instant: int) -> None:
    """Do one of the above, and die at the given one of the steps it takes on disk."""
    storage.log.CHECKPOINT_EVERY = CHECKPOINT_EVERY
    store = storage.open(path)
    work = prepare(store)
    steps = itertools.count()

    def die(step: str, path: str) -> None:
        if next(steps) == instant:
            os._exit(KILLED)

    store.files.passed = die  # type: ignore[method-assign]
    work()


def crash_batch() -> dict[str, list[dict[str, Any]]]:
    return {"rollouts": [rollout("p1"), rollout("p2")], "prompts": [prompt("p1")]}


def append_many(path: Path, run_id: str, batches: int, start_together: Any, results: Any) -> None:
    """Open a run and append to it until done or superseded; report how it ended."""
    store = storage.open(path)
    start_together.wait()
    writer = store.open_stream(run_id, OPENED)
    committed = 0
    try:
        for number in range(batches):
            writer.append({"rollouts": [rollout(f"p{number}", i) for i in range(3)]}, f"b{number}")
            committed += 1
    except storage.SupersededError:
        results.put((writer.epoch, "superseded", committed))
    else:
        results.put((writer.epoch, "done", committed))
