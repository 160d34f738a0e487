"""Who a row is: the id of its place and the hash of its facts.

Invariant: both are functions of the values alone, the same on every machine and for ever. Changing
anything here changes every id, so the golden values in the tests must never change.

    event_id       = prefix + first 128 bits of sha256([table, {place column: value, ...}])
    content_sha256 = first 128 bits of sha256({column: value, ...})

over canonical JSON: columns in the order of declaration, ASCII, no spaces, floats in the shortest
form that reads back as the same float64. Facts that are NULL are left out, so that a column added
later leaves the hash of older rows alone. A list enters as [type, length, sha256 of its
little-endian bytes].
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from storage.errors import RowError
from storage.schemas import INT, LONG, TABLES, TEXT, Column, Table

if TYPE_CHECKING:
    import pyarrow as pa

ID_HEX_DIGITS = 32  # 128 bits


def event_id(table_name: str, place: Mapping[str, Any]) -> str:
    """Return the id of the event at `place`; keys that are not place columns are ignored.

    Raises:
        RowError: unknown table, or a place column that is missing or has another type.
    """
    table = find_table(table_name)
    values = {c.name: _place_value(table, c, place) for c in table.columns if c.place}
    return _event_id(table, values)


def find_table(name: str) -> Table:
    """Return the table called `name`, or raise `RowError` naming those that exist."""
    if name not in TABLES:
        raise RowError(f"expected one of the tables {', '.join(TABLES)}; came `{name}`")
    return TABLES[name]


def identify(table: Table, rows: "pa.Table") -> tuple[list[str], list[str]]:
    """Return the event ids and the content hashes of `rows`, which have the table's own columns."""
    names = [c.name for c in table.columns if c.name in rows.column_names]
    columns = {name: _canonical_column(rows.column(name)) for name in names}
    places = _records(table.place_columns, columns)
    contents = _records(tuple(n for n in table.content_columns if n in columns), columns)
    ids = [_event_id(table, place) for place in places]
    hashes = [
        _short_sha256(_canonical_json({k: v for k, v in facts.items() if v is not None}))
        for facts in contents
    ]
    return ids, hashes


def is_storable_text(text: str) -> bool:
    """Tell whether `text` has a UTF-8 form; a lone surrogate has none."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _place_value(table: Table, column: Column, place: Mapping[str, Any]) -> Any:
    value = place.get(column.name)
    expected: type = {TEXT: str, INT: int, LONG: int}[column.type]
    if not isinstance(value, expected) or isinstance(value, bool):
        raise RowError(
            f"place column `{table.name}.{column.name}`: expected {expected.__name__}, "
            f"came {value!r} ({type(value).__name__})"
        )
    if isinstance(value, str) and not is_storable_text(value):
        raise RowError(
            f"place column `{table.name}.{column.name}`: expected text with a UTF-8 form, came "
            f"{value!r} with a lone surrogate; replace it before it becomes part of an identity"
        )
    return value


def _event_id(table: Table, place: Mapping[str, Any]) -> str:
    return table.prefix + _short_sha256(_canonical_json([table.name, place]))


def _short_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]


def _canonical_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _records(names: Sequence[str], columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(columns[name] for name in names), strict=True)
    ]


def _canonical_column(column: "pa.ChunkedArray") -> list[Any]:
    """Return the column's values as JSON can hold them: lists become their digest."""
    if not hasattr(column.type, "value_type"):
        values: list[Any] = column.to_pylist()
        return values
    return [digest for chunk in column.chunks for digest in _list_digests(chunk)]


def _list_digests(lists: "pa.ListArray") -> list[list[Any] | None]:
    kind = str(lists.type.value_type)
    flat = lists.values.to_numpy(zero_copy_only=False)
    data = memoryview(flat.astype(flat.dtype.newbyteorder("<"), copy=False))
    offsets = lists.offsets.to_pylist()
    return [
        [kind, stop - start, hashlib.sha256(data[start:stop]).hexdigest()] if valid else None
        for start, stop, valid in zip(
            offsets[:-1], offsets[1:], lists.is_valid().to_pylist(), strict=True
        )
    ]
