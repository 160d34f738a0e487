"""Rows as dicts, by column or in Arrow: checked on the way in, exact on the way out.

Invariant: what enters a segment has exactly the columns and types of `schemas`, no NaN, no infinity
and no NULL where the schema forbids it. The rows handed back are made from the stored columns, so a
caller sees what a reader will see (a log-prob, for one, is rounded to float32).
"""

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import RowError
from storage.schemas import INT, INTS, LONG, REAL, TEXT, TRUTH, Column, Table, TypeName

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """Rows by column: `values` has lists that run along them, `same` what all of them have.

    Who looks at single rows gets dicts.
    """

    values: Mapping[str, list[Any]]
    same: Row

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in zip(*self.values.values(), strict=True):
            yield {**self.same, **dict(zip(self.values, row, strict=True))}


Rows: TypeAlias = Sequence[Row] | Columns | pa.Table

_PYTHON_TYPES: dict[TypeName, tuple[type, ...]] = {
    TEXT: (str,),
    INT: (int,),
    LONG: (int,),
    REAL: (float, int),
    TRUTH: (bool,),
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def to_arrow(table: Table, rows: Rows, run_id: str | None = None) -> pa.Table:
    """Return `rows` as Arrow columns: the table's own, in order, without the common ones.

    Missing keys are NULL. Text that is not part of the place has each lone surrogate replaced by
    U+FFFD, because Parquet holds UTF-8. What is in Arrow already is checked all the same.

    Args:
        table: whose rows.
        rows: with keys that are columns of the table; in Arrow, of the types it stores.
        run_id: value of the column `run_id` in every row; None: the rows have it.

    Raises:
        RowError: names table, column and row of the first value that does not fit.
    """
    given, same = _columns(table, rows)
    if run_id is not None:
        given.pop("run_id", None)
        same["run_id"] = run_id
    columns = [
        _column_array(table, c, given[c.name])
        if c.name in given
        else _same_array(table, c, same.get(c.name), len(rows))
        for c in table.columns
    ]
    schema = pa.schema([c.arrow_field for c in table.columns])
    return pa.Table.from_arrays(columns, schema=schema)


def _columns(table: Table, rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values by column, for those that any row has; and what all rows have."""
    if isinstance(rows, pa.Table):
        _check_names(table, rows.column_names, "Arrow table")
        if twice := [name for name, n in Counter(rows.column_names).items() if n > 1]:
            raise RowError(
                f"Arrow table of `{table.name}`: expected each column once, came two columns "
                f"`{twice[0]}`"
            )
        return dict(zip(rows.column_names, rows.columns, strict=True)), {}
    if isinstance(rows, Columns):
        _check_names(table, rows.values.keys() | rows.same.keys(), "columns")
        (first, num_rows), *others = ((name, len(v)) for name, v in rows.values.items())
        if unequal := [(name, n) for name, n in others if n != num_rows]:
            raise RowError(
                f"columns of `{table.name}`: expected them equally long; `{first}` has {num_rows} "
                f"rows, `{unequal[0][0]}` {unequal[0][1]}"
            )
        return dict(rows.values), dict(rows.same)
    known = {c.name for c in table.columns}
    names = set(rows[0]) if rows else set()
    if names <= known and {len(row) for row in rows} <= {len(names)}:
        with suppress(KeyError):  # a row has another key: looked at below
            return {name: [row[name] for row in rows] for name in names}, {}
    for number, row in enumerate(rows):
        _check_names(table, row, f"row {number}")
    return {name: [row.get(name) for row in rows] for name in known}, {}


def _check_names(table: Table, names: Collection[str], what: str) -> None:
    known = [c.name for c in table.columns]
    if unknown := sorted(repr(name) for name in names if name not in known):
        raise RowError(
            f"{what} of `{table.name}`: unknown columns {', '.join(unknown)}; expected only "
            f"{', '.join(known)} (the writer adds the common ones)"
        )


def _same_array(table: Table, column: Column, value: Any, num_rows: int) -> pa.Array:
    """Return a column with the same value in every row."""
    if not num_rows:
        return pa.array([], column.arrow_field.type)
    return pa.repeat(_column_array(table, column, [value])[0], num_rows)


def _column_array(table: Table, column: Column, values: list[Any] | pa.ChunkedArray) -> pa.Array:
    where = f"`{table.name}.{column.name}`"
    if isinstance(values, pa.ChunkedArray):
        return _checked_array(where, column, values)
    kinds = set(map(type, values))
    if not column.nullable and type(None) in kinds:
        number = next(n for n, value in enumerate(values) if value is None)
        raise RowError(f"{where}, row {number}: expected {column.type}, came NULL")
    if column.is_list:
        array = _list_array(where, column, values, kinds)
    else:
        _check_types(where, column.type, values, kinds)
        array = _plain_array(where, column, values, kinds)
    _check_finite(where, array)
    return array


def _checked_array(where: str, column: Column, values: pa.ChunkedArray) -> pa.Array:
    """Return a column that came in Arrow, if it holds what one made of Python's values would."""
    if values.type != column.arrow_field.type:
        raise RowError(f"{where}: expected {column.arrow_field.type}, came {values.type}")
    array = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise RowError(f"{where}: expected {column.type}: {error}") from error
    if array.null_count and not column.nullable:
        number = pc.index(array.is_null(), True).as_py()
        raise RowError(f"{where}, row {number}: expected {column.type}, came NULL")
    if column.is_list and array.flatten().null_count:
        raise RowError(f"{where}: expected a {column.type}, came one with None in it")
    _check_finite(where, array)
    return array


def _check_types(where: str, name: TypeName, values: list[Any], kinds: set[type]) -> None:
    expected = _PYTHON_TYPES[name]
    for kind in kinds - {type(None)}:
        if not issubclass(kind, expected) or (kind is bool and bool not in expected):
            number = next(i for i, value in enumerate(values) if type(value) is kind)
            raise RowError(
                f"{where}, row {number}: expected {' or '.join(t.__name__ for t in expected)}, "
                f"came {values[number]!r} ({kind.__name__})"
            )


def _plain_array(where: str, column: Column, values: list[Any], kinds: set[type]) -> pa.Array:
    arrow_type = column.arrow_field.type
    first = values[0] if values else None
    if kinds in ({str}, {int}) and first == values[-1] and values.count(first) == len(values):
        [value] = _array(where, values[:1], arrow_type, column)
        return pa.repeat(value, len(values))
    return _array(where, values, arrow_type, column)


def _array(where: str, values: Any, arrow_type: pa.DataType, column: Column) -> pa.Array:
    try:
        return pa.array(values, type=arrow_type)
    except UnicodeEncodeError as error:
        if column.place:
            raise RowError(
                f"{where}: expected text with a UTF-8 form, came a lone surrogate; replace it "
                "before it becomes part of an identity"
            ) from error
        whole = [value and _LONE_SURROGATE.sub("\ufffd", value) for value in values]
        return pa.array(whole, type=arrow_type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise RowError(f"{where}: expected {column.type}: {error}") from error


def _list_array(where: str, column: Column, values: list[Any], kinds: set[type]) -> pa.Array:
    if kinds == {list} and (array := _flat_lists(column, values)) is not None:
        return array
    inferred: Any = values
    try:
        if column.type == INTS:  # inferred first, because Arrow would cut 1.5 to 1
            inferred = pa.array(values)
            item = getattr(inferred.type, "value_type", inferred.type)
            if not (pa.types.is_integer(item) or pa.types.is_null(item)):
                raise RowError(f"{where}: expected lists of int, came lists of {item}")
            array = inferred.cast(column.arrow_field.type)
        else:
            array = pa.array(values, type=column.arrow_field.type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise RowError(f"{where}: expected a {column.type}: {error}") from error
    if array.values.null_count:
        raise RowError(f"{where}: expected a {column.type}, came one with None in it")
    return array


def _flat_lists(column: Column, values: list[Any]) -> pa.Array | None:
    """Build a column of Python lists at thrice Arrow's speed; None when a number does not fit."""
    flat = array("I" if column.type == INTS else "f")  # "i" takes three times as long as "I"
    try:
        for numbers in values:
            flat.fromlist(numbers)
    except (TypeError, OverflowError):
        return None
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    items = np.frombuffer(flat, np.int32 if column.type == INTS else np.float32)
    if column.type == INTS:
        if len(items) and items.min() < 0:  # 2**31 or more
            return None
        # `array` takes True for 1; only rows that have a 1 or 0 may hold one
        small = np.flatnonzero(items < 2)
        numbers = np.unique(np.searchsorted(offsets, small, side="right") - 1).tolist()
        if any(bool in map(type, values[number]) for number in numbers):
            return None
    return pa.ListArray.from_arrays(offsets, items, type=column.arrow_field.type)


def _check_finite(where: str, array: pa.Array) -> None:
    flat = array.flatten() if isinstance(array, pa.ListArray) else array
    if pa.types.is_floating(flat.type) and pc.all(pc.is_finite(flat)).as_py() is False:
        raise RowError(
            f"{where}: expected finite numbers, came NaN or an infinity; store NULL with the reason"
        )
