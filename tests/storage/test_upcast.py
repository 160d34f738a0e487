"""A store written with an older schema is read with today's, and never rewritten into it."""

from dataclasses import replace

import pytest

import storage
from storage import schemas
from storage.schemas import REAL, TABLES, TEXT, Column, Table
from tests.storage.rows import OPENED, rollout, score

OLDER = TABLES["scores"]
OLD, NEW = OLDER.version, OLDER.version + 1
LATER = (
    Column("confidence", REAL, "How sure the scorer was.", nullable=True, since=NEW),
    Column(
        "verdict", TEXT, "The value as a word.", nullable=True, since=NEW,
        upcast="case when value >= 0.5 then 'right' when value < 0.5 then 'wrong' end",
    ),
)  # fmt: skip
NEWER: Table = replace(OLDER, columns=OLDER.columns + LATER, version=NEW)
VERDICTS = "select target_id, verdict, confidence from scores order by _commit, _row"


@pytest.fixture
def newer_schema(monkeypatch: pytest.MonkeyPatch, old: storage.Store) -> None:
    """From here on the code knows a newer version of `scores`."""
    monkeypatch.setitem(schemas.TABLES, "scores", NEWER)


@pytest.fixture
def old(store: storage.Store, writer: storage.StreamWriter) -> storage.Store:
    """A store of the older version: compacted and plain segments."""
    for i in range(3):
        writer.append({"scores": [score(f"t{i}", i / 2)], "rollouts": [rollout(f"p{i}")]}, f"b{i}")
    list(storage.compact(store, min_segments=2))
    writer.append({"scores": [score("t3", None)]}, "b3")
    return store


def test_older_rows_have_the_columns_of_today(old: storage.Store, newer_schema: None):
    fresh = storage.open(old.path)
    expected = [("t0", "wrong", None), ("t1", "right", None), ("t2", "right", None),
                ("t3", None, None)]  # fmt: skip
    assert fresh.sql(VERDICTS).fetchall() == expected
    assert [(r["target_id"], r["verdict"], r["confidence"]) for r in fresh.read("scores")] == (
        expected
    )
    assert storage.console.run_query(fresh, VERDICTS).rows == expected
    wanted = [storage.event_id("scores", {**score("t1", 0), "run_id": "r1"})]
    assert [r["verdict"] for r in fresh.read("scores", event_ids=wanted)] == ["right"]
    assert not storage.verify(fresh, deep=True)


def test_older_and_newer_segments_are_read_together(old: storage.Store, newer_schema: None):
    writer = storage.open(old.path).open_stream("r1", OPENED)
    writer.append({"scores": [score("t4", 1.0, confidence=0.75, verdict="surely")]}, "b4")
    fresh = storage.open(old.path)
    assert fresh.sql(VERDICTS).fetchall()[2:] == [
        ("t2", "right", None), ("t3", None, None), ("t4", "surely", 0.75)
    ]  # fmt: skip
    assert not storage.verify(fresh, deep=True)


def test_an_older_row_that_comes_again_is_the_committed_one(old: storage.Store, newer_schema: None):
    writer = storage.open(old.path).open_stream("r1", OPENED)
    [row] = writer.append({"scores": [score("t1", 0.5)]}, "again").rows["scores"]
    assert (row["verdict"], row["confidence"]) == ("right", None)
    with pytest.raises(storage.ConflictError):
        writer.append({"scores": [score("t1", 0.5, confidence=0.5)]}, "again")


def test_compaction_keeps_rows_as_they_were_written(old: storage.Store, newer_schema: None):
    store = storage.open(old.path)
    before = store.sql(VERDICTS).fetchall()
    list(storage.compact(store, min_segments=2))
    scores = [s for s in store.log.refresh().segments.values() if s.table == "scores"]
    assert [(s.schema_version, s.rows, s.is_compacted) for s in scores] == [(OLD, 4, True)]
    assert store.sql(VERDICTS).fetchall() == before
    assert not storage.verify(store, deep=True)


def test_segments_of_different_versions_are_not_merged(old: storage.Store, newer_schema: None):
    store = storage.open(old.path)
    writer = store.open_stream("r1", OPENED)
    for i in (4, 5):
        writer.append({"scores": [score(f"t{i}", 1.0, confidence=0.5)]}, f"b{i}")
    list(storage.compact(store, min_segments=2))
    scores = [s for s in store.log.refresh().segments.values() if s.table == "scores"]
    assert sorted((s.schema_version, s.rows) for s in scores) == [(OLD, 4), (NEW, 2)]
    assert not storage.verify(store, deep=True)


def test_older_code_refuses_newer_rows(old: storage.Store, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setitem(schemas.TABLES, "scores", NEWER)
        writer = storage.open(old.path).open_stream("r1", OPENED)
        writer.append({"scores": [score("t4", 1.0, confidence=0.5)]}, "b4")
    with pytest.raises(storage.NewerSchemaError, match=f"version {NEW} of table `scores`"):
        storage.open(old.path).head()


def test_a_later_column_never_belongs_to_a_place():
    for table in TABLES.values():
        for column in table.all_columns:
            assert column.since <= table.version
            assert column.since == 1 or (column.nullable and not column.place)
