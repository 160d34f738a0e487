"""Which files an import stream has read already, and how far: known by content, not by path.

Invariant: a file is known up to the furthest place where the hash of all before it is one that an
`imports` row names. So a file that was moved is known, one that grew goes on where it ended, and
one that was changed is another file.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.importers.formats import Format, file_sha256, num_parquet_rows

_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Found:
    """What is known of a file: up to where (-1: nothing), the key of its groups, how many lines."""

    position: int = -1
    key: str | None = None
    num_lines: int = 0
    is_whole: bool = False


@dataclass(frozen=True)
class _End:
    key: str | None
    num_lines: int


class KnownFiles:
    """The ends of the parts of files that a stream has, by position and hash."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._ends: dict[int, dict[str, _End]] = {}
        for row in rows:
            key = f"{row['iteration']}/{row['number']}" if row["first_line"] == 1 else None
            self.add(row["position"], row["sha256"], key, row["num_lines"])

    def add(self, position: int, sha256: str, key: str | None, num_lines: int) -> None:
        """Remember that a part of a file ends at `position`, with the hash of all before it."""
        self._ends.setdefault(position, {})[sha256] = _End(key, num_lines)

    def find(self, format_: Format, path: Path) -> Found:
        """Return what is known of a file."""
        if not self._ends:
            return Found()
        return self._of_parquet(path) if format_.kind == "parquet" else self._of_lines(path)

    def _of_lines(self, path: Path) -> Found:
        size = path.stat().st_size
        found, sha256, done = Found(), hashlib.sha256(), 0
        with path.open("rb") as file:
            for position in sorted(p for p in self._ends if 0 < p <= size):
                while done < position:
                    chunk = file.read(min(_CHUNK_BYTES, position - done))
                    if not chunk:
                        return found
                    sha256.update(chunk)
                    done += len(chunk)
                end = self._ends[position].get(sha256.hexdigest())
                if end is not None:
                    found = _further(found, position, end, is_whole=position == size)
        return found

    def _of_parquet(self, path: Path) -> Found:
        sha256 = file_sha256(path)
        found, ends = Found(), {p: of[sha256] for p, of in self._ends.items() if sha256 in of}
        num_rows = num_parquet_rows(path) if ends else 0
        for position in sorted(ends):
            found = _further(found, position, ends[position], position >= num_rows)
        return found


def _further(found: Found, position: int, end: _End, is_whole: bool) -> Found:
    key, num_lines = found.key or end.key, found.num_lines + end.num_lines
    return Found(position, key, num_lines, is_whole)
