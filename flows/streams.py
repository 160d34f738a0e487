"""What the log says of its streams, and what schedules add to it; loads no model library.

A flow that fails leaves a `failures` row in the stream `flow-<flow>`. A run is dead when its newest
row in `runs` says opened or failed and no process holds it: it was killed, or an error ended it. A
run that a person stopped is not dead.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import storage
from flows.machine import code_version, package_versions
from storage import Store, SupersededError

Row = dict[str, Any]
RESUMING = "resume-dead-runs"
_WRITERS = 5  # flows of one name that may fail at the same moment


def is_training(run: Mapping[str, Any]) -> bool:
    """Return whether a row of `runs` belongs to a training run."""
    return run["kind"] in (None, "train")


def newest_training_run(store: Store) -> str:
    """Return the training run that was opened last."""
    runs = [row["run_id"] for row in store.read("runs") if is_training(row)]
    if not runs:
        raise storage.StorageError(f"no training run in {store.path}: start one with `rrl train`")
    return str(runs[-1])


def dead_runs(store: Store, tries: int) -> tuple[list[str], list[str]]:
    """Return the dead training runs, oldest first: those to resume, and those given up.

    A run is given up after `tries` failed resumptions since it last published a policy.
    """
    newest = {row["run_id"]: row for row in store.read("runs") if is_training(row)}
    dead = [
        run_id
        for run_id, row in newest.items()
        if row["what"] in ("opened", "failed") and not storage.is_run_held(store, run_id)
    ]
    published: dict[str, datetime] = {
        row["run_id"]: row["recorded_at"] for row in store.read("policies")
    }
    failed = [
        row["subject"]
        for row in store.read("failures", run_id=f"flow-{RESUMING}")
        if row["subject"] not in published or row["recorded_at"] > published[row["subject"]]
    ]
    given_up = [run_id for run_id in dead if failed.count(run_id) >= tries]
    return [run_id for run_id in dead if run_id not in given_up], given_up


def append_flow_failure(store: Store, flow: str, subject: str, kind: str, message: str) -> None:
    """Append a `failures` row to the stream of a flow; it counts the earlier ones of `subject`."""
    stream = f"flow-{flow}"
    opened = {
        "kind": "flow",
        "config_json": json.dumps({"flow": flow}),
        "seed_root": 0,
        "planned_iterations": 0,
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions(), sort_keys=True),
    }
    for _ in range(_WRITERS):
        writer = store.open_stream(stream, opened)
        earlier = [r for r in store.read("failures", run_id=stream) if r["subject"] == subject]
        failure = {
            "iteration": 0,
            "phase": "flow",
            "subject": subject,
            "attempt": len(earlier),
            "kind": kind,
            "message": message,
        }
        ended = opened | {"run_epoch": writer.epoch, "what": "finished"}
        with suppress(SupersededError):
            writer.append({"failures": [failure], "runs": [ended]}, batch_key="failure")
            return
    raise SupersededError(f"stream `{stream}` was opened by others {_WRITERS} times in a row")


def end_cancelled_run(store: Store, run_id: str) -> bool:
    """Record that a person stopped a run, where its process was killed before it could say so."""
    rows = store.read("runs", run_id=run_id)
    if not rows or rows[-1]["what"] != "opened" or storage.is_run_held(store, run_id):
        return False
    facts = {
        column.name: rows[-1][column.name]
        for column in storage.TABLES["runs"].columns
        if not column.place
    }
    writer = store.open_stream(run_id, facts)
    ended = {"run_epoch": writer.epoch, "what": "interrupted", "reason": "cancelled in Prefect"}
    writer.append({"runs": [facts | ended]}, batch_key="interrupted")
    return True
