"""The tables and views of a store, in a DuckDB connection.

Invariant: `as_of` is a predicate on the commit of a row, never a choice of files, so an answer as
of N stays the same for ever. Every name is a macro with an `as_of` argument and a plain view as of
the number the connection was opened with; a view may take further arguments, by name, which are
null by default: `replay_buffer(17, run := 'a')`. `_commit` and `_row` come from the log, the rest
from files that are named one by one.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib import resources

import duckdb

from storage.errors import QueryError
from storage.schemas import TABLES, Table
from storage.state import LiveSegment
from storage.upcast import SQL_TYPES, column_expressions

VIEWS = (  # in the order of definition: each may use those before it
    "latest_scores",
    "reward_scorers",
    "lineage",
    "training_history",
    "prompt_history",
    "prompt_diversity",
    "lost_prompts",
    "forgetting",
    "judged_rollouts",
    "replay_buffer",
    "memory",
    "replay_audit",
    "value_drift",
    "review_outcomes",
    "review_lifts",
    "review_history",
    "sampled_budget",
    "run_costs",
    "run_overview",
    "learning_by_unit",
    "reward_spread",
    "buffer_counts",
    "rollout_sample",
)
ORDERS = {  # of views whose text has none
    "latest_scores": "_commit, _row",
    "replay_buffer": "run_id, unit, entry_id",
}
_PARAMETER = re.compile(r"\$(\w+)")
_PLAIN = re.compile(r"\b\w+\b(?!\s*\()")
_CATALOG = re.compile(r"\b(show|information_schema|(duckdb|pg|sqlite)_\w+)\b", re.IGNORECASE)
_SETUP = (
    "set global TimeZone = 'UTC'",
    "set global python_enable_replacements = false",  # a misspelt table must not find a variable
    "set global autoinstall_known_extensions = false",
    "set global autoload_known_extensions = false",
    "set global parquet_metadata_cache = true",  # segments never change: read each footer once
)


class Views:
    """A connection to the live `segments` below `root`; plain names read as of `as_of`.

    Names are defined when a query first needs them, because each definition costs milliseconds.
    `root` is a folder, or what stands for it where the connection finds files otherwise.
    """

    def __init__(self, root: str, segments: Iterable[LiveSegment], as_of: int) -> None:
        self.connection = duckdb.connect(":memory:")
        self.as_of = as_of
        self._defined: set[tuple[str, str]] = set()
        self._root = root
        self._segments: dict[str, list[LiveSegment]] = {}
        self.read_from(segments)
        for statement in _SETUP:
            self.connection.execute(statement)

    def read_from(self, segments: Iterable[LiveSegment]) -> None:
        """Read from these live segments: of the same log, whose answers as of a commit stay."""
        found: dict[str, list[LiveSegment]] = {name: [] for name in TABLES}
        for segment in sorted(segments, key=lambda s: s.first_commit):
            found[segment.table].append(segment)
        self._defined -= {
            ("macr", name) for name in TABLES if found[name] != self._segments.get(name)
        }
        self._segments = found

    def define(self, query: str) -> None:
        """Make known what `query` may read: macros for all of it, plain views for what it names.

        A plain view is bound when it is created, which opens every file it reads.
        """
        for name in names_in(query):
            if name in TABLES:
                select = table_sql(TABLES[name], self._root, self._segments[name])
                self._define(f"macro {name}(as_of) as table {select}", name)
            else:
                self._define(macro_sql(name), name)
        for name in plain_names_in(query):
            select = f"select * from {name}({self.as_of})"  # noqa: S608
            self._define(f"view {name} as {select}", name)

    def _define(self, what: str, name: str) -> None:
        key = (what[:4], name)
        if key not in self._defined:
            self.connection.execute(f"create or replace {what}")
            self._defined.add(key)

    def paths(self) -> list[str]:
        """Return the files that queries may read."""
        return [f"{self._root}/{s.path}" for found in self._segments.values() for s in found]


def names_in(query: str) -> list[str]:
    """Return the tables and views that `query` may read, directly or through views.

    They come in the order of definition. A query that names none, or asks for the catalog, may read
    all of them.
    """
    everything = [*TABLES, *VIEWS]
    found = _closure(query)
    if not found or _CATALOG.search(query):
        return everything
    return [name for name in everything if name in found]


def plain_names_in(query: str) -> list[str]:
    """Return those of `names_in` that `query` may read as of the number of its connection.

    `rollouts(17)` says itself as of when. A query that may read all names may read them plain.
    """
    needed = names_in(query)
    if len(needed) == len(TABLES) + len(VIEWS):
        return needed
    plain = set(_PLAIN.findall(query.lower()))
    return [name for name in needed if name in plain]


@cache
def view_sql(name: str) -> str:
    """Return the text of a view: one SELECT with the parameter `$as_of`."""
    return (resources.files("storage") / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def view_digests(*names: str) -> dict[str, str]:
    """Return the hash of the text of each view and of the views it reads, comments left out."""
    read = set().union(*(_closure(name) for name in names)) & {*VIEWS}
    return {name: _digest(view_sql(name)) for name in sorted(read)}


def _digest(sql: str) -> str:
    words = re.sub("--.*", "", sql).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]


def arguments(name: str) -> list[str]:
    """Return the names of the arguments that a view takes beside `as_of`."""
    statement = re.sub("--.*", "", view_sql(name))
    return [p for p in dict.fromkeys(_PARAMETER.findall(statement)) if p != "as_of"]


def macro_sql(name: str) -> str:
    """Return a view as a macro, to be put behind CREATE."""
    signature = ", ".join(["as_of", *(f"{argument} := null" for argument in arguments(name))])
    select = _PARAMETER.sub(r"\1", view_sql(name))
    return f"macro {name}({signature}) as table\n{select}"


def source_sql(name: str, number: int, given: Collection[str] = ()) -> str:
    """Return how a query names a table or view as of `number`, with arguments for a view.

    Their values are the query's parameters of the same names.

    Raises:
        QueryError: it has no such argument.
    """
    known = arguments(name) if name in VIEWS else []
    if not set(given) <= set(known):
        raise QueryError(
            f"`{name}` takes {', '.join(known) or 'no arguments'} beside as_of; came "
            f"{', '.join(given)}"
        )
    called = ", ".join([str(number), *(f"{argument} := ${argument}" for argument in given)])
    return f"{name}({called})"


def ask_names() -> list[str]:
    """Return the names of the questions that are suggested after a run."""
    folder = resources.files("storage") / "sql" / "ask"
    return sorted(f.name.removesuffix(".sql") for f in folder.iterdir() if f.name.endswith(".sql"))


def ask_sql(name: str) -> str:
    """Return a suggested question as one line; it has the parameter `$run_id`."""
    lines = view_sql(f"ask/{name}").split("\n")
    return " ".join(line.strip() for line in lines if line and not line.startswith("--"))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _closure(query: str) -> set[str]:
    words = _words(query)
    found = words & {*TABLES, *VIEWS}
    for name in words & set(VIEWS):
        found |= _closure(re.sub("--.*", "", view_sql(name)))
    return found


def table_sql(table: Table, root: str, segments: list[LiveSegment]) -> str:
    """Return the SELECT over all live segments of a table; its one parameter is `as_of`.

    Segments of one form are read together: of one schema version, compacted or not. Columns are
    qualified: an unqualified `as_of` would be the argument, not the column.
    """
    forms: dict[tuple[int, bool], list[LiveSegment]] = {}
    for segment in segments:
        forms.setdefault((segment.schema_version, segment.is_compacted), []).append(segment)
    if not forms:
        nulls = [f"null::{SQL_TYPES[c.type]} as {c.name}" for c in table.all_columns]
        positions = "null::bigint as _commit, null::bigint as _row"
        return f"select {', '.join(nulls)}, {positions} where false"
    selects = [
        _select(column_expressions(table, version), root, same, is_compacted)
        for (version, is_compacted), same in sorted(forms.items())
    ]
    return " union all ".join(selects)


def _select(columns: list[str], root: str, segments: list[LiveSegment], is_compacted: bool) -> str:
    paths = ", ".join(quoted_file(f"{root}/{s.path}") for s in segments)
    if is_compacted:
        commit, row = "stored._commit", "stored._row"
    else:
        numbers = ", ".join(str(s.first_commit) for s in segments)
        commit = f"([{numbers}]::bigint[])[stored.file_index::bigint + 1]"
        row = "stored.file_row_number"
    positions = "" if is_compacted else ", file_row_number = true"
    return f"""
        select {", ".join(columns)}, {commit} as _commit, {row} as _row
        from read_parquet([{paths}], hive_partitioning = false{positions}) as stored
        where {commit} <= as_of"""  # noqa: S608 - names from `schemas`, files from the log


def quoted(text: str) -> str:
    """Return `text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def quoted_file(path: str) -> str:
    """Return a path as an SQL string that names one file, whatever characters it holds."""
    return quoted("".join(f"[{c}]" if c in "*?[" else c for c in path))
