"""One Parquet file: many rows of one table, written once.

Invariant: a segment is written with the explicit schema of its table, and read only when its size
and sha256 are those its commit names (a reader may leave out the hash).

`POSITIONS` say where a row was committed first: the number of the commit and the row in that
commit's segment. They come from the log for plain segments and are columns of compacted ones.

How rows lie, and why. The figures are ratios taken side by side on a machine that was busy, 4,096
rollouts of 200 tokens unless said otherwise; `benchmarks/log.py` measures the whole.
- zstd level 1: half the time of level 3 for the rollouts (15 against 30 ms for the texts) and 5 %
  more bytes of them; tokens and ids become no larger. Level 9 takes five times as long as level 1
  and saves 10 % of the rollouts.
- Only what zstd makes smaller is compressed: lists, and texts and floats of many values. Numbered
  columns and the small ones of short appends cost a codec each: without it, a row group of rollouts
  is decoded in 1.1 instead of 1.6 ms and 64 rollouts are encoded in 3.1 instead of 3.8. It costs
  0.5 % of the bytes of large segments, 6 % in those of 64 rollouts; Bloom filters are in that.
- Lists are split by byte: token ids take 286 bytes instead of 315 (plain) or 348 (dictionary),
  log-probs 526 instead of 551; random mantissas of float32 cannot be compressed.
- `_row` is written as differences: it counts up.
- Bloom filters for one wrong answer in 10,000: looking up 64 ids asks each filter 64 times. They
  have 4 bytes a token row more than for one in 100 (Parquet rounds sizes up to powers of two).
- Row groups of 1,024 rollouts and 256 token rows (`schemas`): a lookup decodes whole row groups.
  Decoding 64 groups of rollouts took 1.5 s at 16,384 rows and 0.2 s at 2,048. Against 16,384 rows,
  1,024 cost 3 % more bytes and a scan of two columns 40 % more time (against 2,048: 1 % and 16 %).
  Token row groups of 128 would cost 4 % more bytes than 256, and twice the footers.
- Rows stay in the order of their commits, which is what their positions say.
"""

import hashlib
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage import lookup
from storage.commits import Segment
from storage.errors import DamagedError
from storage.files import Files, slug
from storage.integrity import read_checked
from storage.schemas import REAL, TABLES, TEXT, Column, Table
from storage.state import LiveSegment
from storage.upcast import stored_columns, upcast

POSITIONS = ("_commit", "_row")
_POSITION_FIELDS = [pa.field(name, pa.int64(), nullable=False) for name in POSITIONS]
FOLDER = "events"
_FALSE_POSITIVES = 1e-4
_LEVEL = 1
_SMALL_BYTES = 4096
_SOME = 64  # rows that tell if a column repeats itself


def segment_path(table: Table, run_id: str, batch_key: str, nonce: str) -> str:
    """Return where a segment goes; the random `nonce` makes the name one that was never used."""
    return f"{FOLDER}/{table.name}/{slug(run_id)}/{slug(batch_key)}-{nonce}.parquet"


def write(
    files: Files,
    table: Table,
    rows: pa.Table,
    name: tuple[str, str, str],
    version: int | None = None,
) -> Segment:
    """Store `rows` in a new segment and return what a commit says of it.

    The commit makes it durable (`Log.append`).

    Args:
        files: the store.
        table: whose rows.
        rows: with the columns of `version`, and with positions if they were committed before.
        name: run id, batch key and nonce.
        version: of the table's schema; None: today's.
    """
    path = segment_path(table, *name)
    data = encode(table, rows, version)
    files.place(path, data)
    return describe(table, path, rows, data, version)


