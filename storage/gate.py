"""What may be asked at the console: one SELECT that reads the store and touches nothing else.

Invariant: a query is judged by its parse tree, not by its words. DuckDB calls a statement a SELECT
although a `WITH` in it copies to a file, and a function may run SQL that is hidden in a text; so
every query node and every table function must be one of those known to be harmless.
"""

import json
from collections.abc import Iterator
from typing import Any

import duckdb

from storage.answers import printable
from storage.errors import QueryError
from storage.schemas import TABLES
from storage.views import VIEWS

_QUERY_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_TABLE_FUNCTIONS = {
    *TABLES,
    *VIEWS,
    "unnest",
    "range",
    "generate_series",
    "json_each",
    "json_tree",
    "duckdb_columns",
    "duckdb_views",
}
_CHANGING = {  # functions, some written without brackets
    *("random", "setseed", "uuid", "uuidv4", "uuidv7", "gen_random_uuid", "nextval", "currval"),
    *("now", "today", "current_date", "current_time", "current_timestamp", "localtime"),
    *("localtimestamp", "current_localtime", "current_localtimestamp", "get_current_time"),
    *("get_current_timestamp", "transaction_timestamp", "current_query_id", "txid_current"),
    *("current_transaction_id", "current_connection_id", "current_query", "current_setting"),
    *("pg_postmaster_start_time", "sleep_ms", "write_log"),
}

MAX_QUERY_CHARS = 100_000


def check_length(query: str) -> None:
    """Raise `QueryError` when a query is too long to be looked at."""
    if len(query) > MAX_QUERY_CHARS:
        raise QueryError(
            f"expected a query of at most {MAX_QUERY_CHARS} characters, came {len(query)}; to look "
            "for many values, write them to a file and join them in Python with `Store.sql`"
        )


def check_is_one_select(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Raise `QueryError` unless `query` is exactly one SELECT that can only read."""
    check_length(query)
    parsed = _parsed(connection, query)
    if parsed["error"]:
        if parsed["error_type"] == "parser":
            raise QueryError(f"the query has a syntax error: {printable(parsed['error_message'])}")
        raise QueryError("expected one SELECT, came another kind of statement; nothing was run")
    if len(parsed["statements"]) != 1:
        raise QueryError(f"expected one SELECT, came {len(parsed['statements'])}; nothing was run")
    for node in _nodes(parsed):
        kind = node.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _QUERY_NODES:
            raise QueryError(f"expected a SELECT that only reads, came a {kind}; nothing was run")
        if kind == "TABLE_FUNCTION":
            _check_function(node["function"]["function_name"])


def check_is_repeatable(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Raise `QueryError` when a SELECT asks for chance, the present moment, or another commit."""
    for node in _nodes(_parsed(connection, query)):
        if changing := _changing(node):
            raise QueryError(
                f"expected a condition that says the same whenever it is asked, came one with "
                f"`{changing}`; compare with fixed values instead, or select by "
                "hash(event_id) % 10; name tables and views without a commit"
            )


def _changing(node: dict[str, Any]) -> str | None:
    """Return what a node of the parse tree names that changes from one call to the next."""
    if node.get("sample"):
        return "sample"
    if node.get("type") == "TABLE_FUNCTION":
        name = str(node["function"]["function_name"]).lower()
        return f"{name}(...)" if name in (*TABLES, *VIEWS) else None
    names = [node.get("function_name", ""), *node.get("column_names", [])[-1:]]
    if names[0].lower() == "age" and len(node.get("arguments", ())) != 2:  # counted from today
        return "age"
    return next((name for name in names if name.lower() in _CHANGING), None)


def _parsed(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    [[answer]] = connection.execute(
        "select json_serialize_sql($query)", {"query": query}
    ).fetchall()
    try:
        return json.loads(answer)
    except RecursionError as error:
        raise QueryError("the query is nested too deeply to be looked at; nothing was run") from (
            error
        )


def _check_function(name: str) -> None:
    if name.lower() not in _TABLE_FUNCTIONS:
        known = ", ".join((*TABLES, *VIEWS))
        raise QueryError(
            f"`{printable(name)}(...)` cannot be asked here; expected one of the store's tables "
            f"and views ({known}) or unnest, range, generate_series, json_each"
        )


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in the parse tree."""
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
