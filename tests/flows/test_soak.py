"""Twenty kills of each kind, with a printed table: `make soak`."""

import random
from pathlib import Path

import pytest

import storage
from tests.flows.conftest import num_commits
from tests.flows.test_resume import (
    SEED,
    check_killed_run,
    check_killed_vllm_run,
    kill_inside_append,
)

KILLS = 20


def report(engine: str, results: list[tuple[str, int, int]]) -> None:
    print(f"\n{engine}: {len(results)} kills, 0 events lost, 0 doubled, 0 rewritten")
    print("  instant           commits at the kill   commits at the end")
    for instant, before, after in results:
        print(f"  {instant:<17} {before:>19} {after:>20}")


@pytest.mark.soak
def test_twenty_kills_with_the_transformers_sampler(tmp_path: Path, uninterrupted: storage.Store):
    results = []
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        before = check_killed_run(random.Random(SEED + number), folder, uninterrupted)
        results.append((f"random {number}", before, num_commits(folder / "store")))
    report("transformers, float32", results)


@pytest.mark.soak
def test_twenty_kills_with_vllm(tmp_path: Path):
    results = []
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number % 4 == 3:
            instant = f"inside append {number}"
            before = kill_inside_append(folder, number, "sampler.engine=vllm")
        else:
            instant = f"random {number}"
            before = check_killed_vllm_run(random.Random(SEED + number), folder)
        results.append((instant, before, num_commits(folder / "store")))
    report("vllm", results)
