"""A reviewing run that is killed and resumed equals the one that was not, its memory too.

The scripted policy writes reviews that are verified and shown again: its memory is never empty.
"""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from tests.flows.conftest import RUN_ID, fingerprint, kill_after, num_commits
from tests.flows.test_resume import committed_rows, final_adapter
from tests.flows.test_review import TABLES

SEED = 60  # of the instants below


def start(path: Path) -> subprocess.Popen[bytes]:
    """Start, or go on with, the scripted run in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with path.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "tests.flows.scripted_reviews", str(path)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """The run, trained once without a break."""
    path = tmp_path_factory.mktemp("whole") / "store"
    assert start(path).wait(600) == 0, path.with_suffix(".log").read_text()
    store = storage.open(path)
    assert len(memory(store)) > 10
    assert any(row["memory_tokens"] for row in store.read("reviews", run_id=RUN_ID))
    return store


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_killed_and_resumed_equals_uninterrupted(number: int, tmp_path: Path, whole: storage.Store):
    check_killed(random.Random(SEED + number), tmp_path, whole)


@pytest.mark.soak
def test_twenty_kills(tmp_path: Path, whole: storage.Store):
    print("\nreviewing, a scripted policy: 20 kills, memory and adapters equal")
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        commits = check_killed(random.Random(SEED + number), folder, whole)
        print(f"  killed at {commits:>3} commits, ended at {num_commits(folder / 'store'):>3}")


def check_killed(instant: random.Random, folder: Path, whole: storage.Store) -> int:
    """Kill at a random instant, resume, compare; return the commits at the kill."""
    path, last = folder / "store", num_commits(whole.path) - 4
    while True:
        child = start(path)
        if kill_after(child, path, instant.randint(1, last), instant.random() * 0.3):
            break
        shutil.rmtree(path)  # the run was quicker than its killer: the next instant
    commits, before = num_commits(path), committed_rows(storage.open(path))
    assert start(path).wait(600) == 0, path.with_suffix(".log").read_text()
    store = storage.open(path)
    after = committed_rows(store)
    assert {event_id: after.get(event_id) for event_id in before} == before
    assert fingerprint(store, tables=TABLES) == fingerprint(whole, tables=TABLES)
    assert final_adapter(store) == final_adapter(whole)
    assert memory(store) == memory(whole)
    assert not storage.verify(store, deep=True)
    return commits


def memory(store: storage.Store) -> list[tuple[str, str, int, int]]:
    """Return what the memory view holds of the run."""
    rows = store.view("memory", arguments={"run": RUN_ID})
    return [(r["review_id"], r["review"], r["num_helpful"], r["num_harmful"]) for r in rows]
