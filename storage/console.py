"""The console: one SELECT over a store from somebody who is not trusted with the disk.

Invariant: a query can read the live segments of its store and nothing else, and can change nothing:
the gate lets one reading SELECT through; the connection below it has no way to files but one that
only reads the named ones (`readonly`); and no setting can be changed any more. Copies of the
segments would be as safe, but cost a second disk; links would not be safe at all.

DuckDB's limits are soft: it counts no memory of single values and notices an interrupt only between
vectors. `flows.asking` puts hard ones around the process in which `rrl sql` asks.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb

from storage.answers import (
    FORMATS,
    MAX_ANSWER_BYTES,
    check_names_differ,
    printable,
    printable_lines,
    size_bytes,
)
from storage.errors import QueryError
from storage.gate import check_is_one_select, check_is_repeatable, check_length
from storage.readonly import ROOT, ReadOnlyFiles
from storage.state import State
from storage.store import Store
from storage.stories import story
from storage.views import Views, names_in, quoted

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "QueryResult",
    "answer",
    "as_text",
    "locked",
    "printable",
    "run_query",
    "run_to_arrow",
    "selected_ids",
    "story",
    "views_of",
]

MEMORY_LIMIT = "2GB"
TIME_LIMIT_S = 60.0
MAX_ROWS = 100_000
_BATCH_ROWS = 10_000
_INTERRUPT_S = 0.02

Taken = TypeVar("Taken")


@dataclass(frozen=True)
class QueryResult:
    """The answer to one query.

    `as_of` is the commit it holds for; `damaged` names segments it had to do without, and why.
    """

    columns: list[str]
    rows: list[tuple[Any, ...]]
    as_of: int
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Question:
    query: str
    as_of: int
    allow_damaged: bool
    time_limit_s: float


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
        QueryError: it is not one SELECT, fails, takes too long or returns too much.
        DamagedError: segments are damaged and `allow_damaged` is off.
    """
    question = _Question(query, store.number(as_of), allow_damaged, time_limit_s)
    (columns, rows), damaged = _ask(store, question, _take_rows)
    return QueryResult(columns, rows, question.as_of, damaged)


