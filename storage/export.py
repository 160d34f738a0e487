"""A store as a plain DuckDB database, to be asked without this package.

Invariant: what is exported as of N answers every question as the store does as of N. Each segment
is compared with its committed hash before it is copied, and damage stops the export. The target
appears whole or not at all.
"""

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from storage.answers import printable
from storage.errors import QueryError
from storage.schemas import TABLES
from storage.state import LiveSegment, State
from storage.views import VIEWS, macro_sql, quoted, table_sql

if TYPE_CHECKING:
    from storage.store import Store

DATABASE = "rrl.duckdb"
DEFINITIONS = "views.sql"
MEMORY_LIMIT = "512MB"
_THREADS = 4  # each needs its share of the memory


@dataclass(frozen=True)
class Exported:
    """One table that was copied, and how far the export is, from 0 to 1."""

    table: str
    rows: int
    done_frac: float


def export_duckdb(store: "Store", folder: Path, *, as_of: int | None = None) -> Iterator[Exported]:
    """Write `rrl.duckdb` and `views.sql` to a new folder; yield each table once it is copied.

    The database holds every table (with `_commit` and `_row`) and every view, by name and as a
    macro with an `as_of` argument. The text defines the same names over the segments of the store,
    as they are now.

    Args:
        store: what to export.
        folder: that does not exist yet.
        as_of: commit number; rows of later ones are left out. None is the newest.

    Raises:
        QueryError: the folder exists, or `as_of` is no commit.
        DamagedError: a segment is missing or was changed; nothing is left behind.
    """
    number = store.number(as_of)
    folder = folder.absolute()
    if folder.exists() or folder.is_symlink():
        raise QueryError(f"export: expected a new folder, but `{folder}` exists; name another")
    if not folder.parent.is_dir():
        raise QueryError(f"export: expected a folder in `{folder.parent}`, which does not exist")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    partial.mkdir()
    try:
        yield from _copy(store, partial, number)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(store: "Store", folder: Path, number: int) -> Iterator[Exported]:
    store.check_whole()
    spill = folder / "spill"
    with duckdb.connect(str(folder / DATABASE)) as connection:
        connection.execute("set TimeZone = 'UTC'")
        connection.execute(f"set memory_limit = '{MEMORY_LIMIT}'")
        connection.execute(f"set threads = {_THREADS}")
        connection.execute(f"set temp_directory = {quoted(str(spill))}")
        work = dict.fromkeys(TABLES, 1)
        for segment in store.log.refresh().segments.values():
            work[segment.table] += segment.size_bytes
        done = 0
        for name in TABLES:
            rows = _copy_table(store, connection, name, number)
            done += work[name]
            yield Exported(name, rows, done / sum(work.values()))
        for statement in (*map(_macro, TABLES, map(_of_copy, TABLES)), *_view_definitions(number)):
            connection.execute(statement)
    shutil.rmtree(spill, ignore_errors=True)
    text = store.answered(lambda state: _definitions_text(store, state, number))
    (folder / DEFINITIONS).write_text(text, encoding="utf-8")


def _copy_table(
    store: "Store", connection: duckdb.DuckDBPyConnection, name: str, number: int
) -> int:
    """Copy a table as of `number` and return how many rows it has."""

    def copy(state: State) -> int:
        store.check_hashes(_segments(state, name))
        select = table_sql(TABLES[name], str(store.path), _segments(state, name))
        try:
            connection.execute(f"create or replace macro copied(as_of) as table {select}")
            connection.execute(
                f"create or replace table {name} as select * from copied({number})"  # noqa: S608
            )
            [[rows]] = connection.execute(f"select count(*) from {name}").fetchall()  # noqa: S608
            connection.execute("drop macro table copied")
        except duckdb.Error as error:
            store.check_whole(again=True)
            raise QueryError(f"table `{name}` could not be exported: {error}") from error
        return int(rows)

    return store.answered(copy)


def _definitions_text(store: "Store", state: State, number: int) -> str:
    """Return the tables over the store's segments, and the views over them, as SQL."""
    head = (
        f"-- The store {printable(str(store.path))} as of commit {number}, for DuckDB:\n"
        f"-- duckdb -init {DEFINITIONS}, or .read {DEFINITIONS}\n"
        "-- It names the store's files as they were now: export again after the store was moved or "
        "compacted.\n"
    )
    statements = ["set TimeZone = 'UTC'"]
    for name, table in TABLES.items():
        select = table_sql(table, str(store.path), _segments(state, name))
        statements += [_macro(name, select), _plain(name, number)]
    statements += _view_definitions(number)
    return head + "".join(f"{statement.strip()};\n" for statement in statements)


def _view_definitions(number: int) -> list[str]:
    statements = []
    for name in VIEWS:
        statements.append(f"create or replace {macro_sql(name)}")
        statements.append(_plain(name, number))
    return statements


def _of_copy(name: str) -> str:
    return f"select stored.* from {name} as stored where stored._commit <= as_of"  # noqa: S608


def _macro(name: str, select: str) -> str:
    return f"create or replace macro {name}(as_of) as table\n{select}"


def _plain(name: str, number: int) -> str:
    return f"create or replace view {name} as select * from {name}({number})"  # noqa: S608


def _segments(state: State, name: str) -> list[LiveSegment]:
    live = [s for s in state.segments.values() if s.table == name]
    return sorted(live, key=lambda s: s.first_commit)
