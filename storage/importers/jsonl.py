"""Lines of a JSONL file, one at a time, however hostile.

Invariant: only the newline character ends a line (U+2028 and its like may stand inside one); a line
that is no record costs itself and nothing else; at most `MAX_LINE_BYTES` of the file are in memory.
"""

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from storage.importers.samples import RecordError

MAX_LINE_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20


@dataclass(slots=True)
class Line:
    """One line: its number from 1, its bytes, and where its content and it end in the file.

    `raw` is None where the line is longer than `MAX_LINE_BYTES`. A last line without a newline is
    not `is_ended`.
    """

    number: int
    raw: bytes | None
    content_end: int
    end: int
    is_ended: bool


class Reader:
    """The lines of a file, and the hash of what was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = self._all = hashlib.sha256()
        self._unhashed: list[bytes] = []  # lines: many at a time are hashed more quickly

    def sha256(self, with_last: bool = True) -> str:
        """Return the hash of all bytes up to the end of the last line yielded, or its beginning."""
        self._hash()
        return (self._all if with_last else self._before).hexdigest()

    def __iter__(self) -> Iterator[Line]:
        number = end = hashed = 0
        with self._path.open("rb", _CHUNK_BYTES) as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                self._unhashed.append(raw)
                size, is_ended = len(raw), raw.endswith(b"\n")
                kept = raw if size <= MAX_LINE_BYTES else None
                if kept is None:
                    size, is_ended = self._skip(file, raw)
                end += size
                yield Line(number, kept, end - is_ended, end, is_ended)
                if end - hashed > _CHUNK_BYTES:
                    self._hash()
                    hashed = end

    def _skip(self, file: BinaryIO, raw: bytes) -> tuple[int, bool]:
        """Hash a line of which `raw` is the beginning; return its size and if a newline ends it."""
        self._hash()
        size = len(raw)
        while raw and not raw.endswith(b"\n"):
            raw = file.readline(_CHUNK_BYTES)
            self._all.update(raw)
            size += len(raw)
        return size, raw.endswith(b"\n")

    def _hash(self) -> None:
        """Hash the lines that wait for it, the last by itself."""
        if self._unhashed:
            *earlier, last = self._unhashed
            self._all.update(b"".join(earlier))
            self._before = self._all.copy()
            self._all.update(last)
            self._unhashed.clear()


def decoded(line: Line) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for a blank one.

    NaN and infinities are taken as they are: what holds one says so where it is used.

    Raises:
        RecordError: it is no JSON object in UTF-8, names a key twice, or is too long.
    """
    if line.raw is None:
        raise RecordError("too_long", f"expected a line of at most {MAX_LINE_BYTES // 2**20} MiB")
    raw = line.raw.removeprefix(codecs.BOM_UTF8) if line.number == 1 else line.raw
    if raw.isspace() or not raw:
        return None
    try:
        record = _decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError("not_utf8", f"expected UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise RecordError("not_json", "expected a JSON object, came one nested too deep") from error
    except ValueError as error:
        if isinstance(error, RecordError):
            raise
        kind = "not_json" if line.is_ended else "cut"
        raise RecordError(kind, f"expected a JSON object: {error}") from error
    if not isinstance(record, dict):
        raise RecordError("not_json", f"expected a JSON object, came {type(record).__name__}")
    return record


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError("repeated_key", f"expected each key once, came {twice!r} again")
    return record


def _decode(text: str) -> Any:
    """Return the value of a JSON text; where nothing but a newline is around it, more quickly."""
    if text.startswith("{"):
        value, end = _decoder.raw_decode(text)
        if text[end:] in ("", "\n"):
            return value
    return _decoder.decode(text)


_decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)
