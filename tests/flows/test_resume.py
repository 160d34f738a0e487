"""A run that is killed and resumed equals the run that was not, event by event."""

import random
from pathlib import Path

import pytest

import storage
from tests.flows.conftest import RUN_ID, fingerprint, kill_after, num_commits, start_child

SEED = 20  # of the instants below


def finish(store_path: Path, log: Path) -> storage.Store:
    child = start_child(store_path, log, "--resume", RUN_ID)
    assert child.wait(300) == 0, log.read_text()[-3000:]
    return storage.open(store_path)


def final_adapter(store: storage.Store) -> str:
    rows = store.read("policies", run_id=RUN_ID)
    return str(max(rows, key=lambda row: row["policy_version"])["adapter_digest"])


def committed_rows(store: storage.Store) -> dict[str, str]:
    """Content hash by event id, over every table."""
    return {
        row["event_id"]: row["content_sha256"]
        for table in storage.TABLES
        for row in store.read(table)
    }


def killed_store(store_path: Path, log: Path, instant: random.Random, *overrides: str) -> bool:
    """Start the smoke run and kill it at a random instant; False when it was quicker."""
    sets = [part for o in ("tracking.mlflow=false", *overrides) for part in ("--set", o)]
    child = start_child(store_path, log, "smoke", "--run-id", RUN_ID, *sets)
    return kill_after(child, store_path, instant.randint(1, 24), instant.random() * 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_killed_and_resumed_equals_uninterrupted(
    number: int, tmp_path: Path, uninterrupted: storage.Store
):
    check_killed_run(random.Random(SEED + number), tmp_path, uninterrupted)


def check_killed_run(instant: random.Random, folder: Path, uninterrupted: storage.Store) -> None:
    """Kill at `instant`, resume, compare event by event."""
    path, log = folder / "store", folder / "log.txt"
    assert killed_store(path, log, instant)
    before = committed_rows(storage.open(path))
    store = finish(path, log)
    after = committed_rows(store)
    assert {i: after.get(i) for i in before} == before
    assert fingerprint(store) == fingerprint(uninterrupted)
    assert final_adapter(store) == final_adapter(uninterrupted)
    assert not storage.verify(store, deep=True)


@pytest.mark.vllm
@pytest.mark.parametrize("number", range(3))
def test_with_vllm_committed_rows_are_reused_verbatim(number: int, tmp_path: Path):
    check_killed_vllm_run(random.Random(SEED + number), tmp_path)


def check_killed_vllm_run(instant: random.Random, folder: Path) -> None:
    """Kill a vLLM run at `instant`, resume: nothing lost, nothing doubled, nothing rewritten."""
    path, log = folder / "store", folder / "log.txt"
    assert killed_store(path, log, instant, "sampler.engine=vllm")
    before = committed_rows(storage.open(path))
    store = finish(path, log)
    after = committed_rows(store)
    assert {i: after.get(i) for i in before} == before
    check_complete(store)
    assert not storage.verify(store, deep=True)


def check_complete(store: storage.Store) -> None:
    """Every planned event of the smoke run is there exactly once."""
    for iteration in (1, 2, 3):
        rollouts = store.read("rollouts", run_id=RUN_ID, iteration=iteration)
        attempts = [row for row in rollouts if row["role"] == "attempt"]
        places = {(row["prompt_id"], row["sample_index"]) for row in attempts}
        assert len(attempts) == len(places) == 16
        assert len(store.read("updates", run_id=RUN_ID, iteration=iteration)) == 1
    assert sorted(p["policy_version"] for p in store.read("policies", run_id=RUN_ID)) == [
        0,
        1,
        2,
        3,
    ]


def test_resuming_a_finished_run_writes_nothing(uninterrupted: storage.Store):
    commits = num_commits(uninterrupted.path)
    again = finish(uninterrupted.path, uninterrupted.path.parent / "again.txt")
    assert num_commits(again.path) == commits