def encode(table: Table, rows: pa.Table, version: int | None = None) -> bytes:
    """Return the Parquet form of `rows`, which have the columns of `version` (None: today's).

    Lists of tokens and log-probs are split by byte, which compresses them best; ids get a Bloom
    filter, so that looking one up skips the row groups without it.
    """
    lists = [c for c in table.all_columns if c.is_list and c.name in rows.column_names]
    ids = [n for n in ("event_id", "rollout_id", "target_id") if n in rows.column_names]
    plain = {*ids, *(c.name for c in lists), POSITIONS[1]}
    sink = pa.BufferOutputStream()
    schema = _stored_schema(table, version or table.version, rows)
    codecs = _codecs(table, rows)
    pq.write_table(
        rows if rows.schema.equals(schema, check_metadata=True) else rows.cast(schema),
        sink,
        row_group_size=table.rows_per_group,
        compression=codecs,
        compression_level={path: _LEVEL for path, codec in codecs.items() if codec == "zstd"},
        use_dictionary=[n for n in rows.column_names if n not in plain],
        use_byte_stream_split=[_path(c) for c in lists],
        column_encoding={n: "DELTA_BINARY_PACKED" for n in rows.column_names if n == POSITIONS[1]},
        bloom_filter_options={
            name: {"ndv": min(len(rows), table.rows_per_group), "fpp": _FALSE_POSITIVES}
            for name in ids
        },
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _codecs(table: Table, rows: pa.Table) -> dict[str, str]:
    """Return the codec of each column by its path.

    Integers and columns of few values are small once they are numbered, and those of a few
    kilobytes are small anyway: setting up the codec would take longer than all else.
    """
    codecs = dict.fromkeys(rows.column_names, "none")
    for column in table.all_columns:
        if column.name not in codecs or not (column.is_list or column.type in (TEXT, REAL)):
            continue
        values = rows.column(column.name)
        some = values.slice(0, _SOME)
        is_varied = column.is_list or len(some.unique()) > len(some) // 4
        codec = "zstd" if is_varied and values.nbytes > _SMALL_BYTES else "none"
        del codecs[column.name]
        codecs[_path(column)] = codec
    return codecs


def _path(column: Column) -> str:
    return f"{column.name}.list.element" if column.is_list else column.name


def describe(
    table: Table, path: str, rows: pa.Table, data: bytes, version: int | None = None
) -> Segment:
    """Return what a commit says of a segment with rows of `version` (None: today's)."""
    has_iteration = "iteration" in rows.column_names
    iterations = pc.min_max(rows.column("iteration")).as_py() if has_iteration else {}
    return Segment(
        table=table.name,
        path=path,
        rows=len(rows),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        min_iteration=iterations.get("min"),
        max_iteration=iterations.get("max"),
        schema_version=version or table.version,
    )


def read(files: Files, segment: LiveSegment, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a segment in the order they were committed, with the columns of today.

    Args:
        files: the store.
        segment: which.
        columns: all, or those named.

    Raises:
        DamagedError: it is missing, or not the file that was committed.
    """
    return _decode(files, segment, columns or [c.name for c in TABLES[segment.table].all_columns])


def read_events(files: Files, segment: LiveSegment, event_ids: Collection[str]) -> pa.Table:
    """Return the rows of these events, as `read_positioned` does, but check no hash.

    Little is read. `_row` counts the rows that were found in a plain segment.
    """
    table = TABLES[segment.table]
    path = files.root / segment.path
    try:
        rows = lookup.read_events(path, event_ids)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(
            f"segment `{path}` is missing or was changed ({error}); restore it from a backup"
        ) from error
    if not segment.is_compacted:
        rows = _with_positions(segment, rows)
    if segment.schema_version < table.version:
        rows = upcast(table, segment.schema_version, rows)
    return rows.select([*(c.name for c in table.all_columns), *POSITIONS])


def read_iteration(files: Files, segment: LiveSegment, iteration: int) -> pa.Table:
    """Return the row groups that may hold the iteration, as `read_positioned` does.

    No hash is checked, and little is read: compacted segments lie in the order of their commits, so
    the rows of an iteration lie together.
    """
    table = TABLES[segment.table]
    path = files.root / segment.path
    try:
        with pq.ParquetFile(path) as file:
            groups, numbers = _groups_of_iteration(file.metadata, iteration)
            rows = file.read_row_groups(groups)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(
            f"segment `{path}` is missing or was changed ({error}); restore it from a backup"
        ) from error
    if not segment.is_compacted:
        rows = _with_positions(segment, rows, numbers)
    if segment.schema_version < table.version:
        rows = upcast(table, segment.schema_version, rows)
    return rows.select([*(c.name for c in table.all_columns), *POSITIONS])


def _groups_of_iteration(footer: pq.FileMetaData, iteration: int) -> tuple[list[int], np.ndarray]:
    """Return the row groups that may hold an iteration, and the numbers of their rows."""
    place = footer.schema.names.index("iteration")
    groups, numbers, start = [], [np.zeros(0, np.int64)], 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        bounds = group.column(place).statistics
        if bounds is None or not bounds.has_min_max or bounds.min <= iteration <= bounds.max:
            groups.append(number)
            numbers.append(np.arange(start, start + group.num_rows))
        start += group.num_rows
    return groups, np.concatenate(numbers)


def read_positioned(
    files: Files, segment: LiveSegment, columns: list[str] | None = None
) -> pa.Table:
    """Return the rows of a segment, as `read` does, with their positions as last columns."""
    wanted = columns or [c.name for c in TABLES[segment.table].all_columns]
    if segment.is_compacted:
        return _decode(files, segment, [*wanted, *POSITIONS])
    return _with_positions(segment, _decode(files, segment, wanted))


def read_stored(files: Files, segment: LiveSegment) -> pa.Table:
    """Return the rows of a segment as they were written, with their positions as last columns."""
    rows = pq.read_table(pa.BufferReader(read_checked(files, segment)))
    return rows if segment.is_compacted else _with_positions(segment, rows)


def _decode(files: Files, segment: LiveSegment, columns: list[str]) -> pa.Table:
    table = TABLES[segment.table]
    if segment.schema_version < table.version:
        rows = upcast(table, segment.schema_version, read_stored(files, segment))
        return rows.select(columns)
    return pq.read_table(pa.BufferReader(read_checked(files, segment)), columns=columns)


def _with_positions(
    segment: LiveSegment, rows: pa.Table, numbers: np.ndarray | None = None
) -> pa.Table:
    """Add the positions of a plain segment's rows: `numbers`, or None for all of them."""
    commits = pa.repeat(pa.scalar(segment.first_commit, pa.int64()), len(rows))
    rows_of_it = pa.array(np.arange(len(rows)) if numbers is None else numbers, pa.int64())
    for field, values in zip(_POSITION_FIELDS, (commits, rows_of_it), strict=True):
        rows = rows.append_column(field, values)
    return rows


def _stored_schema(table: Table, version: int, rows: pa.Table) -> pa.Schema:
    fields = [table.arrow_schema.field(name) for name in stored_columns(table, version)]
    return pa.schema([*fields, *(_POSITION_FIELDS if POSITIONS[0] in rows.column_names else ())])
