"""Rollouts that a query names, exported as lines for other trainers."""

import json
from pathlib import Path

import pytest

import storage
from flows.cli import app
from tests.flows import test_offline
from tests.flows.test_offline import SOURCE, Row, copied, policy_row

history, store = test_offline.history, test_offline.store  # fixtures


def export(store: storage.Store, query: str, output: Path, what: str = "sft") -> None:
    arguments = ["export", what, "--query", query, "--output", str(output)]
    app([*arguments, "--store", str(store.path)], standalone_mode=False)


def test_rollouts_are_exported_as_lines_to_learn_from(store: storage.Store, tmp_path: Path):
    query = "select event_id as rollout_id from rollouts where role = 'attempt'"
    export(store, query, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rewards = {r["target_id"]: r["value"] for r in store.read("scores", run_id=SOURCE)}
    prompts = {p["prompt_id"]: p for p in store.read("prompts", run_id=SOURCE)}
    attempts = [r for r in store.read("rollouts", run_id=SOURCE) if r["role"] == "attempt"]
    assert lines == [
        {
            "prompt_id": row["prompt_id"],
            "messages": json.loads(prompts[row["prompt_id"]]["messages_json"]),
            "completion": row["completion"],
            "reward": rewards[row["event_id"]],
        }
        for row in sorted(attempts, key=lambda row: str(row["event_id"]))
    ]


def test_an_export_keeps_a_hostile_completion_as_it_is(store: storage.Store, tmp_path: Path):
    hostile = '\x1b[2J=cmd|"\n</script>\u2028{"reward": 1}'

    def change(table: str, row: Row) -> Row:
        return row | {"completion": hostile} if table == "rollouts" else row

    copied(store, "hostile-run", change, policy_row(store))
    query = "select event_id as rollout_id from rollouts where run_id = 'hostile-run'"
    export(store, query, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().split("\n")[:-1]
    assert [json.loads(line)["completion"] for line in lines] == [hostile] * 16


@pytest.mark.parametrize(
    ("query", "what", "message"),
    [
        ("select event_id from rollouts", "sft", "the one column `rollout_id`"),
        ("select 'x' as rollout_id where false", "sft", "selects nothing"),
        ("select 'no' as rollout_id", "sft", "1 ids that are no rollouts .*the first `no`"),
        ("drop table rollouts", "sft", "nothing was run"),
        ("select 1", "folder", "came `folder`"),
    ],
)
def test_an_export_that_is_refused_leaves_no_file(
    store: storage.Store,
    tmp_path: Path,
    query: str,
    what: str,
    message: str,
):
    with pytest.raises(storage.QueryError, match=message):
        export(store, query, tmp_path / "out.jsonl", what)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_export_never_overwrites_a_file(store: storage.Store, tmp_path: Path):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(storage.QueryError, match="expected a new file"):
        export(store, "select event_id as rollout_id from rollouts", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"
