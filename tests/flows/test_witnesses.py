"""SQL, the MLflow client and the Prefect client tell the same story of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import storage
from tests.flows.conftest import RUN_ID

TOLERANCE = 1e-12
ASK_PREFECT = """
import asyncio, json, sys
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterName)

async def main(run_id):
    async with get_client() as client:
        (flow_run,) = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run_id])))
        tasks = await client.read_task_runs(
            flow_run_filter=FlowRunFilter(id={"any_": [flow_run.id]}), limit=200)
        (artifact,) = await client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["rewards-" + run_id])))
    print(json.dumps({"state": flow_run.state.name, "tasks": [t.name for t in tasks],
                      "rewards": json.loads(artifact.data)}))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
def test_sql_mlflow_and_prefect_agree_on_iterations_and_rewards(tmp_path: Path):
    store_path = tmp_path / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flows.cli", "train", "smoke", "--run-id", RUN_ID,
               "--store", str(store_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    query = (
        "select iteration, mean_reward from training_history "
        f"where run_id = '{RUN_ID}' and mean_reward is not null order by iteration"
    )
    by_sql = dict(storage.open(store_path).sql(query).fetchall())
    assert sorted(by_sql) == [1, 2, 3]
    assert rewards_in_mlflow(store_path) == pytest.approx(by_sql, abs=TOLERANCE)
    seen = ask_prefect(store_path)
    assert seen["state"] == "Completed"
    assert sorted(n for n in seen["tasks"] if n.startswith("learn-")) == [
        "learn-1", "learn-2", "learn-3",
    ]  # fmt: skip
    by_prefect = {
        row["iteration"]: row["mean_reward"]
        for row in seen["rewards"]
        if row["mean_reward"] is not None
    }
    assert by_prefect == pytest.approx(by_sql, abs=TOLERANCE)


def rewards_in_mlflow(store_path: Path) -> dict[int, float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rrl")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`rrl.run_id` = '{RUN_ID}'")
    assert run.info.status == "FINISHED"
    return {m.step: m.value for m in client.get_metric_history(run.info.run_id, "reward/mean")}


def ask_prefect(store_path: Path) -> dict[str, Any]:
    """Ask in a process of its own, with the Prefect home the run used."""
    environment = os.environ | {"PREFECT_HOME": str(store_path / "prefect")}
    environment.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    done = subprocess.run(
        [sys.executable, "-c", ASK_PREFECT, RUN_ID],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
