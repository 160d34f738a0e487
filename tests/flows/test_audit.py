"""Every step is derived again; what was tampered with is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from flows import auditing, replaying, tasks
from flows.auditing import Audited, audit
from flows.batching import replay_rows
from flows.history_commands import run_audit
from flows.wiring import stored_config
from tests.flows.conftest import RUN_ID, replay_config, run_here


def audited(store: storage.Store, *iterations: int) -> list[Audited]:
    return list(audit(store, RUN_ID, stored_config(store, RUN_ID), iterations or None))


def differences(store: storage.Store) -> list[str]:
    return [str(d) for a in audited(store) for d in a.differences]


@pytest.fixture
def copy(replayed: storage.Store, tmp_path: Path) -> Path:
    shutil.copytree(replayed.path, tmp_path / "store")
    return tmp_path / "store"


def test_an_edited_replays_value_is_found_by_its_hash(copy: Path):
    path = sorted((copy / "events" / "replays").rglob("*.parquet"))[-1]
    rows = pq.read_table(path)
    place = rows.schema.get_field_index("reward")
    edited = pa.array([1.0 - value for value in rows["reward"].to_pylist()])
    pq.write_table(rows.set_column(place, rows.schema.field(place), edited), path)
    with pytest.raises(storage.DamagedError, match=path.name):
        audited(storage.open(copy))


def test_an_edited_replays_value_is_found_by_deriving_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # written wrongly in the first place, so every hash fits
    def forged(*arguments, **options):
        rows = replay_rows(*arguments, **options)
        rows[3]["advantage"] += 0.25
        return rows

    monkeypatch.setattr(tasks, "replay_rows", forged)
    store = run_here(tmp_path / "store", replay_config("run.iterations=2", "evaluation.every=off"))
    first, second = audited(store)
    assert [d.what for d in first.differences] == ["replay"]
    assert "advantage" in first.differences[0].where
    row = store.read("replays", run_id=RUN_ID, iteration=1)[3]
    assert row["rollout_id"] in first.differences[0].where
    assert first.differences[0].stored == repr(row["advantage"])
    assert first.differences[0].derived == repr(row["advantage"] - 0.25)
    assert len(second.differences) == 1


def test_a_deleted_score_commit_is_named(copy: Path):
    for path in sorted((copy / "_log").glob("[0-9]*.json")):
        commit = json.loads(path.read_text())
        if "attempt-scores" in path.read_text() and commit:
            path.unlink()
            break
    shutil.rmtree(copy / "_checkpoints", ignore_errors=True)
    with pytest.raises(storage.DamagedError, match=str(int(path.stem))):
        audited(storage.open(copy))


def test_a_changed_view_file_is_named(replayed: storage.Store, monkeypatch: pytest.MonkeyPatch):
    from storage import views

    original = views.view_sql
    changed = "replay_buffer"
    monkeypatch.setattr(
        views,
        "view_sql",
        lambda name: original(name).replace("0.75", "0.7") if name == changed else original(name),
    )
    found = [d for a in audited(replayed, 3) for d in a.differences]
    assert [d.what for d in found] == ["view"]
    assert "replay_buffer" in found[0].where


def test_what_other_code_decided_is_no_difference_and_said_once_an_iteration(
    replayed: storage.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    decide, plan = auditing.decide, auditing.replay_rows

    def rarely(*arguments):  # a rule that picks nothing
        decision = decide(*arguments)
        return replace(decision, plan=decision.plan | {"num_picked": 0}, picks=[])

    monkeypatch.setattr(auditing, "decide", rarely)
    assert {d.what for a in audited(replayed, 5) for d in a.differences} == {"replay plan", "pick"}
    monkeypatch.setattr(auditing, "code_version", lambda: "9.0.0")
    [written] = {row["code_version"] for row in replayed.read("runs", run_id=RUN_ID)}
    [found] = audited(replayed, 5)
    assert found.differences == []
    assert f"written by code {written}, derived by 9.0.0" in found.unlike
    with pytest.raises(SystemExit) as end:
        run_audit(RUN_ID, 5, replayed.path, as_json=False)
    assert end.value.code == 5
    assert capsys.readouterr().out.count(found.unlike) == 1

    def forged(*arguments):  # what follows from the picks is compared all the same
        rows = plan(*arguments)
        rows[3]["advantage"] += 0.25
        return rows

    monkeypatch.setattr(auditing, "replay_rows", forged)
    assert [d.what for d in audited(replayed, 5)[0].differences] == ["replay"]
    with pytest.raises(SystemExit) as end:
        run_audit(RUN_ID, 5, replayed.path, as_json=False)
    assert end.value.code == 1


def test_other_code_that_decides_the_same_is_as_derived(
    replayed: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auditing, "code_version", lambda: "9.0.0")
    [found] = audited(replayed, 5)
    assert (found.differences, found.unlike) == ([], "")
    monkeypatch.setattr(storage, "view_digests", lambda *names: dict.fromkeys(names, "a new text"))
    [found] = audited(replayed, 5)
    assert found.differences == []
    assert "with another text of view replay_buffer" in found.unlike


def test_an_iteration_that_planned_no_sample_is_derived_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def forged(*arguments):
        decision = decide(*arguments)
        return replace(decision, plan=decision.plan | {"num_candidates": 7})

    decide = replaying.decide
    monkeypatch.setattr(replaying, "decide", forged)
    reward = "task.reward=tests.flows.rewards:never"
    store = run_here(tmp_path / "store", replay_config(reward, "run.iterations=1"))
    assert store.read("replays") == []
    [found] = audited(store)
    assert ["num_candidates" in d.where for d in found.differences] == [True]


def test_an_altered_pick_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = replaying.decide

    def forged(store, run_id, config, iteration, pin):
        decision = original(store, run_id, config, iteration, pin)
        for row in decision.picks[:1]:
            row["probability"] = 0.5
        return decision

    monkeypatch.setattr(replaying, "decide", forged)
    store = run_here(tmp_path / "store", replay_config("run.iterations=3", "evaluation.every=off"))
    found = differences(store)
    picks = store.read("picks", run_id=RUN_ID)
    assert picks
    assert any("probability" in text and "stored 0.5" in text for text in found)


def test_the_command_lists_samples_and_says_everything_is_as_derived(
    replayed: storage.Store, capsys: pytest.CaptureFixture[str]
):
    run_audit(RUN_ID, 5, replayed.path, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["iterations"][0]["differences"] == []
    assert len(told["samples"]) == 24
    picks = {row["event_id"]: row for row in replayed.read("picks", run_id=RUN_ID, iteration=5)}
    picked = [row for row in told["samples"] if row["pick_id"] is not None]
    assert {row["pick_id"] for row in picked} == picks.keys()
    for row in picked:
        pick = picks[row["pick_id"]]
        assert (row["value"], row["chosen_under"]) == (pick["value"], pick["scorer_version"])
    run_audit(RUN_ID, 5, replayed.path, as_json=False)
    header = capsys.readouterr().out.split()
    assert {"source_run_id", "sampled_iteration", "value", "chosen_under", "text"} <= set(header)
    run_audit(RUN_ID, None, replayed.path, as_json=False)
    assert "6 iterations: everything as derived" in capsys.readouterr().out


def test_an_iteration_that_never_was_is_refused(replayed: storage.Store):
    with pytest.raises(storage.QueryError, match="1 to 6; came 9"):
        audited(replayed, 9)
