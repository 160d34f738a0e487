"""Crowds: many writers, a compactor, a collector and readers at once; and most of them killed.

Workers are processes. A writer tells what was acknowledged by a byte-wise append to a file of its
own, right after `append` returned; a kill in between only makes the claim smaller.
"""

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import storage
from tests.storage import children
from tests.storage.rows import OPENED, rollout, score

ROWS = 3  # rollouts an append
APPENDS_PER_ITERATION = 10
GRACE_S = 1.0
KILLS = 200
CROWD_S = 60.0
SEED = 3


def rows_of(run_id: str, number: int) -> dict[str, list[dict[str, object]]]:
    iteration = number // APPENDS_PER_ITERATION
    rollouts = [rollout(f"p{number}", i, iteration) for i in range(ROWS)]
    ids = [storage.event_id("rollouts", {**row, "run_id": run_id}) for row in rollouts]
    return {"rollouts": rollouts, "scores": [score(i, 0.5, iteration) for i in ids]}


def write(path: Path, run_id: str, told: Path, until: float) -> None:
    """Append numbered batches, the newest committed one once more at first, and tell of each."""
    store = storage.open(path)
    writer = store.open_stream(run_id, OPENED)
    number = max(0, len(store.read("rollouts", run_id=run_id)) // ROWS - 1)
    with told.open("ab", buffering=0) as file:
        while time.time() < until:
            is_last = number % APPENDS_PER_ITERATION == APPENDS_PER_ITERATION - 1
            closes = number // APPENDS_PER_ITERATION - 1 if is_last and number > 20 else None
            writer.append(rows_of(run_id, number), f"b{number}", closes_iteration=closes)
            file.write(b"%d\n" % number)
            number += 1


def merge(path: Path, run_id: str, told: Path, until: float) -> None:
    store = storage.open(path)
    with told.open("ab", buffering=0) as file:
        while time.time() < until:
            for done in storage.compact(store, min_segments=8):
                file.write(b"%d\n" % done.num_before)
            time.sleep(0.02)


def clean(path: Path, run_id: str, told: Path, until: float) -> None:
    """Condemn and delete what is older than `GRACE_S`."""
    store = storage.open(path)
    with told.open("ab", buffering=0) as file:
        while time.time() < until:
            done = storage.collect(store, grace_s=GRACE_S)
            file.write(b"%d\n" % done.num_deleted)
            time.sleep(0.1)


def ask(path: Path, run_id: str, told: Path, until: float) -> None:
    """Ask the same of one commit in three ways, and of earlier ones again."""
    store = storage.open(path)
    answers: dict[int, int] = {}
    source = random.Random(run_id)
    with told.open("ab", buffering=0) as file:
        while time.time() < until:
            number = store.head().number
            [[count, ids, whole]] = store.sql(
                "select count(*), count(distinct r.event_id), count(*) filter (s.value = 0.5) "
                f"from rollouts({number}) as r left join scores({number}) as s "
                "on s.target_id = r.event_id"
            ).fetchall()
            assert count == ids == whole
            assert count % ROWS == 0
            answers[number] = count
            earlier = source.choice(sorted(answers))
            rows = store.read("rollouts", as_of=earlier)
            assert len({row["event_id"] for row in rows}) == len(rows) == answers[earlier]
            file.write(b"%d\n" % number)


Role = Callable[[Path, str, Path, float], None]


def work(role: Role, path: Path, name: str, folder: Path, until: float) -> None:
    """Play a role; what goes wrong is written where the test finds it."""
    try:
        role(path, name, folder / f"{name}.told", until)
    except Exception:
        (folder / f"{name}-{os.getpid()}.failed").write_text(traceback.format_exc())
        raise


def start(role: Role, path: Path, name: str, folder: Path, until: float) -> BaseProcess:
    return children.start(work, role, path, name, folder, until)


def told(folder: Path, name: str) -> list[int]:
    path = folder / f"{name}.told"
    return [int(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def check(store: storage.Store, folder: Path, run_ids: Sequence[str]) -> dict[str, int]:
    """Nothing failed, lost or doubled, numbers dense, chain intact; return what was counted."""
    failed = [path.read_text() for path in folder.glob("*.failed")]
    assert not failed, failed[0]
    num_acknowledged = 0
    for run_id in run_ids:
        acknowledged = set(told(folder, run_id))
        num_acknowledged += len(acknowledged)
        rows = store.read("rollouts", run_id=run_id)
        stored = Counter(row["prompt_id"] for row in rows)
        assert len({row["event_id"] for row in rows}) == len(rows)
        assert set(stored.values()) == {ROWS}
        assert {f"p{number}" for number in acknowledged} <= stored.keys()
        assert len(store.read("scores", run_id=run_id)) == len(rows)
    assert storage.verify(store, deep=True) == []
    head = store.head().number
    assert sorted(p.name for p in (store.path / "_log").iterdir()) == [
        f"{number:020d}.json" for number in range(1, head + 1)
    ]
    return {"commits": head, "acknowledged appends": num_acknowledged}


@pytest.mark.slow
def test_eight_writers_a_compactor_and_readers(store: storage.Store, tmp_path: Path):
    folder = tmp_path / "told"
    folder.mkdir()
    until = time.time() + CROWD_S
    run_ids = [f"r{n}" for n in range(8)]
    crowd = [start(write, store.path, run_id, folder, until) for run_id in run_ids]
    crowd += [start(merge, store.path, "compactor", folder, until)]
    crowd += [start(clean, store.path, "collector", folder, until)]
    crowd += [start(ask, store.path, name, folder, until) for name in ("reader-1", "reader-2")]
    for process in crowd:
        process.join(CROWD_S * 5)
        assert process.exitcode == 0
    counted = check(store, folder, run_ids)
    print(f"\n{counted}, {len(told(folder, 'compactor'))} mergers, "
          f"{sum(told(folder, 'collector'))} files deleted, "
          f"{len(told(folder, 'reader-1')) + len(told(folder, 'reader-2'))} questions")  # fmt: skip
    assert all(told(folder, name) for name in ("compactor", "reader-1", "reader-2"))
    assert sum(told(folder, "collector")) > 0


@pytest.mark.soak
def test_two_hundred_random_kills(store: storage.Store, tmp_path: Path):
    folder = tmp_path / "told"
    folder.mkdir()
    source = random.Random(SEED)
    roles: dict[str, Role] = {"r1": write, "r2": write, "compactor": merge, "collector": clean}
    until = time.time() + 7200
    running = {name: start(role, store.path, name, folder, until) for name, role in roles.items()}
    kills: Counter[str] = Counter()
    snapshots: dict[int, list[str]] = {}
    while kills.total() < KILLS:
        time.sleep(source.expovariate(1 / 0.25))
        name = source.choice(sorted(roles))
        running[name].kill()
        running[name].join()
        kills[name] += 1
        running[name] = start(roles[name], store.path, name, folder, until)
        if kills.total() % 10 == 0:
            number = store.head().number
            snapshots[number] = ids_as_of(store, number)
    for process in running.values():
        process.kill()
        process.join()
    counted = check(storage.open(store.path), folder, ["r1", "r2"])
    assert told(folder, "compactor")
    assert sum(told(folder, "collector")) > 0
    for number, ids in snapshots.items():
        assert ids_as_of(store, number) == ids
    print(f"\n{dict(kills)} kills; {counted}, {len(told(folder, 'compactor'))} mergers, "
          f"{sum(told(folder, 'collector'))} files deleted, {len(snapshots)} snapshots "
          "told the same at the end; 0 lost, 0 doubled")  # fmt: skip


def ids_as_of(store: storage.Store, number: int) -> list[str]:
    return [row["event_id"] for row in store.read("rollouts", as_of=number)]
