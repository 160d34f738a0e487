"""Answers in batches: the rows of `sql`, in memory that does not grow with them."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

import storage
from tests.storage.replay_rows import Run
from tests.storage.rows import rollout, score
from tests.storage.test_compaction import Refreshed, delete_compacted

MAX_GROWTH_MIB = 48
QUERY = "select event_id, iteration, value from scores where value >= $least order by event_id"


def append_scores(writer: storage.StreamWriter, num: int, iteration: int = 1) -> None:
    rows = [score(f"ro{n}", n / num, iteration) for n in range(num)]
    writer.append({"scores": rows}, f"i{iteration}")


def test_batches_are_the_rows_of_sql_in_order(store: storage.Store, writer: storage.StreamWriter):
    append_scores(writer, 100)
    number = store.head().number
    append_scores(writer, 50, 2)
    for as_of in (None, number):
        batches = list(store.batches(QUERY, {"least": 0.25}, as_of, batch_rows=32))
        expected = store.sql(QUERY, {"least": 0.25}, as_of).fetchall()
        table = pa.Table.from_batches(batches)
        assert [tuple(row.values()) for row in table.to_pylist()] == expected
        assert {batch.num_rows for batch in batches[:-1]} == {32}
        assert table.schema.types == [pa.string(), pa.int32(), pa.float64()]


def test_an_answer_begun_twice_is_the_same_whatever_was_appended_between(
    store: storage.Store, writer: storage.StreamWriter
):
    append_scores(writer, 100)
    number = store.head().number
    first = store.batches(QUERY, {"least": 0.0}, number, batch_rows=10)
    rows = [next(first)]
    append_scores(writer, 100, 2)
    assert store.sql("select count(*) from scores").fetchall() == [(200,)]
    second = store.batches(QUERY, {"least": 0.0}, number, batch_rows=10)
    rows += first
    assert rows == list(second)


def test_an_empty_answer_has_its_columns(store: storage.Store):
    [batch] = store.batches("select event_id, value from scores")
    assert (batch.num_rows, batch.schema.names) == (0, ["event_id", "value"])


def test_a_view_may_be_named_with_its_arguments(store: storage.Store):
    run = Run(store)
    run.pin(1)
    run.cut(run.sample([1.0, 0.0])[0])
    run.fit("v1")
    for arguments in ({}, {"version": "none"}, {"run": "r1", "version": None}, {"run": "r2"}):
        rows = pa.Table.from_batches(store.batches("replay_buffer", arguments)).to_pylist()
        found = sorted(rows, key=lambda row: (row["unit"], row["entry_id"]))
        assert found == store.view("replay_buffer", arguments=arguments)
    [batch] = store.batches("rollouts", as_of=2)
    assert batch.num_rows == 0
    with pytest.raises(storage.QueryError, match="takes run, version beside as_of; came model"):
        store.batches("replay_buffer", {"model": "v1"})


@pytest.mark.parametrize("query", ["select nothing from scores", "selec", ""])
def test_a_wrong_query_fails_when_it_is_asked(store: storage.Store, query: str):
    with pytest.raises(storage.QueryError):
        store.batches(query)
    with pytest.raises(storage.QueryError, match="from 0 to 0, came 7"):
        store.batches("select 1", as_of=7)


def test_what_fails_on_the_way_says_where_to_begin_again(store: storage.Store):
    query = "select if(n = 3000000, error('too much'), n) from range(4000000) as numbers(n)"
    batches = store.batches(query, batch_rows=1_000)
    found = []
    with pytest.raises(storage.QueryError, match=r"too much.*begin again with as_of=0"):
        found.extend(batches)
    assert 0 < len(found) < 3_000


@pytest.mark.parametrize("spoil", ["cut", "flip"])
def test_damage_stops_the_batches(store: storage.Store, writer: storage.StreamWriter, spoil: str):
    append_scores(writer, 100)
    [path] = (store.path / "events" / "scores").rglob("*.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.unlink()
    path.write_bytes(data if spoil == "flip" else data[:-9])
    fresh = storage.open(store.path)
    with pytest.raises(storage.DamagedError):
        fresh.batches("select * from scores")
    if spoil == "flip":
        assert fresh.batches("select * from runs", check_hashes=True)


def test_batches_that_lose_their_files_before_the_first_are_asked_again(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    for iteration in range(1, 4):
        writer.append(
            {"rollouts": [rollout("p1", n, iteration) for n in range(5)]}, f"i{iteration}"
        )
    reader = storage.open(store.path)
    stale = reader.log.refresh()
    query = "select event_id, _commit from rollouts order by _commit, _row"
    before = list(reader.batches(query))
    delete_compacted(store)
    monkeypatch.setattr(reader.log, "refresh", Refreshed(reader.log.refresh, stale, times=2))
    assert list(reader.batches(query, as_of=stale.head.number)) == before


def test_several_answers_are_read_at_once_and_one_is_left_early(store: storage.Store):
    query = "select n from range($num) as numbers(n)"
    left = store.batches(query, {"num": 10**9}, batch_rows=100)
    assert next(left).num_rows == 100
    del left
    both = zip(
        *(store.batches(query, {"num": 1_000}, batch_rows=10) for _ in range(2)), strict=True
    )
    assert all(one == other for one, other in both)


def peak_mib(path: Path, num_rows: int) -> int:
    """The most memory of a process that reads so many generated rows, each seen once."""
    code = f"""
import resource
import storage
query = "select n, 'the text of row ' || n as text from range($num) as numbers(n)"
seen = 0
for batch in storage.open({str(path)!r}).batches(query, {{"num": {num_rows}}}):
    seen += batch.num_rows
assert seen == {num_rows}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_does_not_grow_with_the_answer(store: storage.Store):
    """5,000,000 rows of about 35 bytes are 170 MB."""
    peaks = [peak_mib(store.path, num_rows) for num_rows in (20_000, 5_000_000)]
    assert all(later - earlier < MAX_GROWTH_MIB for earlier, later in pairwise(peaks)), peaks
