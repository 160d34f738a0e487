"""Which runs are dead, and what schedules write to the log."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import storage
from flows.cli import app
from flows.streams import (
    RESUMING,
    append_flow_failure,
    dead_runs,
    end_cancelled_run,
    newest_training_run,
)

OPENED = {"config_json": "{}", "seed_root": 0, "planned_iterations": 3, "code_version": "1",
          "packages_json": "{}"}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)


def open_run(
    store: storage.Store, run_id: str, ends: str | None = None, **facts: Any
) -> storage.StreamWriter:
    writer = store.open_stream(run_id, OPENED | facts)
    if ends is not None:
        row = OPENED | facts | {"run_epoch": writer.epoch, "what": ends}
        writer.append({"runs": [row]}, batch_key=ends)
    return writer


def publish(writer: storage.StreamWriter, version: int) -> None:
    row = {"policy_version": version, "iteration": version, "base_digest": "b",
           "adapter_digest": "a", "policy_digest": "p", "adapter_artifact": "x"}  # fmt: skip
    writer.append({"policies": [row]}, batch_key=f"publish-{version}")


def test_killed_and_failed_training_runs_are_dead_and_no_others(store: storage.Store):
    open_run(store, "killed", kind="train")
    open_run(store, "failed", ends="failed")
    open_run(store, "stopped", ends="interrupted")
    open_run(store, "done", ends="finished")
    open_run(store, "rescored", kind="rescore")
    open_run(store, "alive")
    with storage.hold_run(store, "alive"):
        assert dead_runs(store, tries=3) == (["killed", "failed"], [])


def test_a_run_counts_by_its_newest_epoch(store: storage.Store):
    open_run(store, "run", ends="failed")
    open_run(store, "run", ends="interrupted")
    open_run(store, "again", ends="interrupted")
    open_run(store, "again")
    assert dead_runs(store, tries=3) == (["again"], [])


def test_a_run_is_given_up_after_failed_tries_until_it_publishes_again(store: storage.Store):
    writer = open_run(store, "run")
    publish(writer, 0)
    for _ in range(2):
        append_flow_failure(store, RESUMING, "run", "resume_failed", "no memory")
    append_flow_failure(store, RESUMING, "other", "resume_failed", "no memory")
    assert dead_runs(store, tries=3) == (["run"], [])
    assert dead_runs(store, tries=2) == ([], ["run"])
    publish(writer, 1)
    assert dead_runs(store, tries=2) == (["run"], [])


def test_failures_of_a_flow_are_rows_of_its_own_ended_stream(store: storage.Store):
    for message in ("first", "second"):
        append_flow_failure(store, "evaluate", "flow-run-1", "Failed", message)
    append_flow_failure(store, "evaluate", "flow-run-2", "Crashed", "third")
    rows = store.read("failures", run_id="flow-evaluate")
    assert [(r["phase"], r["subject"], r["attempt"], r["kind"], r["message"]) for r in rows] == [
        ("flow", "flow-run-1", 0, "Failed", "first"),
        ("flow", "flow-run-1", 1, "Failed", "second"),
        ("flow", "flow-run-2", 0, "Crashed", "third"),
    ]
    runs = store.read("runs", run_id="flow-evaluate")
    assert {r["kind"] for r in runs} == {"flow"}
    assert [r["what"] for r in runs] == ["opened", "finished"] * 3


def test_a_failure_is_appended_although_another_one_takes_the_stream(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    open_stream, taken = storage.Store.open_stream, []

    def open_and_lose(self: storage.Store, *arguments: Any) -> storage.StreamWriter:
        writer = open_stream(self, *arguments)
        if not taken:
            taken.append(open_stream(self, *arguments))
        return writer

    monkeypatch.setattr(storage.Store, "open_stream", open_and_lose)
    append_flow_failure(store, "evaluate", "flow-run", "Failed", "message")
    (row,) = store.read("failures", run_id="flow-evaluate")
    assert row["epoch"] == 3


def test_a_killed_run_that_was_cancelled_is_no_longer_dead(store: storage.Store):
    open_run(store, "run", kind="train")
    with storage.hold_run(store, "run"):
        assert not end_cancelled_run(store, "run")
    assert end_cancelled_run(store, "run")
    assert dead_runs(store, tries=3) == ([], [])
    last = store.read("runs", run_id="run")[-1]
    assert (last["what"], last["reason"]) == ("interrupted", "cancelled in Prefect")
    head = store.head()
    assert not end_cancelled_run(store, "run")
    assert not end_cancelled_run(store, "nobody")
    assert store.head() == head


def test_only_training_runs_are_listed_with_a_command_that_resumes_them(store: storage.Store):
    open_run(store, "killed", kind="train")
    open_run(store, "evaluated", kind="evaluate")
    shown = CliRunner().invoke(app, ["runs", "--json", "--store", str(store.path)])
    listed = {row["run_id"]: (row["state"], row["resume"]) for row in json.loads(shown.stdout)}
    assert listed == {
        "killed": ("dead", f"rrl train --resume killed --store {store.path}"),
        "evaluated": ("dead", ""),
    }


def test_the_newest_training_run_is_the_one_opened_last(store: storage.Store):
    with pytest.raises(storage.StorageError, match="no training run"):
        newest_training_run(store)
    for run_id, kind in (("a", None), ("b", "train"), ("c", "evaluate")):
        open_run(store, run_id, kind=kind)
    assert newest_training_run(store) == "b"
    open_run(store, "a")
    assert newest_training_run(store) == "a"
