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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from storage.errors import RowError
from storage.schemas import INT, LONG, REAL, TABLES, TEXT, TRUTH, Column, Table

if TYPE_CHECKING:
    import pyarrow as pa

ID_HEX_DIGITS = 32  # 128 bits
_LONG_TEXT_BYTES = 100  # such texts are hardly ever the same
_FEW_ROWS = 128


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
    """Return the event ids and the content hashes of `rows`, which have the table's own columns.

    Each column is written as JSON once per value it has, each row is joined from these pieces: a
    few times as quick as writing each row as JSON, and the same to the byte.
    """
    columns = [c for c in table.columns if c.name in rows.column_names]
    contents = [c for c in columns if c.name in table.content_columns]
    places = [c for c in columns if c.place]
    opening = f"[{_text_json(table.name)},{{"
    ids = _short_hashes(_joined(opening, places, rows, "}]"), table.prefix)
    return ids, _short_hashes(_joined("{", contents, rows, "}"))


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


def _short_hashes(texts: list[str], prefix: str = "") -> list[str]:
    sha256, end = hashlib.sha256, ID_HEX_DIGITS
    different = set(texts)
    if len(different) < len(texts) // 2:
        known = {text: prefix + _short_sha256(text) for text in different}
        return [known[text] for text in texts]
    return [prefix + sha256(text.encode()).hexdigest()[:end] for text in texts]


def _joined(opening: str, columns: Sequence[Column], rows: "pa.Table", closing: str) -> list[str]:
    """Return the JSON of `columns` between `opening` and `closing`, row by row.

    The first column must have a value in every row: it is the one without a comma before it.
    """
    assert not columns[0].nullable, columns[0]
    parts: list[Iterable[str]] = []
    fixed = opening
    for number, column in enumerate(columns):
        key = f"{',' if number else ''}{_text_json(column.name)}:"
        pieces = _pieces(key, column, rows.column(column.name))
        if isinstance(pieces, str):
            fixed += pieces
        else:
            parts += [repeat(fixed), pieces]
            fixed = ""
    parts.append(repeat(fixed + closing, len(rows)))
    return list(map("".join, zip(*parts, strict=False)))


def _pieces(key: str, column: Column, values: "pa.ChunkedArray") -> list[str] | str:
    """Return key and JSON of every value, nothing for a NULL; one text when all are the same."""
    whole = values.combine_chunks()
    if column.is_list:
        return [key + digest if digest else "" for digest in _list_digests(whole)]
    to_json = _TO_JSON[column.type]
    is_long = column.type == TEXT and whole.nbytes > _LONG_TEXT_BYTES * len(whole)
    if is_long or len(whole) <= _FEW_ROWS:  # looking for equal values would cost more
        return ["" if v is None else key + to_json(v) for v in whole.to_pylist()]
    different, numbers = _dictionary(whole)
    pieces = ["" if value is None else key + to_json(value) for value in different]
    return pieces[0] if len(pieces) == 1 else [pieces[number] for number in numbers]


def _dictionary(values: "pa.Array") -> tuple[list[Any], list[int]]:
    """Return the different values, and for each value its number among them."""
    import numpy as np
    import pyarrow as pa

    if not pa.types.is_floating(values.type):
        coded = values.dictionary_encode(null_encoding="encode")
        return coded.dictionary.to_pylist(), coded.indices.to_numpy().tolist()
    # By their bits: 0.0 and -0.0 are equal, but two facts. NULL is NaN, which no row may hold.
    bits = values.to_numpy(zero_copy_only=False).view(np.int64)
    different, numbers = np.unique(bits, return_inverse=True)
    floats = different.view(np.float64).tolist()
    return [None if value != value else value for value in floats], numbers.tolist()


def _list_digests(lists: "pa.ListArray") -> list[str]:
    """Return [type, length, sha256 of the little-endian bytes] as JSON; nothing for NULL."""
    kind = str(lists.type.value_type)
    flat = lists.values.to_numpy(zero_copy_only=False)
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes()
    width = flat.dtype.itemsize
    sha256, offsets = hashlib.sha256, lists.offsets.to_numpy().tolist()
    return [
        f'["{kind}",{stop - start},"{sha256(data[start * width : stop * width]).hexdigest()}"]'
        if valid
        else ""
        for start, stop, valid in zip(
            offsets[:-1], offsets[1:], lists.is_valid().to_pylist(), strict=True
        )
    ]


_text_json = json.encoder.encode_basestring_ascii
_TO_JSON: dict[str, Callable[[Any], str]] = {
    TEXT: _text_json,
    INT: int.__repr__,
    LONG: int.__repr__,
    REAL: float.__repr__,
    TRUTH: lambda value: "true" if value else "false",
}
