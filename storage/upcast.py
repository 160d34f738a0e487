"""Rows that were written for an older version of their table, read with the columns of today.

Invariant: a stored row never changes. A column that came later says as an SQL expression over the
older columns what it is in older rows; that one expression serves the views and every other reader.
"""

from typing import TYPE_CHECKING

from storage.schemas import Table

if TYPE_CHECKING:
    import pyarrow as pa

SQL_TYPES = {
    "text": "varchar",
    "int32": "integer",
    "int64": "bigint",
    "float64": "double",
    "bool": "boolean",
    "moment": "timestamptz",
    "list of int32": "integer[]",
    "list of float32": "float[]",
}


def column_expressions(table: Table, version: int) -> list[str]:
    """Return an SQL expression for every column of today over rows of `version`."""
    return [
        f"stored.{c.name}"
        if c.since <= version
        else f"({c.upcast})::{SQL_TYPES[c.type]} as {c.name}"
        for c in table.all_columns
    ]


def stored_columns(table: Table, version: int) -> list[str]:
    """Return the names of the columns that rows of `version` have."""
    return [c.name for c in table.all_columns if c.since <= version]


def upcast(table: Table, version: int, rows: "pa.Table") -> "pa.Table":
    """Return `rows` of `version`, with all their columns, as rows of today.

    Columns that are none of the table's (positions) stay behind them.
    """
    import duckdb
    import pyarrow as pa

    extra = [n for n in rows.column_names if n not in {c.name for c in table.all_columns}]
    columns = ", ".join([*column_expressions(table, version), *extra])
    with duckdb.connect(":memory:") as connection:
        connection.execute("set TimeZone = 'UTC'")
        connection.register("stored", rows)
        query = f"select {columns} from stored"  # noqa: S608 - names from `schemas`
        newer = connection.sql(query).to_arrow_table()
    return newer.cast(pa.schema([*table.arrow_schema, *map(rows.schema.field, extra)]))
