"""What the commands do that look at a store or at this machine, without a model library."""

import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import storage
from flows.cli import EXIT_DAMAGED, EXIT_FAILED, name_damaged, print_result
from flows.doctor import examine
from flows.import_commands import import_command
from flows.machine import package_versions
from flows.rescore_commands import rescore_command
from flows.streams import is_training
from storage import console as sql_console
from storage.answers import printable_lines, table_text
from storage.probe import probe


def init(store_path: Path) -> None:
    """Create an empty store, or leave the one that is there; refuse a folder that cannot hold one.

    Raises:
        StorageError: the disk cannot do what a store relies on; nothing was created.
    """
    if failed := [c for c in probe(store_path) if c.is_needed and not c.is_ok]:
        reasons = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        raise storage.StorageError(
            f"`{store_path.absolute()}` cannot hold a store ({reasons}); nothing was created. "
            "Name a folder on another disk with --store"
        )
    store = storage.open(store_path, create=True)
    print_result(f"store {store.path}: head {store.head().number}")


def doctor(store_path: Path, as_json: bool) -> None:
    """Print what a run finds on this machine; exit 1 when a store cannot be kept."""
    findings, path = examine(store_path), str(store_path.absolute())
    is_ok = not any(finding.state == "failed" for finding in findings)
    if as_json:
        facts = {"is_ok": is_ok, "store": path, "packages": package_versions()}
        print_result(json.dumps(facts | {"checks": [vars(finding) for finding in findings]}))
    else:
        for finding in findings:
            print_result(f"{finding.state:<8} {finding.name:<13} {printable_lines(finding.found)}")
            if finding.advice:
                print_result(f"{'':<22} {printable_lines(finding.advice)}")
    if not is_ok:
        sys.exit(EXIT_FAILED)


def runs(store_path: Path, as_json: bool) -> None:
    """List the runs of a store with their state and, where they can go on, the resume command."""
    store = storage.open(store_path)
    opened = {row["run_id"]: row for row in store.read("runs")}
    rows = []
    for row in store.view("run_overview"):
        alive = storage.is_run_held(store, row["run_id"])
        state = "alive" if alive else ("dead" if row["state"] == "open" else row["state"])
        can_resume = not alive and state != "finished"
        resume = _resume_command(opened[row["run_id"]], store_path) if can_resume else ""
        rows.append({**row, "state": state, "resume": resume})
    if as_json:
        print_result(json.dumps(rows, default=_plain))
        return
    if not rows:
        print_result(f"no runs in {store.path}: start one with `rrl train demo`")
        return
    columns = (
        "run_id",
        "kind",
        "state",
        "last_iteration",
        "planned_iterations",
        "last_mean_reward",
        "resume",
    )
    print_result(f"store {store.path}")
    print_result(table_text(columns, [tuple(row[c] for c in columns) for row in rows]).rstrip())


def _resume_command(opened: dict[str, Any], store_path: Path) -> str:
    if opened["kind"] == "rescore":
        return rescore_command(json.loads(opened["config_json"]), store_path)
    if opened["kind"] == "import":
        return import_command(json.loads(opened["config_json"])["asked"], store_path)
    if not is_training(opened):
        return ""
    return shlex.join(["rrl", "train", "--resume", opened["run_id"], "--store", str(store_path)])


def show(event_id: str, store_path: Path, allow_damaged: bool, as_json: bool) -> None:
    """Print every row about an event: the event, its tokens, its scores, its use in learning."""
    store = storage.open(store_path)
    damaged = store.damaged() if allow_damaged else {}
    name_damaged(damaged)
    story = sql_console.story(store, event_id, allow_damaged)
    if as_json:
        print_result(json.dumps(story, default=_plain))
    else:
        for table, rows in story.items():
            for row in rows:
                print_result(f"{table}")
                for key, value in row.items():
                    print_result(f"  {key:<22} {_cell(value)}")
    if damaged:
        sys.exit(EXIT_DAMAGED)


def verify(deep: bool, anchor: str | None, store_path: Path, as_json: bool) -> None:
    """Check the store; exit 3 when something is damaged."""
    store = storage.open(store_path)
    findings = storage.verify(store, deep=deep, anchor=anchor)
    try:
        head = store.head()
        shown, known = f"{head.number}:{head.sha256}", asdict(head)
    except storage.StorageError:  # the findings say why
        shown, known = "unknown", None
    if as_json:
        print_result(
            json.dumps(
                {
                    "head": known,
                    "findings": [vars(f) for f in findings],
                }
            )
        )
    else:
        for finding in findings:
            text = f"{finding.severity}: {finding.where}: {finding.message}"
            print_result(sql_console.printable(text))
        print_result(f"{store.path}: head {shown}, {len(findings)} findings")
    if findings:
        sys.exit(EXIT_DAMAGED)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return sql_console.printable(str(value))


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)
