"""MLflow on SQLite is a projection of the log: complete, without doubles, and never in the way."""

from pathlib import Path
from typing import Any

import pytest

import storage
from flows.config import load_config
from flows.tracking import Tracker, tracking_uri
from tests.storage.rows import OPENED, pin, update

pytestmark = pytest.mark.slow  # importing mlflow and creating its tables takes seconds
RUN_ID = "r1"


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    store = storage.open(tmp_path / "store", create=True)
    writer = store.open_stream(RUN_ID, OPENED)
    for iteration in range(3):
        rows = {"views_pinned": [pin(iteration)], "updates": [update(iteration, loss=iteration)]}
        writer.append(rows, f"i{iteration}")
    return store


def make_tracker(store: storage.Store) -> Tracker:
    return Tracker(store.path, load_config(Path("smoke"), []), RUN_ID)


def losses(store: storage.Store) -> list[tuple[int, float]]:
    client, run = _client_and_run(store)
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "learn/loss")]


def status(store: storage.Store) -> str:
    return str(_client_and_run(store)[1].info.status)


def _client_and_run(store: storage.Store) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(store.path, load_config(Path("smoke"), [])))
    experiment = client.get_experiment_by_name("rrl")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_every_iteration_is_logged_once_also_by_a_resumed_run(store: storage.Store):
    tracker = make_tracker(store)
    tracker.log_iteration(store, 0)
    tracker.log_iteration(store, 0)
    tracker.close("interrupted")
    assert (losses(store), status(store)) == ([(0, 0.0)], "KILLED")

    resumed = make_tracker(store)
    resumed.log_iteration(store, 2)  # iteration 1 was lost with the process that was to send it
    resumed.close("finished")
    resumed.close("finished")
    assert (losses(store), status(store)) == ([(0, 0.0), (1, 1.0), (2, 2.0)], "FINISHED")


def test_metrics_that_did_not_arrive_are_sent_again(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    real, problems = SqlAlchemyStore.log_batch, ["disk on fire"]

    def log_batch(*arguments: Any, **named: Any) -> None:
        if problems:
            raise OSError(problems.pop())
        real(*arguments, **named)

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", log_batch)
    tracker = make_tracker(store)
    tracker.log_iteration(store, 0)
    with pytest.raises(Exception, match="disk on fire"):
        tracker.log_iteration(store, 1)
    tracker.log_iteration(store, 2)
    tracker.close("failed")
    assert (losses(store), status(store)) == ([(0, 0.0), (1, 1.0), (2, 2.0)], "FAILED")
