"""Schedules: what is shipped fits the flows, and a real Prefect server and worker run them.

SQLAlchemy 2.1 makes the scheduler of Prefect 3.7 fail; the pins keep it at 2.0.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import load_flow_from_entrypoint

import storage
from flows import deploy_commands, deployments
from flows.config import CONFIGS_DIR, ConfigError, load_config
from flows.deploy_commands import read_deployments
from tests.flows.conftest import RUN_ID, fingerprint, num_commits
from tests.flows.prefect_server import ROOT, PrefectServer, children, wait_until

NAMES = {"train", "rescore-history", "refit-value-model", "evaluate", "compact-and-verify",
         "resume-dead-runs"}  # fmt: skip
LATE_S = 20.0  # a scheduled flow is at work by then: its process imports Prefect first
INTERVAL_S = 5
SMOKE = {"config": "smoke", "overrides": ["tracking.mlflow=false"], "run_id": RUN_ID}


def test_the_shipped_file_is_what_prefect_reads():
    import yaml

    read = PrefectYamlModel.model_validate(
        yaml.safe_load((CONFIGS_DIR / "prefect.yaml").read_text())
    )
    assert {d.name for d in read.deployments} == NAMES
    assert {d.work_pool.name for d in read.deployments if d.work_pool} == {"rrl"}


@pytest.mark.parametrize("entry", read_deployments(), ids=lambda entry: entry["name"])
def test_every_deployment_names_a_flow_that_takes_its_parameters(entry: dict[str, Any]):
    flow: Any = load_flow_from_entrypoint(entry["entrypoint"])
    assert isinstance(flow, Flow)
    assert flow.name == entry["name"]
    taken = flow.validate_parameters(entry["parameters"])
    assert taken["store"] == Path("rrl-data")
    with pytest.raises(Exception, match="kaboom"):
        flow.validate_parameters(entry["parameters"] | {"kaboom": 1})


def test_the_documentation_tells_the_shipped_schedules():
    text = (ROOT / "docs" / "schedules.md").read_text()
    told = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", text, re.M))
    shipped = {}
    for entry in read_deployments():
        crons = [f"`{s['cron']}`" + ("" if s["active"] else ", inactive")
                 for s in entry["schedules"]]  # fmt: skip
        shipped[entry["name"]] = ", ".join(crons) or "by hand"
    assert told == shipped


def test_what_is_told_of_prefect_deploy_names_the_file():
    for name in ("docs/schedules.md", "configs/prefect.yaml"):
        text = (ROOT / name).read_text()
        assert "prefect deploy --all --prefect-file configs/prefect.yaml" in text
        assert text.count("deploy --all") == 1


class Beaten:
    """A client that meets another `rrl deploy`: what it does not find is there a moment later."""

    def __init__(self, kind: str = "process") -> None:
        self.kind, self.found = kind, False

    def read(self, name: str) -> Any:
        if not self.found:
            raise ObjectNotFound(http_exc=ValueError("404"))
        return SimpleNamespace(name=name, type=self.kind)

    def create(self, *_: Any, **__: Any) -> None:
        self.found = True
        raise ObjectAlreadyExists(http_exc=ValueError("409"))

    def create_flow_from_name(self, name: str) -> str:
        return name

    read_work_pool = read_deployment_by_name = read
    create_work_pool = create_deployment = create


def test_what_another_deploy_made_meanwhile_is_taken(tmp_path: Path):
    client: Any = Beaten()
    deploy_commands._make_pool(client, "rrl")
    client, entry = Beaten(), read_deployments()[0]
    made = deploy_commands._register(client, entry, tmp_path, "rrl")
    assert made.name == f"{entry['name']}/{entry['name']}"
    other: Any = Beaten("kubernetes")
    with pytest.raises(deploy_commands.DeployError, match="expected type process, came kub"):
        deploy_commands._make_pool(other, "rrl")


def test_a_scheduled_run_has_an_id_that_the_command_line_takes(tmp_path: Path):
    store = storage.open(tmp_path / "store", create=True)
    for run_id in ("A B", "../up", "-x", "x" * 101):
        with pytest.raises(ConfigError, match="expected at most 100 of a-z, 0-9"):
            deployments._run_to_train(store, "smoke", [], run_id)
    assert deployments._run_to_train(store, "smoke", [], "night-1")[1] == "night-1"


def test_a_configuration_that_is_scheduled_exists():
    (train,) = (entry for entry in read_deployments() if entry["name"] == "train")
    load_config(Path(train["parameters"]["config"]), train["parameters"]["overrides"])


def test_a_worker_that_loads_the_flows_loads_no_model_library():
    code = "import flows.deployments, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "transformers", "peft", "vllm", "mlflow", "duckdb"}


def test_verification_fails_with_the_text_of_its_findings(tmp_path: Path):
    store = storage.open(tmp_path / "store", create=True)
    writer = store.open_stream("run", {"config_json": "{}", "seed_root": 0, "code_version": "1",
                                       "planned_iterations": 1, "packages_json": "{}"})  # fmt: skip
    assert writer.epoch == 1
    deployments.verify.fn(store.path)
    (segment,) = (store.path / "events" / "runs").rglob("*.parquet")
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    segment.chmod(0o644)
    segment.write_bytes(damaged)
    with pytest.raises(storage.DamagedError, match=f"1 findings:\nerror: .*{segment.name}"):
        deployments.verify.fn(store.path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    prefect = PrefectServer(tmp_path_factory.mktemp("prefect"))
    yield prefect
    prefect.stop()


@pytest.fixture(scope="module")
def deployed(
    server: PrefectServer, uninterrupted: storage.Store
) -> tuple[PrefectServer, storage.Store, int]:
    """The server with the deployments of a store that holds a run, and a worker's process id."""
    path = shutil.copytree(uninterrupted.path, server.folder / "store")
    done = server.rrl("deploy", "--store", "store", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    worker = server.start("worker", "start", "--pool", "rrl")
    return server, storage.open(path), worker.pid


Deployed = tuple[PrefectServer, storage.Store, int]


@pytest.mark.slow
def test_deploying_again_changes_nothing_that_a_person_set(deployed: Deployed):
    server, store, _ = deployed
    before = server.deployment("evaluate")
    (schedule,) = before["schedules"]
    assert schedule["active"] is False
    changed = {"schedule": {"cron": "0 3 * * 1", "timezone": "Europe/Berlin"}}
    path = f"/deployments/{before['id']}/schedules"
    server.request("PATCH", f"{path}/{schedule['id']}", json=changed)
    server.request("POST", path, json=[{"schedule": {"interval": 3600}, "active": False}])
    kept = server.deployment("evaluate")["schedules"]
    done = server.rrl("deploy", "--store", "store", "--json")
    answer = json.loads(done.stdout)
    after = server.deployment("evaluate")
    assert after["id"] == before["id"]
    assert sorted(s["id"] for s in after["schedules"]) == sorted(s["id"] for s in kept)
    assert {s["schedule"].get("cron") for s in after["schedules"]} == {"0 3 * * 1", None}
    assert answer["store"] == str(store.path)
    assert {d["deployment"] for d in answer["deployments"]} == {f"{n}/{n}" for n in NAMES}
    active = {"resume-dead-runs", "compact-and-verify", "rescore-history"}
    coming = {d["deployment"].split("/")[0] for d in answer["deployments"] if d["next_run"]}
    assert coming == active
    pools = server.request("POST", "/work_pools/filter", json={})
    assert [(p["name"], p["type"]) for p in pools] == [("rrl", "process")]


@pytest.mark.slow
def test_only_the_named_deployments_are_registered(deployed: Deployed):
    server, _, _ = deployed
    done = server.rrl("deploy", "--store", "store", "--only", "evaluate")
    assert done.stdout.count("evaluate/evaluate") == 1
    assert "train/train" not in done.stdout
    assert f"PREFECT_API_URL={server.api} prefect worker start --pool rrl" in done.stdout
    refused = server.rrl("deploy", "--store", "store", "--only", "evaluat")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--only evaluat: expected one of train, " in refused.stderr


@pytest.mark.slow
def test_without_a_server_nothing_is_created_and_the_way_out_is_named(tmp_path: Path):
    for url in ("", "http://127.0.0.1:9/api"):
        environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"}
        environment |= {"PREFECT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        environment |= {"PREFECT_API_URL": url} if url else {}
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "deploy", "--store", "store"],
            capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        assert "start one with `prefect server start`" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_the_parameters_are_a_form(deployed: Deployed):
    server, store, _ = deployed
    deployment = server.deployment("rescore-history")
    schema = deployment["parameter_openapi_schema"]
    assert set(schema["properties"]) == {
        "store", "scorer", "where", "run_id", "as_of", "shard_rollouts", "settings",
    }  # fmt: skip
    assert schema["properties"]["shard_rollouts"]["minimum"] == 1
    assert schema["properties"]["where"]["description"].startswith("SQL condition over the columns")
    assert deployment["parameters"]["store"] == str(store.path)
    assert deployment["enforce_parameter_schema"]
    assert deployment["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert deployment["global_concurrency_limit"]["limit"] == 1


@pytest.mark.slow
def test_what_is_scheduled_runs_on_time_and_its_events_are_in_the_store(deployed: Deployed):
    server, store, _ = deployed
    deployment = server.deployment("rescore-history")
    (schedule,) = deployment["schedules"]
    path = f"/deployments/{deployment['id']}"
    often = {"schedule": {"interval": INTERVAL_S}, "active": True}
    server.request("PATCH", f"{path}/schedules/{schedule['id']}", json=often)

    def completed() -> list[dict[str, Any]]:
        ids, states = {"any_": [deployment["id"]]}, {"type": {"any_": ["COMPLETED"]}}
        return server.runs(deployment_id=ids, state=states)

    for run in wait_until(completed, "nothing that is scheduled runs"):
        assert run["auto_scheduled"]
        late = moment(run["start_time"]) - moment(run["expected_start_time"])
        assert abs(late.total_seconds()) < LATE_S
    server.request("PATCH", path, json={"paused": True})
    scores = [r["target_id"] for r in store.read("scores") if r["scorer"] == "final_number"]
    # Each once, however many runs there were by now.
    assert sorted(scores) == sorted(r["event_id"] for r in store.read("rollouts"))


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


@pytest.mark.slow
def test_the_store_is_compacted_and_verified_and_the_newest_policy_evaluated(deployed: Deployed):
    server, store, _ = deployed
    for flow_run in [server.run("evaluate"), server.run("compact-and-verify")]:
        run = server.ended(flow_run)
        assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert any(s.is_compacted for s in store.log.refresh().segments.values())
    assert not storage.verify(store, deep=True)
    (row,) = store.read("evaluations", run_id=f"evaluate-held_out-{RUN_ID}")
    assert (row["policy_version"], row["num_prompts"]) == (3, 6)


@pytest.mark.slow
def test_a_killed_training_flow_is_recorded_and_resumed_without_loss(
    deployed: Deployed, uninterrupted: storage.Store
):
    server, _, worker = deployed
    path = server.folder / "killed"
    flow_run = server.run("train", store=str(path), **SMOKE)
    wait_until(lambda: num_commits(path) >= 12, "the training commits nothing")
    (process,) = training(worker, flow_run)
    os.kill(process, signal.SIGKILL)
    assert server.ended(flow_run)["state_type"] == "CRASHED"
    store = storage.open(path)
    before = {t: {r["event_id"] for r in store.read(t)} for t in ("rollouts", "scores")}
    (opened,) = store.read("runs", run_id=RUN_ID)
    (failure,) = recorded(store, "flow-train", 1)
    assert (failure["subject"], failure["kind"]) == (flow_run, "Crashed")

    facts = {c.name: opened[c.name] for c in storage.TABLES["runs"].columns if not c.place}
    store.open_stream("broken", facts | {"config_json": '{"unheard": 1}'})  # dead as well
    resuming = server.finished("resume-dead-runs", store=str(path))
    assert "not resumed: broken;" in resuming["state"]["message"]
    failures = recorded(store, "flow-resume-dead-runs", 2)
    assert [r["subject"] for r in failures] == ["broken", resuming["id"]]
    assert "unknown key `unheard`" in failures[0]["message"]

    runs = store.read("runs", run_id=RUN_ID)
    assert [row["what"] for row in runs] == ["opened", "opened", "finished"]
    assert fingerprint(store) == fingerprint(uninterrupted)
    for table, ids in before.items():
        after = [r["event_id"] for r in store.read(table)]
        assert len(after) == len(set(after))
        assert ids <= set(after)
    assert not storage.verify(store, deep=True)


def recorded(store: storage.Store, stream: str, number: int) -> list[dict[str, Any]]:
    """Return the failures of a stream; hooks append them a moment after the flow run has ended."""

    def failures() -> list[dict[str, Any]]:
        rows = store.read("failures", run_id=stream)
        return rows if len(rows) >= number else []

    return wait_until(failures, f"{stream} holds no {number} failures")


def training(worker: int, flow_run: str) -> list[int]:
    """Return the process of a flow run among the worker's children."""
    return [
        child
        for child in children(worker)
        if flow_run in Path(f"/proc/{child}/environ").read_text(errors="replace")
    ]


@pytest.mark.slow
def test_a_failing_flow_leaves_a_row_and_a_failing_hook_hides_nothing(deployed: Deployed):
    server, store, _ = deployed
    unknown = server.run("evaluate", run_id="nobody")
    nowhere = server.run("compact-and-verify", store=str(server.folder / "nowhere"))
    failed = server.ended(unknown)
    assert (failed["state_type"], "no run 'nobody'" in failed["state"]["message"]) == (
        "FAILED", True,
    )  # fmt: skip
    rows = recorded(store, "flow-evaluate", 1)
    assert [(r["subject"], r["phase"], r["kind"]) for r in rows] == [(unknown, "flow", "Failed")]
    assert "no run 'nobody'" in rows[0]["message"]
    failed = server.ended(nowhere)
    assert (failed["state_type"], "expected a store in" in failed["state"]["message"]) == (
        "FAILED", True,
    )  # fmt: skip
