"""What the log is compared with: other ways to keep rollouts, each told to append durably.

All get the same records as Python dicts, as rows of the tables they have, and answer when their
data is said to be on the disk. What each of them leaves out is said with it.
"""

import json
import os
import sqlite3
import time
from array import array
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from log_data import OPENED, Record, table_rows

import storage

Tables = dict[str, list[Record]]
Append = Callable[[Tables, int], None]

LOG, JSONL, ORJSON, SQLITE, DELTA = "log", "JSONL", "JSONL (orjson)", "SQLite", "Delta"
_DELTA_TRIES = 1_000


def has_delta() -> bool:
    """Tell whether the package `deltalake` is installed."""
    return find_spec("deltalake") is not None


def contenders() -> tuple[str, ...]:
    """Return the names of everything that can be measured here, the log first."""
    return (LOG, JSONL, ORJSON, SQLITE, *([DELTA] if has_delta() else []))


def as_tables(name: str, records: list[Record]) -> Tables:
    """Return the records as rows of the tables that a contender has; no part of an append."""
    if name not in (LOG, SQLITE):
        return {"rollouts": records}
    tables = table_rows(records)
    if name == SQLITE:
        ids = [{"id": record["id"]} for record in records]
        tables["rollouts"] = [a | b for a, b in zip(ids, tables["rollouts"], strict=True)]
    return tables


def open_appender(name: str, folder: Path, writer: str) -> Append:
    """Return a function that appends what `as_tables` returns, given the number of the batch.

    Args:
        name: one of `contenders`.
        folder: shared by all writers.
        writer: name of this one; the log has a stream, JSONL a file for each.
    """
    if name == LOG:
        return _log(folder, writer)
    if name == SQLITE:
        return _sqlite(folder)
    if name == DELTA:
        return _delta(folder)
    if name == JSONL:
        return _jsonl(folder, writer, lambda record: (json.dumps(record) + "\n").encode())
    import orjson

    return _jsonl(folder, writer, lambda record: orjson.dumps(record) + b"\n")


def _log(folder: Path, writer: str) -> Append:
    """Return appends to a stream of a store: three tables in one commit, places checked."""
    store = storage.open(folder / "store", create=not (folder / "store").exists())
    stream = store.open_stream(writer, OPENED)

    def append(tables: Tables, number: int) -> None:
        stream.append(tables, f"batch-{number}", closes_iteration=number)

    return append


def _jsonl(folder: Path, writer: str, line: Callable[[Record], bytes]) -> Append:
    """Return appends of lines, then fsync; nothing keeps a record from being there twice."""
    file = (folder / f"{writer}.jsonl").open("ab")

    def append(tables: Tables, number: int) -> None:
        file.write(b"".join(map(line, tables["rollouts"])))
        file.flush()
        os.fsync(file.fileno())

    return append


def _sqlite(folder: Path) -> Append:
    """Return transactions over three tables, in WAL mode with synchronous=FULL; lists are BLOBs."""
    connection = sqlite3.connect(folder / "store.sqlite", timeout=600, isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")

    def flat(row: Record) -> Record:
        return {
            key: array("f" if key == "sampler_logprobs" else "i", value).tobytes()
            if isinstance(value, list)
            else value
            for key, value in row.items()
        }

    def append(tables: Tables, number: int) -> None:
        connection.execute("begin immediate")
        for table, rows in tables.items():
            names = list(rows[0])
            columns, marks = ", ".join(names), ", ".join(f":{name}" for name in names)
            key = ", primary key (id)" if table == "rollouts" else ""
            connection.execute(f"create table if not exists {table} ({columns}{key})")
            insert = f"insert into {table} ({columns}) values ({marks})"  # noqa: S608 - our names
            connection.executemany(insert, map(flat, rows))
        connection.execute("commit")

    return append


def _delta(folder: Path) -> Append:
    """Return appends to one wide Delta table, tried again on conflict; Delta does not fsync."""
    import pyarrow as pa
    from deltalake import write_deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError

    score = pa.struct(
        [("scorer", pa.string()), ("scorer_version", pa.string()), ("attempt", pa.int32()),
         ("target_kind", pa.string()), ("kind", pa.string()), ("value", pa.float64()),
         ("status", pa.string()), ("components_json", pa.string()), ("feedback", pa.string()),
         ("elapsed_ms", pa.float64())]
    )  # fmt: skip
    lists = {
        "prompt_ids": pa.list_(pa.int32()), "completion_ids": pa.list_(pa.int32()),
        "sampler_logprobs": pa.list_(pa.float32()), "scores": pa.list_(score),
    }  # fmt: skip
    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    path = str(folder / "delta")

    def append(tables: Tables, number: int) -> None:
        records = tables["rollouts"]
        schema = pa.schema([(k, lists.get(k) or kinds[type(v)]) for k, v in records[0].items()])
        rows = pa.Table.from_pylist(records, schema=schema)
        for attempt in range(_DELTA_TRIES):
            try:
                write_deltalake(path, rows, mode="append")
            except (CommitFailedError, DeltaError, OSError):
                if attempt == _DELTA_TRIES - 1:
                    raise
                time.sleep(0.001)
            else:
                return

    return append
