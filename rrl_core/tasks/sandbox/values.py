"""Whether what a child sent is the value that was expected: by kind and by content.

Numbers are one kind: 6 and 6.0 are the same, as they are for Python's `==`; a boolean is no number
and a tuple no list. The comparison is led by the expected value: it goes no deeper than that, and
what is many times as long is not looked at, so that no set of colliding numbers can occupy the
parent.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from rrl_core.tasks.sandbox.child import decode, encode


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be off: |actual - expected| <= max(absolute, relative * |larger|)."""

    absolute: float = 0.0
    relative: float = 0.0


EXACT = Tolerance()
MAX_GROWTH = 10  # the same number may be written as 6 or as 6.000000000000001


def matches(sent: object, expected: object, tolerance: Tolerance = EXACT) -> bool:
    """Return whether `sent`, as `child.encode` would give it, is the value `expected`."""
    try:
        if len(json.dumps(sent)) > 100 + MAX_GROWTH * len(json.dumps(encode(expected))):
            return False
        return _matches(sent, expected, tolerance)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False  # no value at all, or none that can be compared with this one


def _matches(sent: Any, expected: Any, tolerance: Tolerance) -> bool:
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(sent) is type(expected) and bool(sent == expected)
    if isinstance(expected, int | float):
        return _is_number(sent) and _is_close(decode(sent), expected, tolerance)
    if isinstance(expected, list):
        return isinstance(sent, list) and _all_match(sent, expected, tolerance)
    kind = type(expected).__name__
    if not (isinstance(sent, dict) and sent.keys() == {kind}):
        return False
    content = sent[kind]
    if kind == "tuple":
        return _all_match(content, expected, tolerance)
    if kind == "dict":
        return len(content) == len(expected) and _pairs_match(content, expected, tolerance)
    if kind in ("set", "frozenset"):
        return len(content) == len(expected) and _kinds(decode(sent)) == _kinds(expected)
    return bool(decode(sent) == expected)


def _all_match(sent: Any, expected: Any, tolerance: Tolerance) -> bool:
    return len(sent) == len(expected) and all(
        _matches(item, wanted, tolerance) for item, wanted in zip(sent, expected, strict=True)
    )


def _pairs_match(sent: Any, expected: dict[Any, Any], tolerance: Tolerance) -> bool:
    wanted = {(isinstance(key, bool), key): item for key, item in expected.items()}
    keys = [decode(key) for key, _ in sent]
    given = {(isinstance(key, bool), key): item for key, (_, item) in zip(keys, sent, strict=True)}
    return given.keys() == wanted.keys() and all(
        _matches(given[key], item, tolerance) for key, item in wanted.items()
    )


def _kinds(items: Any) -> set[tuple[bool, Any]]:
    return {(isinstance(item, bool), item) for item in items}


def _is_number(sent: Any) -> bool:
    if isinstance(sent, dict):
        return sent.keys() in ({"int"}, {"float"})
    return isinstance(sent, int | float) and not isinstance(sent, bool)


def _is_close(number: Any, expected: Any, tolerance: Tolerance) -> bool:
    if number == expected or (math.isnan(number) and math.isnan(expected)):
        return True
    if tolerance == EXACT or not (math.isfinite(number) and math.isfinite(expected)):
        return False
    allowed = tolerance.relative * max(abs(number), abs(expected))
    return bool(abs(number - expected) <= max(tolerance.absolute, allowed))
