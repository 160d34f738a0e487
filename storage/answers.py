"""Rows as text for people and programs.

Invariant: text that came out of a model is shown, never interpreted: a terminal gets no control
character, a spreadsheet no formula.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from storage.errors import QueryError

if TYPE_CHECKING:
    import pyarrow as pa

Rows = Sequence[tuple[Any, ...]]

MAX_ANSWER_BYTES = 64 * 2**20
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")  # noqa: RUF001 - as Excel
_NUMBERS = (int, float, Decimal)
_PLAIN_BYTES = 8  # what a number or a NULL is counted as


def printable(text: str) -> str:
    """Return `text` with everything that a terminal might obey or hide spelled out as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return `text` as `printable` does, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def size_bytes(value: Any) -> int:
    """Return about how much text a value makes."""
    size, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str | bytes):
            size += len(part)
        elif isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
        size += _PLAIN_BYTES
    return size


def check_names_differ(columns: Sequence[str]) -> None:
    """Raise `QueryError` when two columns have the same name."""
    if len(set(columns)) != len(columns):
        raise QueryError(
            f"expected columns with different names, came {list(columns)}; rename some"
        )


def table_text(columns: Sequence[str], rows: Rows) -> str:
    """Return the rows under their column names, in columns, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    names = [printable(name) for name in columns]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    size = (sum(widths) + 2 * len(widths)) * len(rows)
    if size > MAX_ANSWER_BYTES:
        raise QueryError(
            f"expected a table of at most {MAX_ANSWER_BYTES} bytes, came {size} with the widest "
            "texts; use `--format csv`, or cut texts with left(text, 100)"
        )
    is_right = [any(isinstance(row[i], _NUMBERS) for row in rows[:1]) for i in range(len(columns))]
    lines = [names, ["-" * width for width in widths], *cells]
    text = "".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_right, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )
    return f"{text}({len(rows)} row{'' if len(rows) == 1 else 's'})\n"


def csv_text(columns: Sequence[str], rows: Rows) -> str:
    """Return CSV (RFC 4180) with a header.

    Text that would start a formula gets a `'` in front; control and invisible characters except
    line breaks and tabs are spelled out, as in a table.
    """
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\r\n")
    writer.writerow(map(_csv_cell, columns))
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return target.getvalue()


def json_text(columns: Sequence[str], rows: Rows) -> str:
    """Return a JSON list with one object a row; NaN and infinities become text."""
    check_names_differ(columns)
    objects = [dict(zip(columns, map(_json_value, row), strict=True)) for row in rows]
    return json.dumps(objects, indent=1) + "\n"


def parquet_bytes(rows: "pa.Table") -> bytes:
    """Return the Parquet form of rows, with their types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(rows, sink, compression="zstd")
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise QueryError(
            f"Parquet cannot hold a column of the answer ({error}); cast it, e.g. to varchar"
        ) from error
    data: bytes = sink.getvalue().to_pybytes()
    return data


FORMATS: dict[str, Callable[[Sequence[str], Rows], str]] = {
    "table": table_text,
    "csv": csv_text,
    "json": json_text,
}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return printable(f"{value:.6g}" if isinstance(value, float) else str(value))


def _csv_cell(value: Any) -> Any:
    if value is None or isinstance(value, _NUMBERS):
        return value
    text = str(value)
    if not text.isprintable():
        text = "".join(c if c in "\t\r\n" else printable(c) for c in text)
    return f"'{text}" if text.lstrip(" \n").startswith(_FORMULA_STARTS) else text


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    return value.isoformat() if isinstance(value, date) else str(value)
