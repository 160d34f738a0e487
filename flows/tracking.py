"""MLflow: a projection of the event log, never the record. The only file that imports mlflow."""

import logging
import os
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.metrics import iteration_metrics
from storage import Store

RUN_TAG = "rrl.run_id"
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


def tracking_uri(store_path: Path, config: RunConfig) -> str:
    """Return the configured tracking server, or the SQLite file inside the store."""
    return config.tracking.mlflow_uri or f"sqlite:///{store_path / 'mlflow.db'}"


class Tracker:
    """Projects one run's iterations; it starts with the first one, so a bad server costs no run."""

    def __init__(self, store_path: Path, config: RunConfig, run_id: str) -> None:
        self._store_path = store_path
        self._config = config
        self._run_id = run_id
        self._client: Any = None
        self._mlflow_run_id = ""
        self._logged: set[int] = set()
        self._sent: tuple[set[int], Any] | None = None  # iterations on their way, the operation

    def log_iteration(self, store: Store, iteration: int) -> None:
        """Send the metrics of every iteration up to this one that MLflow lacks, each once.

        They are written while the next iteration is sampled: a failure shows at the next call,
        which sends them again.
        """
        if not self._config.tracking.mlflow:
            return
        if self._client is None:
            self._start()
        self._wait()
        missing = set(range(iteration + 1)) - self._logged
        if not missing:
            return
        from mlflow.entities import RunTag

        head = store.head()
        operation = self._client.log_batch(
            self._mlflow_run_id,
            metrics=[m for i in sorted(missing) for m in self._metrics(store, i)],
            tags=[
                RunTag("rrl.head_number", str(head.number)),
                RunTag("rrl.head_sha256", head.sha256),
            ],
            synchronous=False,
        )
        self._sent = missing, operation

    def close(self, how: str) -> None:
        """Wait for what was sent, and mark the MLflow run as ended: finished, interrupted, failed.

        A second call does nothing.
        """
        if self._client is not None:
            client, self._client = self._client, None
            self._wait()
            client.set_terminated(self._mlflow_run_id, _STATUS[how])

    def _wait(self) -> None:
        if self._sent is not None:
            (iterations, operation), self._sent = self._sent, None
            operation.wait()
            self._logged |= iterations

    def _metrics(self, store: Store, iteration: int) -> list[Any]:
        from mlflow.entities import Metric

        moment = _milliseconds(store, self._run_id, iteration)
        metrics = iteration_metrics(store, self._run_id, iteration)
        return [Metric(name, value, moment, iteration) for name, value in sorted(metrics.items())]

    def _start(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):  # importing mlflow sets them to INFO
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri(self._store_path, self._config))
        experiment = client.get_experiment_by_name(self._config.tracking.experiment)
        if experiment is None:
            location = (self._store_path / "mlartifacts").as_uri()
            experiment_id = client.create_experiment(self._config.tracking.experiment, location)
        else:
            experiment_id = experiment.experiment_id
        found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{self._run_id}'")
        if found:
            self._mlflow_run_id = found[0].info.run_id
            client.update_run(self._mlflow_run_id, status="RUNNING")
            history = client.get_metric_history(self._mlflow_run_id, "iteration")
            self._logged = {metric.step for metric in history}
        else:
            tags = {RUN_TAG: self._run_id, "mlflow.runName": self._run_id}
            self._mlflow_run_id = client.create_run(experiment_id, tags=tags).info.run_id
            client.log_dict(
                self._mlflow_run_id, self._config.model_dump(mode="json"), "config.json"
            )
            for name, value in _short_params(self._config).items():
                client.log_param(self._mlflow_run_id, name, value)
        self._client = client


def _milliseconds(store: Store, run_id: str, iteration: int) -> int:
    pins = store.read("views_pinned", run_id=run_id, iteration=iteration)
    return int(pins[0]["recorded_at"].timestamp() * 1000)


def _short_params(config: RunConfig) -> dict[str, Any]:
    return {
        "model": config.model.name,
        "task": config.task.name,
        "algorithm": config.learner.algorithm,
        "learning_rate": config.learner.learning_rate,
        "seed": config.run.seed,
        "iterations": config.run.iterations,
    }
