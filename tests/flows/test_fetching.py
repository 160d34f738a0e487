"""What a batch needs of earlier iterations is read while the sampler generates, and once."""

import threading
from pathlib import Path

import pytest

import storage
from flows import fetching, replaying, tasks
from flows.planned import OldRows, old_rows, picks_before_sampling, planned_steps
from flows.progress import Progress
from flows.train import train
from flows.wiring import session_of
from rrl_core.sampling.fake import FakeSampler
from tests.flows.conftest import RUN_ID
from tests.flows.scripted import forgetful, run_script, script, scripted_config

LATE = 4  # the iteration that replays a trajectory
PATIENCE_S = 30.0


def test_it_is_read_during_generation_and_let_go_of_after_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_read = threading.Event()
    read, generate, learn = fetching.old_rows, FakeSampler.generate, tasks.learn
    held: dict[int, OldRows] = {}

    def note(*arguments) -> OldRows:
        found = read(*arguments)
        is_read.set()
        return found

    def generate_later(self: FakeSampler, *arguments):
        assert is_read.wait(PATIENCE_S)  # never, if it began after generation
        is_read.clear()
        return generate(self, *arguments)

    def learn_and_look(run_id: str, iteration: int) -> int:
        session = session_of(run_id)
        held[iteration] = fetching.fetched(session, iteration).old
        version = learn(run_id, iteration)
        assert session.fetch is None
        return version

    monkeypatch.setattr(fetching, "old_rows", note)
    monkeypatch.setattr(FakeSampler, "generate", generate_later)
    monkeypatch.setattr(tasks, "learn", learn_and_look)
    store = run_script(tmp_path / "store", scripted_config(), forgetful, monkeypatch)
    assert [len(held[i].tokens) for i in (1, 2, 3, 4, 5)] == [0, 0, 0, 1, 0]
    [pick] = store.read("picks", run_id=RUN_ID, iteration=LATE)
    assert set(held[LATE].rollouts) == set(held[LATE].tokens) == {pick["rollout_id"]}
    assert planned_steps(store, RUN_ID, LATE, held[LATE]) == planned_steps(store, RUN_ID, LATE)


def test_what_goes_wrong_surfaces_after_generation_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments) -> OldRows:
        raise storage.DamagedError("a segment is gone")

    config = scripted_config("run.iterations=1")
    script(forgetful, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "old_rows", broken)
        store = storage.open(tmp_path / "store", create=True)
        with (
            Progress(quiet=True) as progress,
            pytest.raises(storage.DamagedError, match="a segment is gone"),
        ):
            train(store, config, RUN_ID, "none", progress)
    assert len(store.read("rollouts", run_id=RUN_ID)) == 32  # sampled and kept
    assert store.read("replays", run_id=RUN_ID) == []
    with Progress(quiet=True) as progress:
        assert train(store, config, RUN_ID, "none", progress) == "finished"
    assert len(store.read("replays", run_id=RUN_ID)) == 32


def test_steps_are_the_same_whether_old_rows_are_given_or_read(replayed: storage.Store):
    scorer = ("rrl_core.tasks.dense:contains_digit", replay_version(replayed))
    for iteration in range(2, 7):
        old = old_rows(replayed, picks_before_sampling(replayed, RUN_ID, iteration), scorer)
        read, given = (planned_steps(replayed, RUN_ID, iteration, o) for o in (None, old))
        assert read == given


def replay_version(store: storage.Store) -> str:
    rows = store.read("scores", run_id=RUN_ID, iteration=1)
    return next(r["scorer_version"] for r in rows if r["kind"] == "reward")


def test_what_is_replayed_is_decided_once_an_iteration_and_again_after_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decide, decided = replaying.decide, []

    def note(*arguments):
        decided.append(arguments[3])
        return decide(*arguments)

    monkeypatch.setattr(replaying, "decide", note)
    config = scripted_config("replay.replace_zero_variance=true", "run.iterations=3")
    with monkeypatch.context() as broken:
        broken.setattr(tasks, "generate", lambda run_id, iteration: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_script(tmp_path / "store", config, forgetful, broken)
    assert decided == [1]
    run_script(tmp_path / "store", config, forgetful, monkeypatch)
    assert decided == [1, 1, 2, 3]
