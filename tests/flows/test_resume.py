"""A run that is killed and resumed equals the run that was not, event by event."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from storage.schemas import TABLES
from tests.flows.conftest import (
    RUN_ID,
    fingerprint,
    kill_after,
    num_commits,
    start_child,
    train_command,
)

SEED = 20  # of the instants below
COMMITS = 24  # of the 31 of an uninterrupted smoke run
KILLED_INSIDE_APPEND = """
import os, signal, sys
from storage.files import Files
from flows.cli import main

segments = 0

def passed(self, step, path):
    global segments
    segments += step == "folders synced" and path.startswith("events/")
    if segments == {number}:
        os.kill(os.getpid(), signal.SIGKILL)

Files.passed = passed
sys.argv = {arguments!r}
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_killed_and_resumed_equals_uninterrupted(
    number: int, tmp_path: Path, uninterrupted: storage.Store
):
    check_killed_run(random.Random(SEED + number), tmp_path, uninterrupted)


@pytest.mark.slow
def test_killed_between_segment_and_commit_equals_uninterrupted(
    tmp_path: Path, uninterrupted: storage.Store
):
    kill_inside_append(tmp_path, number=17)
    assert fingerprint(storage.open(tmp_path / "store")) == fingerprint(uninterrupted)


@pytest.mark.vllm
@pytest.mark.parametrize("number", range(3))
def test_with_vllm_committed_rows_are_reused_verbatim(number: int, tmp_path: Path):
    check_killed_vllm_run(random.Random(SEED + number), tmp_path)


@pytest.mark.vllm
def test_with_vllm_a_kill_between_segment_and_commit_loses_nothing(tmp_path: Path):
    kill_inside_append(tmp_path, 17, "sampler.engine=vllm")


@pytest.mark.slow
def test_resuming_a_finished_run_writes_nothing(uninterrupted: storage.Store):
    commits = num_commits(uninterrupted.path)
    again = finish(uninterrupted.path, uninterrupted.path.parent / "again.txt")
    assert num_commits(again.path) == commits


def check_killed_run(instant: random.Random, folder: Path, uninterrupted: storage.Store) -> int:
    """Kill at a random instant, resume, compare; return the commits at the kill."""
    commits = kill_at_random(instant, folder)
    store = check_resumed(folder)
    assert fingerprint(store) == fingerprint(uninterrupted)
    assert final_adapter(store) == final_adapter(uninterrupted)
    return commits


def check_killed_vllm_run(instant: random.Random, folder: Path) -> int:
    """Kill a vLLM run at a random instant, resume; return the commits at the kill."""
    commits = kill_at_random(instant, folder, "sampler.engine=vllm")
    check_resumed(folder)
    return commits


def kill_at_random(instant: random.Random, folder: Path, *overrides: str) -> int:
    """Start the smoke run and kill -9 it at a random instant; return its commits by then."""
    path, log = folder / "store", folder / "log.txt"
    while True:
        child = start_child(path, log, *new_run(*overrides))
        if kill_after(child, path, instant.randint(1, COMMITS), instant.random() * 0.3):
            return num_commits(path)
        shutil.rmtree(path)  # the run was quicker than its killer: the next instant


def kill_inside_append(folder: Path, number: int, *overrides: str) -> int:
    """Kill -9 when the `number`-th segment is linked and no commit names it; resume and check."""
    arguments = train_command(folder / "store", *new_run(*overrides))[2:]
    code = KILLED_INSIDE_APPEND.format(number=number, arguments=arguments)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    commits = num_commits(folder / "store")
    check_resumed(folder)
    return commits


def check_resumed(folder: Path) -> storage.Store:
    """Resume the killed run: nothing lost, nothing doubled, nothing rewritten, nothing missing."""
    path = folder / "store"
    before = committed_rows(storage.open(path))
    store = finish(path, folder / "log.txt")
    after = committed_rows(store)
    assert {event_id: after.get(event_id) for event_id in before} == before
    check_complete(store)
    assert not storage.verify(store, deep=True)
    return store


def check_complete(store: storage.Store) -> None:
    """Every planned event of the smoke run is there exactly once."""
    for iteration in (1, 2, 3):
        rollouts = store.read("rollouts", run_id=RUN_ID, iteration=iteration)
        attempts = [row for row in rollouts if row["role"] == "attempt"]
        places = {(row["prompt_id"], row["sample_index"]) for row in attempts}
        assert len(attempts) == len(places) == 16
        assert len(store.read("updates", run_id=RUN_ID, iteration=iteration)) == 1
    assert [p["policy_version"] for p in store.read("policies", run_id=RUN_ID)] == [0, 1, 2, 3]


def committed_rows(store: storage.Store) -> dict[str, str]:
    """Content hash by event id, over every table; no event stands twice."""
    rows = [row for table in TABLES for row in store.read(table)]
    by_id = {row["event_id"]: row["content_sha256"] for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def final_adapter(store: storage.Store) -> str:
    rows = store.read("policies", run_id=RUN_ID)
    return str(max(rows, key=lambda row: row["policy_version"])["adapter_digest"])


def finish(store_path: Path, log: Path) -> storage.Store:
    child = start_child(store_path, log, "--resume", RUN_ID)
    assert child.wait(300) == 0, log.read_text()[-3000:]
    return storage.open(store_path)


def new_run(*overrides: str) -> list[str]:
    sets = [part for o in ("tracking.mlflow=false", *overrides) for part in ("--set", o)]
    return ["smoke", "--run-id", RUN_ID, *sets]
