"""Damage of any kind is found, named, and stops everything that would build on it."""

from pathlib import Path

import pytest

import storage
from storage.commits import commit_path
from tests.storage.rows import OPENED, prompt, rollout, tokens


@pytest.fixture
def damaged_path(store: storage.Store, writer: storage.StreamWriter) -> Path:
    """The one rollouts segment of a store with a few rows."""
    rows = [rollout(f"p{i}") for i in range(20)]
    writer.append({"rollouts": rows, "prompts": [prompt("p1")]}, "b")
    writer.append({"rollout_tokens": [tokens("ro1")]}, "c")
    store.sql("select count(*) from rollouts")  # whatever was checked before the damage counts not
    [path] = (store.path / "events" / "rollouts").rglob("*.parquet")
    return path


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def cut(path: Path) -> None:
    replace(path, path.read_bytes()[:-100])


def empty(path: Path) -> None:
    replace(path, b"")


def remove(path: Path) -> None:
    path.unlink()


def overwrite_end(path: Path) -> None:
    replace(path, path.read_bytes()[:-4] + b"XXXX")


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    replace(path, bytes(data))


@pytest.mark.parametrize("spoil", [cut, empty, remove, overwrite_end])
def test_visible_damage_stops_every_reader(store: storage.Store, damaged_path: Path, spoil):
    spoil(damaged_path)
    fresh = storage.open(store.path)
    for use in (
        lambda: fresh.sql("select count(*) from rollouts"),
        lambda: fresh.sql("select 1"),
        lambda: fresh.view("prompt_history"),
        lambda: fresh.read("rollouts"),
        lambda: fresh.read("rollouts", event_ids=["ro1"], check_hashes=False),
        lambda: fresh.open_stream("r1", OPENED).append({"rollouts": [rollout()]}, "b"),
        lambda: storage.console.run_query(fresh, "select 1"),
    ):
        with pytest.raises(storage.DamagedError, match=damaged_path.name):
            use()
    assert len(fresh.read("prompts")) == 1  # reads only whole segments
    where = str(damaged_path.relative_to(store.path))
    assert {finding.where for finding in storage.verify(fresh)} == {where}
    assert {finding.where for finding in storage.verify(fresh, deep=True)} == {where}


def test_a_flipped_bit_stops_every_reader_that_does_not_ask_otherwise(
    store: storage.Store, damaged_path: Path
):
    flip_bit(damaged_path)
    fresh = storage.open(store.path)
    wanted = ["ro" + "0" * 32]
    for use in (
        lambda: fresh.sql("select count(*) from rollouts"),
        lambda: fresh.view("training_history"),
        lambda: storage.console.run_query(fresh, "select count(*) from rollouts"),
        lambda: fresh.read("rollouts"),
        lambda: fresh.read("rollouts", event_ids=wanted),
        lambda: fresh.open_stream("r1", OPENED).append({"rollouts": [rollout()]}, "b"),
    ):
        with pytest.raises(storage.DamagedError, match="was changed"):
            use()
    assert fresh.sql("select count(*) from prompts").fetchall() == [(1,)]
    unchecked = fresh.sql("select count(*) from rollouts", check_hashes=False)
    assert unchecked.fetchall() == [(20,)]
    assert fresh.read("rollouts", event_ids=wanted, check_hashes=False) == []
    assert storage.verify(fresh) == []
    [finding] = storage.verify(fresh, deep=True)
    assert finding.where == str(damaged_path.relative_to(store.path))


def test_damage_while_a_store_is_open_is_named(store: storage.Store, damaged_path: Path):
    remove(damaged_path)
    with pytest.raises(storage.DamagedError, match="is missing"):
        store.sql("select max(num_prompt_tokens) from rollouts")


@pytest.mark.parametrize("spoil", [cut, empty, remove])
def test_what_is_left_can_be_asked(store: storage.Store, damaged_path: Path, spoil):
    spoil(damaged_path)
    where = str(damaged_path.relative_to(store.path))
    fresh = storage.open(store.path)
    assert fresh.sql("select count(*) from rollouts", allow_damaged=True).fetchall() == [(0,)]
    query = "select count(*) from prompts"
    result = storage.console.run_query(fresh, query, allow_damaged=True)
    assert (result.rows, list(result.damaged)) == ([(1,)], [where])
    assert f"without {where}" in storage.console.answer(fresh, query, allow_damaged=True)


