"""The flows that a Prefect server schedules: each names its steps and returns ids and numbers.

`configs/prefect.yaml` says when they run, `rrl deploy` registers them. Prefect makes a form of the
parameters and their descriptions. The worker itself imports this file too, to run the hooks of a
flow whose process died, so what needs a model library is imported by the step that needs it.
"""

from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, State, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled
from pydantic import Field

import storage
from flows import streams
from flows.config import ConfigError, RunConfig, load_config
from flows.progress import Progress

Count = Annotated[int, Field(ge=1)]
Numbers = dict[str, Any]
SHARD_ROLLOUTS = 512
_SHOWN_FINDINGS = 20


def record_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Append what ended a flow run to the store; what goes wrong here Prefect only logs."""
    store = storage.open(flow_run.parameters["store"])
    message = f"{flow_run.name}: {state.message}"
    streams.append_flow_failure(store, flow.name, str(flow_run.id), str(state.name), message)


def record_cancellation(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Say in the log that a person stopped the run: else it would count as dead and be resumed."""
    store = storage.open(flow_run.parameters["store"])
    run_ids = [row["run_id"] for row in store.read("runs")]
    own = next((name for name in run_ids if name.endswith(_suffix(flow_run.id))), None)
    if run_id := flow_run.parameters.get("run_id") or own:
        streams.end_cancelled_run(store, run_id)


HOOKS: Any = {"on_failure": [record_failure], "on_crashed": [record_failure]}


@flow(name="train", on_cancellation=[record_cancellation], **HOOKS)
def train(
    store: Path,
    config: str | None = "demo",
    overrides: list[str] | None = None,
    run_id: str | None = None,
) -> Numbers | State[Any]:
    """Train a policy, or go on with a run that is stored.

    Args:
        store: Folder of the event log.
        config: A configuration file, or the name of a shipped one; null: `run_id` goes on.
        overrides: Changes of the configuration, such as `run.iterations=5`.
        run_id: Id of the new run, or of the one to go on with; null: a new one.
    """
    from flows.train import train as train_run

    opened = storage.open(store, create=True)
    settings, run_id = _run_to_train(opened, config, overrides or [], run_id)
    if not streams.is_finished(opened, run_id):
        ended = train_run(opened, settings, run_id, "prefect", LoggedProgress())
        if ended == "interrupted":
            return Cancelled(message=f"{run_id} was stopped; with config null it goes on")
    return {"run_id": run_id, "head": opened.head().number}


@flow(name="rescore-history", **HOOKS)
def rescore_history(
    store: Path,
    scorer: str = "final_number",
    where: str | None = None,
    run_id: str | None = None,
    as_of: Annotated[int, Field(ge=0)] | None = None,
    shard_rollouts: Count = SHARD_ROLLOUTS,
    settings: list[str] | None = None,
) -> Numbers:
    """Judge history by a scorer version where it has not judged yet; older scores stay.

    Args:
        store: Folder of the event log.
        scorer: As `rrl rescore` takes it, such as `final_number`, `module:function` or `value`.
        where: SQL condition over the columns of `rollouts`; null: all.
        run_id: Only rollouts of this run; null: of all.
        as_of: History as of this commit; null: the newest.
        shard_rollouts: Rollouts a commit: what a killed process may lose.
        settings: Parameters of a reward, such as `task.time_limit_s=4`; the others are the runs'.
    """
    stream = rescore(store, scorer, where, run_id, as_of, shard_rollouts, tuple(settings or ()))
    return {"stream": stream, "head": head_number(store)}


@flow(name="refit-value-model", **HOOKS)
def refit_value_model(store: Path, run_id: str | None = None) -> Numbers:
    """Fit the value model of a run on its history again, and judge the run's states by it.

    Args:
        store: Folder of the event log.
        run_id: The training run; null: the newest.
    """
    run_id = run_id or streams.newest_training_run(storage.open(store))
    version = refit(store, run_id)
    stream = rescore(store, f"value:{version}", None, run_id, None, SHARD_ROLLOUTS)
    return {"run_id": run_id, "version": version, "stream": stream, "head": head_number(store)}


@flow(name="evaluate", **HOOKS)
def evaluate(
    store: Path,
    run_id: str | None = None,
    iteration: Annotated[int, Field(ge=0)] | None = None,
    prompts: Count | None = None,
    name: str = "held_out",
) -> Numbers:
    """Evaluate a stored policy on held-out prompts, outside training.

    Args:
        store: Folder of the event log.
        run_id: The training run; null: the newest.
        iteration: The policy published in this iteration; null: the newest.
        prompts: How many held-out prompts; null: as many as the run's configuration says.
        name: Name of the evaluation; it stands for one number of prompts.
    """
    run_id = run_id or streams.newest_training_run(storage.open(store))
    scores = evaluate_policy(store, run_id, iteration, prompts, name)
    return {"run_id": run_id, "scores": scores, "head": head_number(store)}


