"""Runs of the smoke configuration, in this process or in child processes that can be killed."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.config import RunConfig, load_config
from flows.progress import Progress
from flows.train import train

RUN_ID = "smoke-run"
FINGERPRINTED = ("prompts", "rollouts", "rollout_tokens", "scores", "replays", "learned_samples",
                 "updates", "policies", "evaluations")  # fmt: skip


def smoke_config(*overrides: str) -> RunConfig:
    return load_config(Path("smoke"), ["tracking.mlflow=false", *overrides])


def replay_config(*overrides: str) -> RunConfig:
    return load_config(Path("smoke-replay"), ["tracking.mlflow=false", *overrides])


def run_here(store_path: Path, config: RunConfig, run_id: str = RUN_ID) -> storage.Store:
    """Train in this process without an orchestrator; return the store."""
    store = storage.open(store_path, create=True)
    with Progress(quiet=True) as progress:
        assert train(store, config, run_id, "none", progress) == "finished"
    return store


def fingerprint(
    store: storage.Store, run_id: str = RUN_ID, tables: tuple[str, ...] = FINGERPRINTED
) -> dict[str, list[tuple[str, str]]]:
    """Per table the (event id, content hash) of the run's events, sorted.

    `runs` and `views_pinned` are left out: they say in which epoch and at which commit.
    """
    return {
        table: sorted(
            (r["event_id"], r["content_sha256"]) for r in store.read(table, run_id=run_id)
        )
        for table in tables
    }


def train_command(store_path: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli", "train", *arguments, "--orchestrator", "none",
            "--store", str(store_path)]  # fmt: skip


def start_child(store_path: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as stream:
        return subprocess.Popen(
            train_command(store_path, *arguments), stdout=stream, stderr=stream, env=environment
        )


def num_commits(store_path: Path) -> int:
    return len(list((store_path / "_log").glob("[0-9]*.json")))


def kill_after(
    child: subprocess.Popen[bytes], store_path: Path, commits: int, delay_s: float
) -> bool:
    """Kill -9 the child `delay_s` after the store holds `commits`; False when it ended before."""
    deadline = time.monotonic() + 240
    while num_commits(store_path) < commits and child.poll() is None:
        assert time.monotonic() < deadline, "the child commits nothing"
        time.sleep(0.002)
    time.sleep(delay_s)
    if child.poll() is not None:
        return False
    child.send_signal(signal.SIGKILL)
    child.wait()
    return True


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> storage.Store:
    """Return the store that `make` fills at a path: the first worker that needs it does."""
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path, is_made = folder / name / "store", folder / name / "made"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            path.parent.mkdir()
            make(path)
            is_made.touch()
    return storage.open(path)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """The smoke run, trained once without a break (one thread, like the children)."""

    def make(path: Path) -> None:
        log, changed = path.parent / "log.txt", "tracking.mlflow=false"
        child = start_child(path, log, "smoke", "--run-id", RUN_ID, "--set", changed)
        assert child.wait(240) == 0, log.read_text()

    return made_once(tmp_path_factory, "uninterrupted", make)


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """The smoke run that replays every unit; read it, never write to it."""
    return replayed_store(tmp_path_factory)


def replayed_store(factory: pytest.TempPathFactory) -> storage.Store:
    return made_once(factory, "replayed", lambda path: run_here(path, replay_config()))


Snapshot = Callable[[storage.Store], Any]
