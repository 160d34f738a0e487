"""Looking events up finds what reading everything would, and reads little."""

import hashlib

import pyarrow.parquet as pq
import pytest

import storage
from storage import bloom
from tests.storage.rows import OPENED, rollout, tokens

NUM_ROWS = 1_500  # more than one row group


def ids_of(number: int, start: int = 0) -> list[str]:
    return [
        "ro" + hashlib.sha256(str(n).encode()).hexdigest()[:32]
        for n in range(start, start + number)
    ]


def test_hashes_are_xxh64():
    # python -c "import xxhash; print(xxhash.xxh64(b'...').intdigest())"
    expected = {
        "ro00000000000000000000000000000000": 16417026076653227508,
        "sc0123456789abcdef0123456789abcdef": 6623385785132707082,
    }
    assert bloom.hashes(list(expected)).tolist() == list(expected.values())


def test_a_filter_has_every_id_of_its_row_group_and_few_others(
    store: storage.Store, writer: storage.StreamWriter
):
    writer.append({"rollouts": [rollout(f"p{n}") for n in range(NUM_ROWS)]}, "b")
    [path] = (store.path / "events" / "rollouts").rglob("*.parquet")
    file, data = pq.ParquetFile(path), path.read_bytes()
    others = ids_of(2_000)
    for group in range(file.num_row_groups):
        chunk = file.metadata.row_group(group).column(0)
        start = chunk.bloom_filter_offset
        bits = data[start : start + chunk.bloom_filter_length]
        own = file.read_row_group(group, columns=["event_id"]).column(0).to_pylist()
        assert all(bloom.may_hold_any([bits], bloom.hashes([i])) == [True] for i in own)
        num_wrong = sum(bloom.may_hold_any([bits], bloom.hashes([i])) == [True] for i in others)
        assert num_wrong <= 0.001 * len(others)  # written for 1 in 10,000


@pytest.mark.parametrize("is_compacted", [False, True])
def test_looked_up_rows_are_those_of_a_whole_read(store: storage.Store, is_compacted: bool):
    for run_id in ("r1", "r2"):
        writer = store.open_stream(run_id, OPENED)
        for i in range(2):
            rows = [rollout(f"p{n}", iteration=i) for n in range(NUM_ROWS)]
            writer.append({"rollouts": rows}, f"b{i}")
    number = store.head().number
    if is_compacted:
        assert len(list(storage.compact(store, min_segments=2))) == 2
    for as_of in (number, number - 1):
        everything = store.read("rollouts", as_of=as_of)
        wanted = {row["event_id"] for row in everything[::97]} | {*ids_of(3), "", "ro1", "ö"}
        expected = [row for row in everything if row["event_id"] in wanted]
        for check_hashes in (True, False):
            options = {"event_ids": wanted, "as_of": as_of, "check_hashes": check_hashes}
            assert store.read("rollouts", **options) == expected
        of_run = [row for row in expected if (row["run_id"], row["iteration"]) == ("r2", 0)]
        assert store.read("rollouts", run_id="r2", iteration=0, **options) == of_run
    assert store.read("rollouts", event_ids=[]) == []
    assert store.read("rollouts", event_ids=ids_of(2)) == []


def test_a_lookup_reads_only_row_groups_that_hold_something(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    rows = [tokens(f"ro{n}") for n in range(NUM_ROWS)]
    committed = writer.append({"rollout_tokens": rows}, "b").rows["rollout_tokens"]
    read, groups_read = pq.ParquetFile.read_row_groups, []

    def watched(file: pq.ParquetFile, groups: list[int], **options):
        if "columns" not in options:
            groups_read.extend(groups)
        return read(file, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", watched)
    wanted = [committed[n]["event_id"] for n in (3, 700)]
    found = store.read("rollout_tokens", event_ids=wanted, check_hashes=False)
    assert found == [committed[3], committed[700]]
    assert groups_read == [0, 2]  # of 256 rows each
