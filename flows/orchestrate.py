"""The steps of an iteration as plain calls or as Prefect tasks; the same functions either way."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from flows import tasks
from flows.wiring import session_of

Orchestrator = Literal["prefect", "none"]
StepFunction = Callable[..., Any]


class StopRequested(Exception):
    """The user asked the run to stop; what was begun is committed."""


@dataclass(frozen=True)
class Steps:
    """The steps that `flows/train.py` names, ready to be called with a run id."""

    start: StepFunction
    pin: StepFunction
    pick: StepFunction
    generate: StepFunction
    score: StepFunction
    review: StepFunction
    try_again: StepFunction
    plan_batch: StepFunction
    learn: StepFunction
    refit: StepFunction
    rescore: StepFunction
    evaluate: StepFunction
    track: StepFunction
    compact: StepFunction


Loop = Callable[[str, Steps], None]


def run_loop(loop: Loop, run_id: str, orchestrator: Orchestrator, store_path: Path) -> None:
    """Run `loop` with its steps called directly, or as tasks of one Prefect flow run."""
    if orchestrator == "none":
        with _stop_on_signal(run_id):
            loop(run_id, _make_steps(lambda function: function))
        return
    _prepare_prefect(store_path)
    _start_prefect_server()
    from prefect import State, flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Cancelled

    def as_task(function: StepFunction) -> StepFunction:
        named = task(name=function.__name__, cache_policy=NO_CACHE, task_run_name=_task_run_name)
        return named(function)

    @flow(name="rrl-train", flow_run_name=run_id)
    def train(run_id: str) -> State | None:
        with _stop_on_signal(run_id):  # inside the flow: Prefect sets a handler of its own
            try:
                loop(run_id, _make_steps(as_task))
            except StopRequested:  # no failure, so nothing for Prefect to show a traceback of
                return Cancelled(message=f"stopped by the user: rrl train --resume {run_id}")
        _publish_rewards(run_id)
        return None

    ended = train(run_id, return_state=True)
    if ended.is_cancelled():
        raise StopRequested(run_id)
    ended.result()  # raises what the flow raised


def _make_steps(wrap: Callable[[StepFunction], StepFunction]) -> Steps:
    return Steps(**{f.name: _stoppable(wrap(getattr(tasks, f.name))) for f in fields(Steps)})


def _stoppable(function: StepFunction) -> StepFunction:
    """Refuse to begin a step once the run was asked to stop."""

    @functools.wraps(function)
    def call(run_id: str, *args: Any) -> Any:
        if session_of(run_id).should_stop:
            raise StopRequested(run_id)
        return function(run_id, *args)

    return call


def _prepare_prefect(store_path: Path) -> None:
    """Set Prefect's variables before its import: quiet, and a server of its own inside the store.

    What the user has set (`PREFECT_API_URL`, `PREFECT_HOME`, …) is left alone.
    """
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    if "PREFECT_API_URL" not in os.environ and "PREFECT_HOME" not in os.environ:
        os.environ["PREFECT_HOME"] = str(store_path / "prefect")
        os.environ["PREFECT_MEMO_STORE_PATH"] = str(store_path / "prefect" / "memo_store.toml")


def _start_prefect_server() -> None:
    """Start the ephemeral server, where one is needed, deaf to the terminal's Ctrl-C.

    Ctrl-C goes to every process of the terminal's group; the server must outlive it, since the
    run still has steps to report while it stops. A blocked signal stays blocked in a child.
    """
    from prefect import get_client

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        get_client(sync_client=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _task_run_name() -> str:
    from prefect.runtime import task_run

    parameters = task_run.parameters
    iteration = parameters.get("iteration")
    return task_run.task_name if iteration is None else f"{task_run.task_name}-{iteration}"


def _publish_rewards(run_id: str) -> None:
    """Show the mean reward of every iteration as a table in Prefect's UI."""
    from prefect.artifacts import create_table_artifact

    history = session_of(run_id).store.view("training_history", run_id=run_id)
    table = [{"iteration": row["iteration"], "mean_reward": row["mean_reward"]} for row in history]
    create_table_artifact(table=table, key=f"rewards-{run_id}", description=f"Rewards of {run_id}")


@contextmanager
def _stop_on_signal(run_id: str) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM finish what was begun, and the second one stop at once."""
    session = session_of(run_id)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: object) -> None:
        if session.should_stop:
            raise KeyboardInterrupt
        session.should_stop = True
        session.progress.note("stopping after this batch; once more stops at once")

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
