"""How rows lie on disk: explicit schemas, encodings that fit, row groups that can be skipped."""

from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

import storage
from storage.schemas import TABLES
from tests.storage.rows import rollout, tokens

NUM_ROWS = 600


@pytest.fixture
def segment(store: storage.Store, writer: storage.StreamWriter) -> Path:
    writer.append({"rollout_tokens": [tokens(f"ro{i}") for i in range(NUM_ROWS)]}, "b")
    [path] = (store.path / "events" / "rollout_tokens").rglob("*.parquet")
    return path


def test_a_segment_has_exactly_the_schema_of_its_table(segment: Path):
    assert pq.read_schema(segment).remove_metadata() == TABLES["rollout_tokens"].arrow_schema


def test_row_groups_are_as_long_as_the_table_says(segment: Path):
    metadata = pq.read_metadata(segment)
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert lengths == [256, 256, NUM_ROWS - 512]


def test_lists_are_split_by_byte_and_ids_have_bloom_filters(segment: Path):
    query = """select path_in_schema, encodings, compression, bloom_filter_length
               from parquet_metadata($p)"""
    rows = duckdb.execute(query, {"p": str(segment)}).fetchall()
    split = {
        path.split(",")[0] for path, encodings, _, _ in rows if "BYTE_STREAM_SPLIT" in encodings
    }
    assert split == {"prompt_ids", "completion_ids", "sampler_logprobs", "sampled_bounds"}
    assert {path for path, _, _, bloom in rows if bloom} == {"event_id", "rollout_id"}


def test_large_columns_are_compressed_and_small_ones_are_not(segment: Path):
    query = "select path_in_schema, compression from parquet_metadata($p)"
    codecs = dict(duckdb.execute(query, {"p": str(segment)}).fetchall())
    # 600 ids of 34 bytes are more than 4 KiB, 600 run ids of 2 bytes and their offsets are not
    assert (codecs["event_id"], codecs["run_id"]) == ("ZSTD", "UNCOMPRESSED")


def test_a_commit_describes_its_segments(store: storage.Store, writer: storage.StreamWriter):
    rows = [rollout(iteration=3), rollout(iteration=1), rollout(iteration=2)]
    commit = writer.append({"rollouts": rows}, "Sampler batch 0").commit
    [segment] = store.log.read(commit).draft.added
    folder, name = segment.path.rsplit("/", 1)
    assert folder == "events/rollouts/r1"
    assert name.startswith("sampler-batch-0-")
    assert name.endswith(f"-{store.log.read(commit).draft.nonce}.parquet")
    assert (segment.rows, segment.min_iteration, segment.max_iteration) == (3, 1, 3)
    assert segment.schema_version == TABLES["rollouts"].version


@pytest.mark.parametrize("compacted", [False, True])
def test_an_iteration_of_a_large_segment_is_what_reading_it_whole_finds(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch,
    compacted: bool,
):  # fmt: skip
    for first in range(0, 40, 20):
        rows = [rollout(f"p{n}", iteration=first + n % 20) for n in range(3_000)]
        writer.append({"rollouts": rows}, f"b{first}")
    if compacted:
        list(storage.compact(store, min_segments=2))
    whole = {i: store.read("rollouts", run_id="r1", iteration=i) for i in (0, 7, 25, 39, 77)}
    monkeypatch.setattr("storage.reading.LARGE_BYTES", 0)
    assert [len(rows) for rows in whole.values()] == [150, 150, 150, 150, 0]
    for iteration, expected in whole.items():
        assert (
            storage.open(store.path).read("rollouts", run_id="r1", iteration=iteration) == expected
        )


def test_a_flipped_bit_in_a_large_segment_is_noticed_before_a_part_of_it_is_read(
    store: storage.Store, writer: storage.StreamWriter, monkeypatch: pytest.MonkeyPatch
):
    writer.append({"rollouts": [rollout(f"p{n}") for n in range(50)]}, "b")
    monkeypatch.setattr("storage.reading.LARGE_BYTES", 0)
    [path] = (store.path / "events" / "rollouts").rglob("*.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(storage.DamagedError):
        storage.open(store.path).read("rollouts", run_id="r1", iteration=1)
