"""The console: one SELECT over a store from somebody who is not trusted with the disk.

Invariant: a query can read the live segments of its store and nothing else, and can change
nothing: the gate lets one reading SELECT through, the connection may open only the named files, and
no setting can be changed any more.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import duckdb

from storage.answers import FORMATS, printable
from storage.errors import QueryError
from storage.gate import check_is_one_select
from storage.store import Store
from storage.stories import story
from storage.views import Views, names_in, quoted, quoted_file

__all__ = ["QueryResult", "answer", "printable", "run_query", "story"]

MEMORY_LIMIT = "2GB"
TIME_LIMIT_S = 60.0
MAX_ROWS = 100_000


@dataclass(frozen=True)
class QueryResult:
    """The answer to one query.

    `as_of` is the commit it holds for; `damaged` names segments it had to do without, and why.
    """

    columns: list[str]
    rows: list[tuple[Any, ...]]
    as_of: int
    damaged: dict[str, str] = field(default_factory=dict)


def run_query(
    store: Store,
    query: str,
    *,
    as_of: int | None = None,
    allow_damaged: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> QueryResult:
    """Answer one SELECT.

    Args:
        store: what to ask.
        query: exactly one SELECT (or DESCRIBE, SHOW TABLES, SUMMARIZE) over tables and views.
        as_of: commit number that plain names are read as of; None is the newest.
        allow_damaged: answer from what is left when segments are missing or cut.
        time_limit_s: seconds after which the query is stopped.

    Raises:
        QueryError: it is not one SELECT, fails, takes too long or returns too many rows.
        DamagedError: segments are damaged and `allow_damaged` is off.
    """
    number = store.number(as_of)
    damaged = store.damaged() if allow_damaged else {}
    if not allow_damaged:
        store.check_whole()
    live = [s for s in store.log.refresh().segments.values() if s.path not in damaged]
    views = Views(store.path, live, number)
    check_is_one_select(views.connection, query)
    views.define(query)
    connection = _locked(views)
    with _time_limit(connection, time_limit_s):
        try:
            answer = connection.execute(query)
            columns = [column[0] for column in answer.description]
            rows = answer.fetchmany(MAX_ROWS + 1)
        except duckdb.Error as error:
            raise QueryError(f"the query failed: {error}") from error
    if len(rows) > MAX_ROWS:
        raise QueryError(f"expected at most {MAX_ROWS} rows, came more; add a LIMIT or aggregate")
    return QueryResult(columns, rows, number, damaged)


def answer(
    store: Store,
    query: str,
    *,
    as_of: int | None = None,
    format_: str = "table",
    allow_damaged: bool = False,
) -> str:
    """Answer one SELECT as text: `table`, `csv` or `json` (a list of objects)."""
    if format_ not in FORMATS:
        raise QueryError(f"format: expected one of {', '.join(FORMATS)}, came {format_!r}")
    result = run_query(store, query, as_of=as_of, allow_damaged=allow_damaged)
    text = FORMATS[format_](result.columns, result.rows)
    if format_ != "table":
        return text
    missing = "".join(f"without {path}: {why}\n" for path, why in result.damaged.items())
    return f"store {store.path}, as of commit {result.as_of}\n{missing}{text}"


def _locked(views: Views) -> duckdb.DuckDBPyConnection:
    """Return the connection of `views`, able to open their files and nothing else from now on."""
    allowed = ", ".join(quote(path) for path in views.paths() for quote in (quoted, quoted_file))
    for setting in (
        f"allowed_paths = [{allowed}]",
        f"memory_limit = '{MEMORY_LIMIT}'",
        "temp_directory = ''",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        views.connection.execute(f"set {setting}")
    return views.connection


@contextmanager
def _time_limit(connection: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, connection.interrupt)
    timer.start()
    try:
        yield
    except QueryError as error:
        if isinstance(error.__cause__, duckdb.InterruptException) and not timer.is_alive():
            raise QueryError(f"the query was stopped after {seconds:g} s; ask for less") from error
        raise
    finally:
        timer.cancel()
