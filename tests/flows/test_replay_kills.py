"""A replaying run that is killed and resumed equals the one that was not, picks and values too.

One history is the smoke run that replays, of a real sampler. The other is made so that everything
comes up: states, trajectories, prompts, substitutes, forgotten successes, a value model each time.
"""

import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import storage
from tests.flows.conftest import (
    FINGERPRINTED,
    RUN_ID,
    fingerprint,
    kill_after,
    num_commits,
    start_child,
)
from tests.flows.test_resume import committed_rows, final_adapter, finish

SEED = 30  # of the instants below
KILLS = 10  # of each history
TABLES = (*FINGERPRINTED, "states", "replay_plans", "picks", "retries")
EVERYTHING = (
    "sampler.engine=fake", "task.num_train=20", "sampler.prompts=20", "evaluation.every=off",
    "task.reward=tests.flows.rewards:uneven", "replay.share=0.15",
    "replay.replace_zero_variance=true",
)  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """A run that nothing stopped, its command line, and the last commit to kill it at."""

    name: str
    arguments: tuple[str, ...]
    last_commit: int
    store: storage.Store


@pytest.fixture(scope="module", params=["transformers", "everything"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The replaying run, trained once without a break."""
    overrides = ("tracking.mlflow=false", *(EVERYTHING if request.param == "everything" else ()))
    settings = [part for override in overrides for part in ("--set", override)]
    arguments = ("smoke-replay", "--run-id", RUN_ID, *settings)
    path = tmp_path_factory.mktemp(request.param) / "store"
    log = path.parent / "log.txt"
    child = start_child(path, log, *arguments)
    assert child.wait(600) == 0, log.read_text()
    return Whole(request.param, arguments, num_commits(path) - 5, storage.open(path))


@pytest.mark.slow
def test_everything_is_in_play_and_a_kill_changes_nothing_of_it(tmp_path: Path, whole: Whole):
    if whole.name == "everything":
        rows = whole.store.read("replays", run_id=RUN_ID)
        assert {row["unit"] for row in rows} == {"fresh", "state", "trajectory", "prompt"}
        assert {row["pick_kind"] for row in rows} >= {"fresh", "prioritised", "substitute"}
        cuts = Counter(row["cut"] for row in whole.store.read("states", run_id=RUN_ID))
        assert cuts["drop"] > 0
        assert len(versions(whole.store)) == 6
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        check_killed(random.Random(SEED + number), tmp_path / str(number), whole)


@pytest.mark.soak
def test_ten_kills(tmp_path: Path, whole: Whole):
    print(f"\nreplaying, {whole.name}, float32: {KILLS} kills, picks and adapters equal")
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        commits = check_killed(random.Random(SEED + number), folder, whole)
        print(f"  killed at {commits:>3} commits, ended at {num_commits(folder / 'store'):>3}")


def check_killed(instant: random.Random, folder: Path, whole: Whole) -> int:
    """Kill at a random instant, resume, compare; return the commits at the kill."""
    path, log = folder / "store", folder / "log.txt"
    while True:
        child = start_child(path, log, *whole.arguments)
        commit, delay_s = instant.randint(1, whole.last_commit), instant.random() * 0.3
        if kill_after(child, path, commit, delay_s):
            break
        shutil.rmtree(path)  # the run was quicker than its killer: the next instant
    commits, before = num_commits(path), committed_rows(storage.open(path))
    store = finish(path, log)
    after = committed_rows(store)
    assert {event_id: after.get(event_id) for event_id in before} == before
    assert fingerprint(store, tables=TABLES) == fingerprint(whole.store, tables=TABLES)
    assert versions(store) == versions(whole.store)
    assert final_adapter(store) == final_adapter(whole.store)
    assert not storage.verify(store, deep=True)
    return commits


def versions(store: storage.Store) -> list[str]:
    """The value models of the run: a version names the hash of its weights."""
    return [row["scorer_version"] for row in store.read("value_models", run_id=RUN_ID)]
