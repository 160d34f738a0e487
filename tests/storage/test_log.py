"""The chain of commits: dense numbers, checkpoints that only save time, formats not read."""

import json
from pathlib import Path

import pytest

import storage
import storage.log
from storage.commits import body_sha256, canonical_json, commit_path
from storage.log import checkpoint_path
from storage.state import State, fold
from tests.storage.rows import OPENED, prompt, rollout


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.log, "CHECKPOINT_EVERY", 4)


def filled(path: Path, commits: int) -> storage.Store:
    store = storage.open(path, create=True)
    writer = store.open_stream("r1", OPENED)
    for number in range(2, commits + 1):
        writer.append({"prompts": [prompt(f"p{number}")]}, "b", closes_iteration=number)
    return store


def rewrite(store: storage.Store, path: str, **changes: object) -> None:
    """Change a commit or checkpoint the way a writer of other code would: with a fitting hash."""
    target = store.path / path
    body = json.loads(target.read_bytes()) | changes
    del body["sha256"]
    target.unlink()
    target.write_bytes(canonical_json(body | {"sha256": body_sha256(body)}))


def test_an_empty_store_has_no_head(store: storage.Store):
    assert store.head() == storage.Head(0, "")


def test_commits_are_numbered_from_one_and_name_the_one_before(tmp_path: Path):
    store = filled(tmp_path / "s", 3)
    bodies = [json.loads((store.path / commit_path(n)).read_bytes()) for n in (1, 2, 3)]
    assert [body["number"] for body in bodies] == [1, 2, 3]
    assert [body["prev_sha256"] for body in bodies] == [
        "",
        bodies[0]["sha256"],
        bodies[1]["sha256"],
    ]
    assert store.head() == storage.Head(3, bodies[2]["sha256"])
    assert commit_path(3) == "_log/00000000000000000003.json"
    assert bodies[1]["kind"] == "append"
    assert bodies[1]["removed"] == []
    [segment] = bodies[1]["added"]
    path = store.path / segment["path"]
    assert segment["path"].startswith("events/prompts/r1/b-")
    assert (segment["rows"], segment["size_bytes"]) == (1, path.stat().st_size)


def test_opening_reads_the_newest_checkpoint_and_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    filled(tmp_path / "s", 10)
    store = storage.open(tmp_path / "s")
    read: list[str] = []
    real = store.files.read
    monkeypatch.setattr(store.files, "read", lambda path: read.append(path) or real(path))
    assert store.head().number == 10
    # the checkpoint at 8, commit 8 that proves it, commits 9 and 10, and the end of the log
    assert read == [checkpoint_path(8), *(commit_path(n) for n in (8, 9, 10, 11))]


def test_a_checkpoint_holds_what_the_whole_log_says(tmp_path: Path):
    store = filled(tmp_path / "s", 8)
    commits = [store.log.read(number) for number in range(1, 9)]
    assert store.log.checkpoints() == [8, 4]
    assert store.log.checkpoint(8) == fold(State(), commits)
    assert store.log.checkpoint(4) == fold(State(), commits[:4])


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"format":1}', None])
def test_a_bad_checkpoint_is_ignored(tmp_path: Path, damage: bytes | None):
    whole = filled(tmp_path / "s", 10)
    expected = whole.log.refresh()
    target = whole.path / checkpoint_path(8)
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data.replace(b'"r1"', b'"r2"') if damage is None else damage)
    assert storage.open(whole.path).log.refresh() == expected
    [finding] = storage.verify(whole)
    assert (finding.severity, finding.where) == ("warning", checkpoint_path(8))


def test_a_checkpoint_of_another_history_is_ignored(tmp_path: Path):
    store, other = filled(tmp_path / "s", 10), filled(tmp_path / "other", 10)
    target = store.path / checkpoint_path(8)
    target.unlink()
    target.write_bytes((other.path / checkpoint_path(8)).read_bytes())
    assert storage.open(store.path).log.refresh() == store.log.refresh()


@pytest.mark.parametrize("missing", [2, 6, 8, 9])
def test_a_missing_commit_stops_opening(tmp_path: Path, missing: int):
    store = filled(tmp_path / "s", 10)
    (store.path / commit_path(missing)).unlink()
    again = storage.open(store.path)
    if missing < 8:  # before the checkpoint: only `verify` reads it
        assert again.head().number == 10
    else:
        with pytest.raises(storage.DamagedError, match=f"commit {missing} is missing"):
            again.head()
        with pytest.raises(storage.DamagedError):
            again.open_stream("r1", OPENED)
    assert commit_path(missing) in {finding.where for finding in storage.verify(again)}


def test_a_log_that_ends_before_its_checkpoint_stops_opening(tmp_path: Path):
    store = filled(tmp_path / "s", 8)
    for number in (7, 8):
        (store.path / commit_path(number)).unlink()
    with pytest.raises(storage.DamagedError, match="commit 8 is missing although a checkpoint"):
        storage.open(store.path).head()


def test_a_rewritten_commit_breaks_the_chain(tmp_path: Path):
    store = filled(tmp_path / "s", 3)
    rewrite(store, commit_path(2), batch_key="other")
    with pytest.raises(storage.DamagedError, match="commit 3 does not follow commit 2"):
        storage.open(store.path).head()
    assert commit_path(3) in {finding.where for finding in storage.verify(store)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "written in format 2; this version reads format 1"),
        ({"kind": "fork"}, "a commit of kind 'fork'"),
    ],
)
def test_newer_commits_are_refused(tmp_path: Path, changes: dict, message: str):
    store = filled(tmp_path / "s", 2)
    rewrite(store, commit_path(2), **changes)
    for use in (
        lambda s: s.head(),
        lambda s: s.sql("select 1"),
        lambda s: s.open_stream("r2", OPENED),
        lambda s: s.read("runs"),
    ):
        with pytest.raises(storage.NewerSchemaError, match=message):
            use(storage.open(store.path))


@pytest.mark.parametrize("change", [{"schema_version": 9}, {"table": "dreams"}])
def test_newer_tables_are_refused(tmp_path: Path, change: dict):
    store = filled(tmp_path / "s", 2)
    [segment] = json.loads((store.path / commit_path(2)).read_bytes())["added"]
    rewrite(store, commit_path(2), added=[segment | change])
    with pytest.raises(storage.NewerSchemaError, match="Install a newer version"):
        storage.open(store.path).head()


def test_two_stores_on_one_folder_see_each_other(tmp_path: Path):
    one = filled(tmp_path / "s", 3)
    two = storage.open(one.path)
    writer = two.open_stream("r2", OPENED)
    writer.append({"rollouts": [rollout()]}, "b")
    assert one.head() == two.head()
    assert one.head().number == 5
    assert len(one.read("rollouts")) == 1
