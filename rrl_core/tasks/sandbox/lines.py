"""Reads what a child sends, one JSON list a line, with a limit of time and of size."""

import json
import os
import select
import time
from typing import Any, Literal

READ_BYTES = 1 << 16

Ending = Literal["complete", "ended", "timeout", "output"]


class LineReader:
    """The lines that come from a pipe, read no further than they are needed."""

    def __init__(self, pipe: int, max_bytes: int) -> None:
        self.found: list[list[Any]] = []
        self._pipe = pipe
        self._left_bytes = max_bytes
        self._rest = bytearray()
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def read(self, num_lines: int, limit_s: float) -> Ending:
        """Read until `found` holds `num_lines` lines.

        Returns:
            "complete", or what came first: "ended" (the pipe was closed, or what came is no line of
            ours), "timeout" after `limit_s` seconds, or "output" after `max_bytes` bytes in all.
        """
        deadline = time.monotonic() + limit_s
        start = 0  # no line ends before here
        while len(self.found) < num_lines:
            end = self._rest.find(b"\n", start)
            if end >= 0:
                line = _parsed(bytes(self._rest[:end]))
                if line is None:
                    return "ended"
                self.found.append(line)
                del self._rest[: end + 1]
                start = 0
                continue
            start = len(self._rest)
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                return "timeout"
            data = os.read(self._pipe, min(READ_BYTES, self._left_bytes + 1))
            self._left_bytes -= len(data)
            if not data:
                return "ended"
            if self._left_bytes < 0:
                return "output"
            self._rest += data
        return "complete"


def _parsed(line: bytes) -> list[Any] | None:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, list) and len(parsed) == 2 else None
