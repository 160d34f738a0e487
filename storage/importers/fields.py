"""Single fields of a record: what they must be, and what is taken for the same."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from storage.importers.samples import RecordError

_INT32 = 2**31


def text(record: Mapping[str, Any], name: str) -> str:
    """Return a field that has to be text."""
    value = record.get(name)
    if not isinstance(value, str):
        raise RecordError("unexpected", f"expected `{name}` as text, came {_came(record, name)}")
    return value


def whole(value: Any) -> int | None:
    """Return a number that fits 32 bits and is not below zero; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INT32:
        return None
    return value


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else, truth values too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def answer(value: Any) -> str | None:
    """Return a reference answer as text; None for none."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if isinstance(value, str):
        return value or None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None


def numeric_columns(record: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields beside the known ones that hold a number or a truth value."""
    return {
        name: value
        for name, value in record.items()
        if name not in known and isinstance(value, int | float)
    }


def only(value: Any) -> Any:
    """Return the element of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def stop_or_length(reason: Any) -> str | None:
    """Return `stop` or `length` for the names frameworks give them; None for others."""
    if reason in ("stop", "eos", "eos_token", "stop_sequence"):
        return "stop"
    return "length" if reason in ("length", "max_tokens", "max_output_tokens") else None


def _came(record: Mapping[str, Any], name: str) -> str:
    if name in record:
        return type(record[name]).__name__
    keys = ", ".join(sorted(map(repr, record))[:12])
    return f"none; the record has {keys or 'no keys'}"