def run_to_arrow(
    store: Store,
    query: str,
    *,
    as_of: int | None = None,
    allow_damaged: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> "tuple[pa.Table, dict[str, str]]":
    """Answer one SELECT as `run_query` does, with the types kept: the rows, and what is damaged."""
    question = _Question(query, store.number(as_of), allow_damaged, time_limit_s)
    return _ask(store, question, _take_arrow)


def selected_ids(
    store: Store,
    query: str,
    column: str,
    *,
    as_of: int | None = None,
    is_repeated: bool = False,
    time_limit_s: float = 600.0,
) -> list[str]:
    """Return the ids that one SELECT names in its one column, each once, sorted, however many.

    With `is_repeated` it is asked again later, and has to say the same then.

    Raises:
        QueryError: it is not one SELECT, has other columns, names a NULL, fails or takes too long;
            or it may say otherwise later.
        DamagedError: segments are damaged.
    """

    def take(connection: duckdb.DuckDBPyConnection, query: str) -> list[str]:
        if is_repeated:
            check_is_repeatable(connection, query)
        reader = connection.sql(query).to_arrow_reader(_BATCH_ROWS)
        if reader.schema.names != [column]:
            raise QueryError(
                f"expected a query with the one column `{column}`, came one with "
                f"{', '.join(map(printable, reader.schema.names))}"
            )
        found = {value for batch in reader for value in batch.column(0).to_pylist()}
        if None in found:
            raise QueryError(f"expected ids, came NULL; add `where {column} is not null`")
        return sorted(map(str, found))

    question = _Question(query, store.number(as_of), False, time_limit_s)
    return _ask(store, question, take)[0]


def answer(
    store: Store,
    query: str,
    *,
    as_of: int | None = None,
    format_: str = "table",
    allow_damaged: bool = False,
) -> str:
    """Answer one SELECT as text: `table`, `csv` or `json` (a list of objects)."""
    _check_format(format_)
    result = run_query(store, query, as_of=as_of, allow_damaged=allow_damaged)
    missing = "".join(f"without {path}: {why}\n" for path, why in result.damaged.items())
    return (missing if format_ == "table" else "") + as_text(store, result, format_)


def as_text(store: Store, result: QueryResult, format_: str) -> str:
    """Return a result as text; a table is headed by what it is an answer from."""
    _check_format(format_)
    text = FORMATS[format_](result.columns, result.rows)
    header = f"store {printable(str(store.path))}, as of commit {result.as_of}\n"
    return header + text if format_ == "table" else text


def _check_format(format_: str) -> None:
    if format_ not in FORMATS:
        raise QueryError(f"format: expected one of {', '.join(FORMATS)}, came {format_!r}")


def views_of(store: Store, state: State, as_of: int, without: Collection[str] = ()) -> Views:
    """Return the views over live segments, read through `readonly`.

    Args:
        store: whose segments.
        state: says which are live.
        as_of: commit number of plain names.
        without: paths of segments that are left out.
    """
    live = [s for s in state.segments.values() if s.path not in without]
    views = Views(ROOT, live, as_of)
    views.connection.register_filesystem(ReadOnlyFiles(store.path, [s.path for s in live]))
    return views


def locked(views: Views) -> duckdb.DuckDBPyConnection:
    """Return the connection of `views`, which from now on can read their files and nothing else.

    This is the last line: whatever statement is run on it, no other file is touched.
    """
    allowed = ", ".join(quoted(path) for path in views.paths())
    for setting in (
        f"allowed_paths = [{allowed}]",
        f"memory_limit = '{MEMORY_LIMIT}'",
        "temp_directory = ''",
        "allow_persistent_secrets = false",
        "enable_external_access = false",
        "disabled_filesystems = 'LocalFileSystem'",
        "lock_configuration = true",
    ):
        views.connection.execute(f"set {setting}")
    return views.connection


def _ask(
    store: Store, question: _Question, take: Callable[[duckdb.DuckDBPyConnection, str], Taken]
) -> tuple[Taken, dict[str, str]]:
    """Return what `take` makes of the answer, and the segments it had to do without."""
    check_length(question.query)

    def ask(state: State) -> tuple[Taken, dict[str, str]]:
        damaged = store.damaged() if question.allow_damaged else {}
        if not question.allow_damaged:
            store.check_whole()
            names = names_in(question.query)
            store.check_hashes(s for s in state.segments.values() if s.table in names)
        views = views_of(store, state, question.as_of, damaged)
        with views.connection, _time_limit(views.connection, question.time_limit_s):
            try:
                check_is_one_select(views.connection, question.query)
                views.define(question.query)
                return take(locked(views), question.query), damaged
            except duckdb.PermissionException as error:
                raise QueryError(
                    "expected a query over the store's tables and views, came one that opens files "
                    f"({printable_lines(str(error))}); nothing was read or written"
                ) from error
            except (duckdb.Error, OSError) as error:  # Arrow's readers raise the latter
                if not question.allow_damaged:
                    store.check_whole(again=True)
                raise QueryError(f"the query failed: {printable_lines(str(error))}") from error
            except (MemoryError, UnicodeError) as error:
                raise QueryError(f"the query failed: {type(error).__name__}: {error}") from error

    return store.answered(ask)


def _take_rows(
    connection: duckdb.DuckDBPyConnection, query: str
) -> tuple[list[str], list[tuple[Any, ...]]]:
    connection.execute(query)
    columns = [column[0] for column in connection.description]
    rows: list[tuple[Any, ...]] = []
    size = 0
    while (row := connection.fetchone()) is not None:
        rows.append(row)
        size += sum(map(size_bytes, row))
        _check_size(len(rows), size)
    return columns, rows


def _take_arrow(connection: duckdb.DuckDBPyConnection, query: str) -> "pa.Table":
    import pyarrow as pa

    reader = connection.sql(query).to_arrow_reader(_BATCH_ROWS)
    check_names_differ(reader.schema.names)
    batches: list[pa.RecordBatch] = []
    size = num_rows = 0
    for batch in reader:
        batches.append(batch)
        num_rows += batch.num_rows
        size += batch.nbytes
        _check_size(num_rows, size)
    return pa.Table.from_batches(batches, reader.schema)


def _check_size(num_rows: int, size: int) -> None:
    if num_rows > MAX_ROWS:
        raise QueryError(f"expected at most {MAX_ROWS} rows, came more; add a LIMIT or aggregate")
    if size > MAX_ANSWER_BYTES:
        raise QueryError(
            f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, came more; ask for fewer "
            "columns or rows, or cut texts with left(text, 100)"
        )


@contextmanager
def _time_limit(connection: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    """Interrupt what runs on a connection after `seconds`, and what is begun on it after that.

    DuckDB forgets an interrupt that comes between two statements, so it is told again and again.
    """
    is_done, is_late = threading.Event(), threading.Event()

    def interrupt() -> None:
        if is_done.wait(seconds):
            return
        is_late.set()
        while not is_done.wait(_INTERRUPT_S):
            connection.interrupt()

    watch = threading.Thread(target=interrupt, daemon=True)
    watch.start()
    try:
        yield
    except QueryError as error:
        if is_late.is_set() and "INTERRUPT Error" in str(error.__cause__):
            raise QueryError(f"the query was stopped after {seconds:g} s; ask for less") from error
        raise
    finally:
        is_done.set()
        watch.join()