@pytest.mark.parametrize(
    "spoil", [empty, remove, cut, lambda path: replace(path, path.read_bytes() + b"x")]
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_commit_stops_everything(
    store: storage.Store, damaged_path: Path, spoil, number: int
):
    path = store.path / commit_path(number)
    if spoil is cut:
        replace(path, path.read_bytes()[:-100])
    else:
        spoil(path)
    fresh = storage.open(store.path)
    for use in (fresh.head, lambda: fresh.sql("select 1"), lambda: fresh.open_stream("r1", OPENED)):
        with pytest.raises(storage.DamagedError):
            use()
    assert commit_path(number) in {finding.where for finding in storage.verify(fresh)}


def test_an_edited_commit_is_noticed(store: storage.Store, damaged_path: Path):
    path = store.path / commit_path(2)
    replace(path, path.read_bytes().replace(b'"rows":20', b'"rows":21'))
    with pytest.raises(storage.DamagedError, match="its content was changed"):
        storage.open(store.path).head()
    assert commit_path(2) in {finding.where for finding in storage.verify(store)}


def test_a_missing_last_commit_is_noticed_with_an_anchor(store: storage.Store, damaged_path: Path):
    head = store.head()
    assert storage.verify(store, anchor=head) == []
    (store.path / commit_path(head.number)).unlink()
    fresh = storage.open(store.path)
    assert storage.verify(fresh) == []  # nothing in the log itself can tell
    for anchor in (head, f"{head.number}:{head.sha256}"):
        [finding] = storage.verify(fresh, anchor=anchor)
        assert finding.where == commit_path(head.number)
        assert f"the newest is now {head.number - 1}" in finding.message


def test_another_history_is_noticed_with_an_anchor(store: storage.Store, damaged_path: Path):
    [finding] = storage.verify(store, anchor=storage.Head(2, "0" * 64))
    assert "rewritten" in finding.message
    with pytest.raises(storage.StorageError, match="NUMBER:SHA256"):
        storage.verify(store, anchor="2")


def test_rows_that_do_not_fit_their_hashes_are_found(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    from storage import batch

    def wrong(table, rows):
        return [f"{table.prefix}{i:032x}" for i in range(len(rows))], ["0" * 32] * len(rows)

    monkeypatch.setattr(batch, "identify", wrong)
    writer.append({"prompts": [prompt("p1")]}, "b")
    writer.append({"rollouts": [rollout("p1")]}, "b")
    messages = {finding.message for finding in storage.verify(store, deep=True)}
    assert "has event ids that do not fit their places" in messages
    assert "has rows that do not fit their content hashes" in messages
    assert storage.verify(store) == []


def test_an_event_in_two_segments_is_found(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    writer.append({"prompts": [prompt("p1")]}, "b")
    monkeypatch.setattr(writer._known, "find", lambda state, batch: {})
    writer.append({"prompts": [prompt("p1")]}, "b")
    [finding] = storage.verify(store, deep=True)
    assert "too" in finding.message


def test_a_policy_without_its_adapter_is_found(store: storage.Store, writer: storage.StreamWriter):
    adapter, optimizer = (store.artifacts.put(b"x", kind) for kind in ("adapter", "optimizer"))
    policy = {
        "policy_version": 0,
        "iteration": 0,
        "base_digest": "b",
        "adapter_digest": "a",
        "policy_digest": "p",
        "adapter_artifact": adapter,
        "optimizer_artifact": optimizer,
    }
    writer.append({"policies": [policy]}, "b")
    store.artifacts.delete(optimizer)  # old optimizer states may go
    assert storage.verify(store, deep=True) == []
    store.artifacts.delete(adapter)
    [finding] = storage.verify(store, deep=True)
    assert adapter in finding.message
