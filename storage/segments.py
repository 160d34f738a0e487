"""One Parquet file: many rows of one table, written once.

Invariant: a segment is written with the explicit schema of its table, and read only when its size
and sha256 are those its commit names.
"""

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq

from storage.commits import Segment
from storage.files import Files, slug
from storage.integrity import read_checked
from storage.schemas import Table

FOLDER = "events"
_FALSE_POSITIVES = 0.01


def segment_path(table: Table, run_id: str, batch_key: str, nonce: str) -> str:
    """Return where a segment goes; the random `nonce` makes the name one that was never used."""
    return f"{FOLDER}/{table.name}/{slug(run_id)}/{slug(batch_key)}-{nonce}.parquet"


def encode(table: Table, rows: pa.Table) -> bytes:
    """Return the Parquet form of `rows`.

    Lists of tokens and log-probs are split by byte, which compresses them best; ids get a Bloom
    filter, so that looking one up skips the row groups without it.
    """
    lists = [c.name for c in table.all_columns if c.is_list]
    ids = [n for n in ("event_id", "rollout_id", "target_id") if n in rows.column_names]
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows.cast(table.arrow_schema),
        sink,
        row_group_size=table.rows_per_group,
        compression="zstd",
        compression_level=3,
        use_dictionary=[n for n in rows.column_names if n not in (*lists, *ids)],
        use_byte_stream_split=[f"{name}.list.element" for name in lists],
        bloom_filter_options={
            name: {"ndv": min(len(rows), table.rows_per_group), "fpp": _FALSE_POSITIVES}
            for name in ids
        },
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def describe(table: Table, path: str, rows: pa.Table, data: bytes) -> Segment:
    """Return what a commit says of a segment."""
    iterations = (
        rows.column("iteration").to_pylist() if "iteration" in rows.column_names else [None]
    )
    return Segment(
        table=table.name,
        path=path,
        rows=len(rows),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        min_iteration=min(iterations),
        max_iteration=max(iterations),
        schema_version=table.version,
    )


def read(files: Files, segment: Segment, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a segment; all columns, or those named.

    Raises:
        DamagedError: it is missing, or not the file that was committed.
    """
    data = read_checked(files, segment)
    return pq.read_table(pa.BufferReader(data), columns=columns)
