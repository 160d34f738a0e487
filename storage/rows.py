"""Rows as dicts, and rows as Arrow columns: checked on the way in, exact on the way out.

Invariant: what enters a segment has exactly the columns and types of `schemas`, no NaN, no infinity
and no NULL where the schema forbids it. The rows handed back are made from the stored columns, so a
caller sees what a reader will see (a log-prob, for one, is rounded to float32).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import RowError
from storage.identity import is_storable_text
from storage.schemas import INT, INTS, LONG, REAL, TEXT, TRUTH, Column, Table, TypeName

Row = Mapping[str, Any]

_PYTHON_TYPES: dict[TypeName, tuple[type, ...]] = {
    TEXT: (str,),
    INT: (int,),
    LONG: (int,),
    REAL: (float, int),
    TRUTH: (bool,),
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def to_arrow(table: Table, rows: Sequence[Row]) -> pa.Table:
    """Return `rows` as Arrow columns: the table's own, in order, without the common ones.

    Missing keys are NULL. Text that is not part of the place has each lone surrogate replaced by
    U+FFFD, because Parquet holds UTF-8.

    Raises:
        RowError: names table, column and row of the first value that does not fit.
    """
    known = {c.name for c in table.columns}
    for number, row in enumerate(rows):
        if not row.keys() <= known:
            raise RowError(
                f"row {number} of `{table.name}`: unknown columns "
                f"{', '.join(sorted(map(repr, row.keys() - known)))}; expected only "
                f"{', '.join(c.name for c in table.columns)} (the writer adds the common ones)"
            )
    columns = [_column_array(table, c, [row.get(c.name) for row in rows]) for c in table.columns]
    schema = pa.schema([c.arrow_field for c in table.columns])
    return pa.Table.from_arrays(columns, schema=schema)


def _column_array(table: Table, column: Column, values: list[Any]) -> pa.Array:
    where = f"`{table.name}.{column.name}`"
    if not column.nullable:
        for number, value in enumerate(values):
            if value is None:
                raise RowError(f"{where}, row {number}: expected {column.type}, came NULL")
    if column.is_list:
        array = _list_array(where, column, values)
    else:
        _check_types(where, column.type, values)
        if column.type == TEXT:
            values = _stored_text(where, column, values)
        array = _array(where, values, column.arrow_field.type)
    _check_finite(where, array)
    return array


def _check_types(where: str, name: TypeName, values: list[Any]) -> None:
    expected = _PYTHON_TYPES[name]
    for kind in set(map(type, values)) - {type(None)}:
        if not issubclass(kind, expected) or (kind is bool and bool not in expected):
            number = next(i for i, value in enumerate(values) if type(value) is kind)
            raise RowError(
                f"{where}, row {number}: expected {' or '.join(t.__name__ for t in expected)}, "
                f"came {values[number]!r} ({kind.__name__})"
            )


def _stored_text(where: str, column: Column, values: list[Any]) -> list[Any]:
    if all(value is None or is_storable_text(value) for value in values):
        return values
    if column.place:
        raise RowError(
            f"{where}: expected text with a UTF-8 form, came a lone surrogate; replace it before "
            "it becomes part of an identity"
        )
    return [value and _LONE_SURROGATE.sub("\ufffd", value) for value in values]


def _list_array(where: str, column: Column, values: Any) -> pa.Array:
    """Build a list column; integers are inferred first, because Arrow would cut 1.5 to 1."""
    if column.type == INTS:
        values = _array(where, values, None)
        item = getattr(values.type, "value_type", values.type)
        if not (pa.types.is_integer(item) or pa.types.is_null(item)):
            raise RowError(f"{where}: expected lists of int, came lists of {item}")
    array = _array(where, values, column.arrow_field.type)
    if array.values.null_count:
        raise RowError(f"{where}: expected a {column.type}, came one with None in it")
    return array


def _array(where: str, values: Any, arrow_type: pa.DataType | None) -> pa.Array:
    try:
        if isinstance(values, pa.Array):
            return values.cast(arrow_type)
        return pa.array(values, type=arrow_type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise RowError(f"{where}: expected {arrow_type or 'lists of int'}: {error}") from error


def _check_finite(where: str, array: pa.Array) -> None:
    flat = array.values if isinstance(array, pa.ListArray) else array
    if pa.types.is_floating(flat.type) and pc.all(pc.is_finite(flat)).as_py() is False:
        raise RowError(
            f"{where}: expected finite numbers, came NaN or an infinity; store NULL with the reason"
        )
