"""A rescoring killed at any instant goes on where it was, and needs no more memory as it goes."""

import multiprocessing
import os
import random
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.rescoring import RescoreSummary
from storage.slices import ShardRows
from tests.flows import histories
from tests.flows.conftest import num_commits, smoke_config
from tests.flows.histories import check_judged_once, rescore_here, rescore_in_child, write_history
from tests.storage.conftest import memory_path  # noqa: F401 - a fixture

SEED = 7  # of the instants
KILLS = 5
SHARD = 128
SCORER = "tests.flows.rewards:unhurried"
SOAK_ROLLOUTS = 100_000
MAX_GROWTH_BYTES = 2**20
_children = multiprocessing.get_context("forkserver")
_children.set_forkserver_preload(["storage.writer", "storage.slices", histories.__name__])


def kill_at_random(store: storage.Store, instant: random.Random, scorer: str, shard: int) -> int:
    """Judge in a child and kill -9 it at a random instant of its work; return the shards it closed.

    -1: it had finished before.
    """
    before = num_commits(store.path)
    child = _children.Process(target=rescore_in_child, args=(store.path, scorer, shard))
    child.start()
    commits, delay_s = instant.randint(2, 5), instant.random() * 0.05
    deadline = time.monotonic() + 120
    while num_commits(store.path) < before + commits and child.is_alive():
        assert time.monotonic() < deadline, "the child commits nothing"
        time.sleep(0.001)
    time.sleep(delay_s)
    child.kill()
    child.join()
    if child.exitcode != -signal.SIGKILL:
        assert child.exitcode == 0
        return -1
    [stream] = [s for s in store.log.refresh().streams if s.startswith("rescore")]
    return store.log.refresh().closed_iteration(stream) + 1


def kill_and_resume(
    store: storage.Store, scorer: str, shard: int, kills: int
) -> tuple[list[int], RescoreSummary]:
    """Kill so many times, then let it finish; return the shards closed at each kill."""
    instant = random.Random(SEED)
    closed = [kill_at_random(store, instant, scorer, shard) for _ in range(kills)]
    return closed, rescore_here(store, scorer, shard_rollouts=shard)


def check_resumed(
    store: storage.Store, ids: list[str], closed: list[int], done: RescoreSummary
) -> None:
    """No finished shard was repeated, every score is there once, and nothing is left to do."""
    assert done.ended == "finished"
    assert closed == sorted(closed)
    assert done.num_shards_before == closed[-1] > 0
    assert done.num_shards_judged == done.num_shards - done.num_shards_before
    check_judged_once(store, ids, done.scorer)
    rows = store.read("runs", run_id=done.stream_id)
    assert [row["what"] for row in rows] == ["opened"] * (len(closed) + 1) + ["finished"]
    head = store.head()
    again = rescore_here(store, done.scorer, shard_rollouts=SHARD)
    assert (again.ended, again.scores, store.head()) == ("nothing to do", {}, head)


@pytest.mark.slow
def test_five_kills_repeat_no_shard_and_lose_no_score(memory_path: Path):  # noqa: F811
    store = storage.open(memory_path, create=True)
    ids = write_history(store, 2_048, per_commit=512)
    closed, done = kill_and_resume(store, SCORER, SHARD, KILLS)
    check_resumed(store, ids, closed, done)


@pytest.mark.soak
def test_twenty_kills_of_a_long_history(memory_path: Path):  # noqa: F811
    store = storage.open(memory_path, create=True)
    ids = write_history(store, 20_000, per_commit=2_000)
    closed, done = kill_and_resume(store, SCORER, 128, 20)
    check_resumed(store, ids, closed, done)


@pytest.mark.slow
def test_killed_between_segments_and_commit_repeats_the_shard_alone(memory_path: Path):  # noqa: F811
    store = storage.open(memory_path, create=True)
    ids = write_history(store, 512)
    child = _children.Process(target=die_inside_append, args=(store.path, 3))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    [stream] = [s for s in store.log.refresh().streams if s.startswith("rescore")]
    closed = store.log.refresh().closed_iteration(stream) + 1
    check_resumed(store, ids, [closed], rescore_here(store, "final_number", shard_rollouts=SHARD))


def die_inside_append(path: Path, number: int) -> None:
    """Judge, and die when the `number`-th segment of scores is in its place and in no commit."""
    from storage.files import Files

    num_segments = 0

    def passed(self: Files, step: str, place: str) -> None:
        nonlocal num_segments
        num_segments += step == "linked" and place.startswith("events/scores/")
        if num_segments == number:
            os.kill(os.getpid(), signal.SIGKILL)

    Files.passed = passed  # type: ignore[method-assign]
    rescore_in_child(path, "final_number", SHARD)


def measured(monkeypatch: pytest.MonkeyPatch, measure: Callable[[], int], every: int) -> list[int]:
    """Have `measure` called at every so manieth shard that is read; return its answers."""
    from storage.slices import Slice

    read, answers, num_read = Slice.read, list[int](), 0

    def measured_read(self: Slice, shard: Any) -> ShardRows:
        nonlocal num_read
        num_read += 1
        if num_read % every == 0:
            answers.append(measure())
        return read(self, shard)

    monkeypatch.setattr(Slice, "read", measured_read)
    return answers


def test_memory_stays_flat(memory_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    store = storage.open(memory_path, create=True)
    write_history(store, 640, per_commit=128)
    sizes = measured(monkeypatch, lambda: tracemalloc.get_traced_memory()[0], every=2)
    tracemalloc.start()
    try:
        rescore_here(store, "final_number", shard_rollouts=32)
    finally:
        tracemalloc.stop()
    # 20 shards: the first figure is at 10 %.
    assert len(sizes) == 10
    assert max(sizes[1:]) - sizes[0] < MAX_GROWTH_BYTES


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.soak
def test_a_hundred_thousand_rollouts_by_a_value_model_in_flat_memory(
    memory_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    from flows.wiring import model_spec
    from rrl_core.policy.model import load_policy_model
    from tests.flows.test_rescore_value import judged, make_model, publish, write_run

    store = storage.open(memory_path, create=True)
    ids = write_run(store, SOAK_ROLLOUTS, per_commit=5_000)
    policy = load_policy_model(model_spec(smoke_config()), seed=0)
    publish(store, make_model(policy, 1), "v1")
    instant = random.Random(SEED)
    closed = [kill_at_random(store, instant, "value", 512) for _ in range(KILLS)]
    sizes = measured(monkeypatch, rss_bytes, every=SOAK_ROLLOUTS // 512 // 10)
    started = time.monotonic()
    done = rescore_here(store, "value")
    per_s = sum(done.scores.values()) / (time.monotonic() - started)
    print(f"\n{per_s:.0f} states/s, shards closed at the kills {closed}, RSS {sizes} bytes")
    assert (done.ended, done.num_shards_before) == ("finished", closed[-1])
    assert {rollout_id for rollout_id, _ in judged(store, "v1")} == set(ids)
    assert rescore_here(store, "value").ended == "nothing to do"
    assert max(sizes[1:]) - sizes[0] < 64 * MAX_GROWTH_BYTES
