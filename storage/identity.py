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
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from storage.errors import RowError
from storage.schemas import INT, LONG, REAL, TABLES, TEXT, Column, Table

if TYPE_CHECKING:
    import pyarrow as pa

ID_HEX_DIGITS = 32  # 128 bits
_FEW = 128


def event_id(table_name: str, place: Mapping[str, Any]) -> str:
    """Return the id of the event at `place`; keys that are not place columns are ignored.

    Raises:
        RowError: unknown table, or a place column that is missing or has another type.
    """
    table = find_table(table_name)
    values = {c.name: _place_value(table, c, place) for c in table.columns if c.place}
    return _event_id(table, values)


def event_ids(table: Table, rows: "pa.Table") -> list[str]:
    """Return the ids of the events at many places, as `event_id` does, a few times as quick.

    `rows` has the place columns of the table, of the types they are stored with.
    """
    places = [(c, rows.column(c.name)) for c in table.columns if c.place]
    ids = _hashes(_joined(f"[{_text_json(table.name)},{{", places, "}]"), ID_HEX_DIGITS)
    return [table.prefix + i for i in ids]


def find_table(name: str) -> Table:
    """Return the table called `name`, or raise `RowError` naming those that exist."""
    if name not in TABLES:
        raise RowError(f"expected one of the tables {', '.join(TABLES)}; came `{name}`")
    return TABLES[name]


def identify(table: Table, rows: "pa.Table") -> tuple[list[str], list[str]]:
    """Return the event ids and the content hashes of `rows`, which have the table's own columns.

    Arrow joins the JSON of all rows from their columns, a few times as quick as writing each row as
    JSON, and the same to the byte.
    """
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    facts = columns.keys() & table.content_columns
    contents = [(c, columns[c.name]) for c in table.columns if c.name in facts]
    return event_ids(table, rows), _hashes(_joined("{", contents, "}"), ID_HEX_DIGITS)


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


def _hashes(texts: Sequence[bytes], num_digits: int) -> list[str]:
    """Return the hash of each text; of equal ones once, when there seem to be many."""
    sha256, some = hashlib.sha256, texts[:_FEW]
    if len(set(some)) > len(some) // 2:
        return [sha256(text).hexdigest()[:num_digits] for text in texts]
    known = {text: sha256(text).hexdigest()[:num_digits] for text in set(texts)}
    return [known[text] for text in texts]


def _joined(
    opening: str, columns: Sequence[tuple[Column, "pa.ChunkedArray"]], closing: str
) -> list[bytes]:
    """Return the JSON of `columns` between `opening` and `closing`, row by row.

    The first column must have a value in every row: it is the one without a comma before it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    assert not columns[0][0].nullable, columns[0]
    parts: list[Any] = [opening]  # texts that all rows have, and arrays with a text for each
    for number, (column, chunks) in enumerate(columns):
        key = f"{',' if number else ''}{_text_json(column.name)}:"
        values = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()  # no copy
        if 0 < len(values) == values.null_count:
            continue
        pieces = _pieces(key, column, values)
        parts += [pc.binary_join_element_wise(*pieces, "")] if values.null_count else pieces
    joined = pc.binary_join_element_wise(
        *_fewer([*parts, closing]), "", null_handling="replace", null_replacement=""
    )
    if isinstance(joined, pa.Scalar):
        return [joined.as_py().encode()] * len(columns[0][1])
    texts: list[bytes] = joined.cast(pa.binary()).to_pylist()
    return texts


def _fewer(parts: Sequence[Any]) -> list[Any]:
    """Put texts that follow each other together."""
    joined: list[Any] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _pieces(key: str, column: Column, values: "pa.Array") -> list[Any]:
    """Return what key and JSON of the values are joined from; arrays are NULL where `values` are.

    Texts stand for all rows, arrays have a text for each.
    """
    import pyarrow as pa

    if column.is_list:
        return [key, *_list_pieces(values)]
    # Of few rows, most columns have one value. 0.0 and -0.0 are equal, but two facts.
    if len(values) <= _FEW and column.type != REAL:
        different = set(values.to_pylist())
        if len(different) == 1:
            return [key + _canonical_json(different.pop())]
    if column.type == TEXT:
        return [key + '"', _escaped(values), '"']
    if column.type == REAL:
        return [key, _float_texts(values)]
    return [key, values.cast(pa.string())]


def _float_texts(values: "pa.Array") -> "pa.Array":
    """Return Python's form of floats; Arrow has another."""
    import pyarrow as pa

    bits = values.view(pa.int64()).dictionary_encode()  # 0.0 and -0.0 are equal, but two facts
    texts = map(float.__repr__, bits.dictionary.view(pa.float64()).to_pylist())
    return pa.array(texts, pa.string()).take(bits.indices)


def _escaped(texts: "pa.Array") -> "pa.Array":
    """Return texts as JSON has them between its quotes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    used = set(map(chr, set(bytes(texts.buffers()[2] or b"").translate(None, _PLAIN))))
    escaped = texts
    for character in filter(used.__contains__, _ESCAPES):
        escaped = pc.replace_substring(escaped, character, _ESCAPES[character])
    if used <= _ESCAPES.keys():
        return escaped
    is_rare = pc.match_substring_regex(texts, _RARE)
    rare = [_text_json(text)[1:-1] for text in texts.filter(is_rare).to_pylist()]
    return pc.replace_with_mask(escaped, is_rare, pa.array(rare, pa.string()))


def _list_pieces(lists: "pa.ListArray") -> list[Any]:
    """Return what [type, length, sha256 of the little-endian bytes] is joined from."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = lists.values.to_numpy(zero_copy_only=False)
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes()
    bounds = (lists.offsets.to_numpy() * flat.dtype.itemsize).tolist()
    digests = _hashes([data[start:stop] for start, stop in pairwise(bounds)], 64)
    lengths = pc.list_value_length(lists).cast(pa.string())
    return [f'["{lists.type.value_type}",', lengths, ',"', pa.array(digests, pa.string()), '"]']


_text_json = json.encoder.encode_basestring_ascii
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = bytes(sorted(set(range(0x20, 0x7F)) - {0x22, 0x5C}))  # JSON has them as they are
_RARE = "[^\n\r\t -~]"  # what a text may hold that Python's own function has to escape
