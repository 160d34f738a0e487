"""A value model fitted from outside: judged by, seen in the buffer, and no part of the run."""

import shutil
from pathlib import Path

import pytest

import storage
from flows import deployments, tasks
from flows.materializing import Moment, materialize
from flows.past import refit_history
from flows.progress import Progress
from flows.rescoring import RescoreRequest, rescore
from tests.flows.conftest import RUN_ID, replay_config, run_here
from tests.flows.test_replay import contents


def test_a_model_fitted_from_outside_judges_what_a_run_left(
    replayed: storage.Store, tmp_path: Path
):
    shutil.copytree(replayed.path, tmp_path / "store")
    store = storage.open(tmp_path / "store")
    with Progress(quiet=True) as progress:
        row = refit_history(store, RUN_ID, progress)
        assert row["run_id"] == f"refit-{RUN_ID}-1"
        assert row["num_states"] > 100
        summary = rescore(store, RescoreRequest("value", run_id=RUN_ID), progress)
        again = rescore(store, RescoreRequest("value", run_id=RUN_ID), progress)
    assert summary.scorer_version == row["scorer_version"]
    assert summary.scores["ok"] > 100
    assert again.ended == "nothing to do"
    moment = Moment(store.head().number, row["scorer_version"])
    found = materialize(store, RUN_ID, replay_config(), moment, limit=1000)
    judged = [r for r in found.best if r["unit"] == "state"]
    assert judged
    assert {r["scorer_version"] for r in judged} == {row["scorer_version"]}
    assert not storage.verify(store, deep=True)


def test_the_scheduled_refit_judges_the_states_of_its_run(
    replayed: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(replayed.path, tmp_path / "store")
    for step in ("refit", "rescore"):  # without a Prefect server
        monkeypatch.setattr(deployments, step, getattr(deployments, step).fn)
    monkeypatch.setattr(deployments.LoggedProgress, "note", lambda self, text: None)
    told = deployments.refit_value_model.fn(tmp_path / "store")
    store = storage.open(tmp_path / "store")
    [model] = store.read("value_models", run_id=f"refit-{RUN_ID}-1")
    assert told["version"] == model["scorer_version"]
    judged = store.read("scores", run_id=told["stream"])
    assert {row["scorer_version"] for row in judged} == {model["scorer_version"]}
    assert {row["target_id"] for row in judged} == {row["event_id"] for row in store.read("states")}


def test_a_second_fit_is_another_stream(replayed: storage.Store, tmp_path: Path):
    shutil.copytree(replayed.path, tmp_path / "store")
    store = storage.open(tmp_path / "store")
    with Progress(quiet=True) as progress:
        first = refit_history(store, RUN_ID, progress)
        second = refit_history(store, RUN_ID, progress)
    assert (first["run_id"], second["run_id"]) == (f"refit-{RUN_ID}-1", f"refit-{RUN_ID}-2")
    assert first["artifact"] == second["artifact"]


def test_fitting_from_outside_changes_no_pick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # a run without a value model of its own, which never cuts its responses
    config = replay_config("value.every=off", "run.iterations=4")
    quiet = run_here(tmp_path / "quiet", config)
    original = tasks.track

    def track_and_fit(run_id: str, iteration: int) -> None:
        original(run_id, iteration)
        if iteration > 0:
            with Progress(quiet=True) as progress:
                refit_history(storage.open(tmp_path / "store"), run_id, progress)

    monkeypatch.setattr(tasks, "track", track_and_fit)
    disturbed = run_here(tmp_path / "store", config)
    assert len(disturbed.read("value_models")) == 4
    for table in ("replay_plans", "picks", "replays", "policies"):
        assert contents(disturbed, table) == contents(quiet, table), table


def test_a_run_without_rollouts_is_refused(tmp_path: Path):
    store = storage.open(tmp_path / "store", create=True)
    with Progress(quiet=True) as progress, pytest.raises(storage.StorageError, match="no run"):
        refit_history(store, "nobody", progress)
