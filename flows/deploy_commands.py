"""What `rrl deploy` does: register the deployments of `configs/prefect.yaml` with a Prefect server.

Registering again changes only what changed here. A deployment that the server knows keeps its
schedules: they belong to whoever set them in Prefect's UI.
"""

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import storage
from flows.cli import print_result
from flows.config import CONFIGS_DIR
from flows.server import START, ServerError
from storage.answers import table_text

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

Facts = dict[str, Any]
COLUMNS = ("deployment", "schedules", "next_run")
NO_SCHEDULER = (
    "If it cannot schedule, see whether its environment has SQLAlchemy 2.1: Prefect 3.7 needs 2.0"
)


class DeployError(ValueError):
    """The deployments cannot be registered as asked; the message says what to do."""


def deploy(store_path: Path, pool: str, only: Sequence[str], as_json: bool) -> None:
    """Register the deployments; print them, their schedules, and the command of a worker."""
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")  # a person waits
    import httpx
    from prefect.client.orchestration import get_client

    wanted = _chosen(read_deployments(), only)
    server = _server()
    with get_client(sync_client=True) as client:
        _check_server(client, server)
        store = storage.open(store_path.resolve(), create=True)
        try:
            _make_pool(client, pool)
            rows = [_shown(client, _register(client, entry, store.path, pool)) for entry in wanted]
        except httpx.HTTPError as error:
            raise ServerError(f"the Prefect server refused: {error}. {NO_SCHEDULER}") from error
    command = ["prefect", "worker", "start", "--pool", pool]
    worker = f"PREFECT_API_URL={shlex.quote(server)} {shlex.join(command)}"
    if as_json:
        facts = {"server": server, "store": str(store.path), "pool": pool, "worker": worker}
        print_result(json.dumps(facts | {"deployments": rows}))
        return
    print_result(f"store {store.path} · server {server}")
    cells = [(r["deployment"], ", ".join(r["schedules"]), r["next_run"] or "") for r in rows]
    print_result(table_text(COLUMNS, cells))
    print_result(f"A worker runs them, in any folder:\n  {worker}")


def read_deployments() -> list[Facts]:
    """Return the entries of the shipped `prefect.yaml`."""
    entries: list[Facts] = yaml.safe_load((CONFIGS_DIR / "prefect.yaml").read_text())["deployments"]
    return entries


def _chosen(entries: list[Facts], only: Sequence[str]) -> list[Facts]:
    names = [entry["name"] for entry in entries]
    if unknown := [name for name in only if name not in names]:
        raise DeployError(f"--only {unknown[0]}: expected one of {', '.join(names)}")
    return [entry for entry in entries if not only or entry["name"] in only]


def _server() -> str:
    """Return the URL of the configured server; without one Prefect would start a passing one."""
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if url is None:
        raise ServerError(f"no Prefect server is configured: {START}")
    return url


def _check_server(client: "SyncPrefectClient", url: str) -> None:
    import httpx

    try:
        client.api_version()
    except (httpx.HTTPError, ValueError) as error:  # ValueError: what answers speaks no JSON
        raise ServerError(f"no Prefect server answers at {url} ({error}): {START}") from error


def _make_pool(client: "SyncPrefectClient", name: str) -> None:
    """Create the work pool where it is missing; refuse one whose workers start no processes."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        kind = client.read_work_pool(name).type
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        with suppress(ObjectAlreadyExists):  # another made it meanwhile
            client.create_work_pool(
                WorkPoolCreate(name=name, type="process", base_job_template=template)
            )
        kind = client.read_work_pool(name).type
    if kind != "process":
        raise DeployError(
            f"work pool {name!r}: expected type process, came {kind}; name another with --pool"
        )


def _register(
    client: "SyncPrefectClient", entry: Facts, store_path: Path, pool: str
) -> "DeploymentResponse":
    """Create the deployment with its schedules, or update all but the schedules."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
    from prefect.client.schemas.objects import ConcurrencyOptions
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    flow: Any = load_flow_from_entrypoint(entry["entrypoint"])
    limit = entry["concurrency_limit"]
    facts = {
        "entrypoint": entry["entrypoint"].replace(":", "."),  # a module: nothing is to be pulled
        "description": entry["description"],
        "version": flow.version,
        "tags": entry["tags"],
        "parameters": entry["parameters"] | {"store": str(store_path)},
        "parameter_openapi_schema": parameter_schema(flow).model_dump(),
        "enforce_parameter_schema": True,
        "work_pool_name": pool,
        "pull_steps": [],
        "concurrency_limit": limit["limit"],
        "concurrency_options": ConcurrencyOptions(collision_strategy=limit["collision_strategy"]),
        "job_variables": _job_variables(),
    }
    name = f"{flow.name}/{entry['name']}"
    try:
        known = client.read_deployment_by_name(name)
    except ObjectNotFound:
        schedules = [
            DeploymentScheduleCreate(
                schedule={"cron": s["cron"], "timezone": s["timezone"]},
                active=s["active"],
                slug=s["slug"],
            )
            for s in entry["schedules"]
        ]
        flow_id = client.create_flow_from_name(flow.name)
        with suppress(ObjectAlreadyExists):  # another made it meanwhile
            client.create_deployment(flow_id, entry["name"], schedules=schedules, **facts)
    else:
        client.update_deployment(known.id, DeploymentUpdate(**facts))
    return client.read_deployment_by_name(name)


def _job_variables() -> Facts:
    """Return how a worker starts the flow: in this folder, whose modules hide no installed ones.

    Relative paths of a configuration mean here what they mean to `rrl train`.
    """
    return {"working_dir": str(Path.cwd()), "env": {"PYTHONSAFEPATH": "1"}}


def _shown(client: "SyncPrefectClient", deployment: "DeploymentResponse") -> Facts:
    """Return the deployment as the server has it, with the next run of its active schedules."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    # The server would make these runs itself within seconds, and makes none twice.
    client.request(
        "POST", "/deployments/{id}/schedule", path_params={"id": deployment.id},
        json={"min_runs": 1, "max_runs": 1},
    )  # fmt: skip
    coming = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"deployment_id": {"any_": [deployment.id]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
        ),
        sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
        limit=1,
    )
    moments = [run.next_scheduled_start_time for run in coming]
    return {
        "deployment": f"{deployment.name}/{deployment.name}",
        "schedules": [_schedule_text(s) for s in deployment.schedules],
        "next_run": moments[0].isoformat() if moments and moments[0] else None,
        "parameters": deployment.parameters,
    }


def _schedule_text(schedule: Any) -> str:
    facts = schedule.schedule.model_dump(mode="json")
    when = next(str(facts[key]) for key in ("cron", "interval", "rrule") if key in facts)
    return when if schedule.active else f"{when} (inactive)"