@flow(name="compact-and-verify", **HOOKS)
def compact_and_verify(
    store: Path,
    run_id: str | None = None,
    grace_s: Annotated[float, Field(ge=0)] = 3600.0,
) -> Numbers:
    """Merge small segments, delete what nothing needs any more, and check every hash.

    Args:
        store: Folder of the event log.
        run_id: Merge segments of this run only; null: of all.
        grace_s: Seconds after which a file that nothing needs may be deleted.
    """
    num_mergers = compact(store, run_id)
    num_deleted = collect(store, grace_s)
    verify(store)
    return {"mergers": num_mergers, "deleted": num_deleted, "head": head_number(store)}


@flow(name=streams.RESUMING, **HOOKS)
def resume_dead_runs(store: Path, tries: Count = 3) -> Numbers:
    """Go on with every training run that was killed or ended by an error, one after the other.

    Args:
        store: Folder of the event log.
        tries: Failed resumptions without a new policy after which a run is given up.
    """
    dead = find_dead_runs(store, tries)
    failed = [run_id for run_id in dead if not resume(store, run_id)]
    if failed:
        raise storage.StorageError(f"not resumed: {', '.join(failed)}; the log holds what they say")
    return {"resumed": dead, "head": head_number(store)}


@task(name="rescore", cache_policy=NO_CACHE)
def rescore(
    store: Path,
    scorer: str,
    where: str | None,
    run_id: str | None,
    as_of: int | None,
    shard_rollouts: int,
    settings: tuple[str, ...] = (),
) -> str | None:
    from flows import rescoring

    request = rescoring.RescoreRequest(scorer, where, run_id, as_of, shard_rollouts, settings)
    summary = rescoring.rescore(storage.open(store), request, LoggedProgress())
    if summary.ended == "interrupted":
        raise storage.StorageError(f"{summary.stream_id} was stopped; the next call goes on")
    return summary.stream_id


@task(name="refit", cache_policy=NO_CACHE)
def refit(store: Path, run_id: str) -> str:
    from flows.past import refit_history

    row = refit_history(storage.open(store), run_id, LoggedProgress())
    return str(row["scorer_version"])


@task(name="evaluate-policy", cache_policy=NO_CACHE)
def evaluate_policy(
    store: Path, run_id: str, iteration: int | None, prompts: int | None, name: str
) -> dict[str, float | None]:
    from flows import evaluate as evaluation

    request = evaluation.EvaluateRequest(run_id, iteration, prompts, name)
    rows = evaluation.evaluate(storage.open(store), request, LoggedProgress())
    return {row["scorer"]: row["mean_score"] for row in rows}


@task(name="compact", cache_policy=NO_CACHE)
def compact(store: Path, run_id: str | None) -> int:
    return sum(1 for _ in storage.compact(storage.open(store), run_id))


@task(name="collect", cache_policy=NO_CACHE)
def collect(store: Path, grace_s: float) -> int:
    return storage.collect(storage.open(store), grace_s=grace_s).num_deleted


@task(name="verify", cache_policy=NO_CACHE)
def verify(store: Path) -> None:
    findings = storage.verify(storage.open(store), deep=True)
    if findings:
        lines = [f"{f.severity}: {f.where}: {f.message}" for f in findings[:_SHOWN_FINDINGS]]
        raise storage.DamagedError(f"{len(findings)} findings:\n" + "\n".join(lines))


@task(name="find-dead-runs", cache_policy=NO_CACHE)
def find_dead_runs(store: Path, tries: int) -> list[str]:
    dead, given_up = streams.dead_runs(storage.open(store), tries)
    for run_id in given_up:
        get_run_logger().warning(f"{run_id} is given up: `rrl train --resume {run_id}` goes on")
    return dead


@task(name="resume", task_run_name="resume-{run_id}", cache_policy=NO_CACHE)
def resume(store: Path, run_id: str) -> bool:
    """Return whether the run went on; why not is logged and recorded."""
    from flows.resuming import resume_run

    wrong = resume_run(store, run_id)
    if wrong is not None:
        get_run_logger().error(f"{run_id}: {wrong}")
        opened = storage.open(store)
        streams.append_flow_failure(opened, streams.RESUMING, run_id, "resume_failed", wrong)
    return wrong is None


class LoggedProgress(Progress):
    """Tells the log of the flow run what a person at a terminal would be told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def note(self, text: str) -> None:
        get_run_logger().info(text)


def head_number(store: Path) -> int:
    """Return the number of the newest commit."""
    return storage.open(store).head().number


def _run_to_train(
    store: storage.Store, config: str | None, overrides: list[str], run_id: str | None
) -> tuple[RunConfig, str]:
    """Return the configuration and the id of the run: a stored one keeps its own.

    Without `run_id` the flow run names it, so that a second try of the flow run goes on.
    """
    from flows.train import check_run_id
    from flows.wiring import stored_config

    if config is None:
        if run_id is None or overrides:
            raise ConfigError("without `config` expected a `run_id` to go on with, no `overrides`")
        return stored_config(store, run_id), run_id
    settings = load_config(Path(config), overrides)
    run_id = run_id or settings.run.name + _suffix(current_flow_run.id)
    if not store.read("runs", run_id=run_id):
        check_run_id(run_id)
    elif stored_config(store, run_id) != settings:
        raise ConfigError(
            f"run {run_id} has another configuration: leave `config` null to go on with its own"
        )
    return settings, run_id


def _suffix(flow_run_id: Any) -> str:
    return f"-{str(flow_run_id)[-8:]}"
