"""Files written by tests, imported in this process."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import storage
from flows.importing import ImportRequest, ImportSummary, import_rollouts
from flows.progress import Progress

Row = dict[str, Any]


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write JSON lines; texts and bytes as they are."""
    with path.open("wb") as file:
        for line in lines:
            if not isinstance(line, str | bytes):
                line = json.dumps(line)
            file.write((line.encode() if isinstance(line, str) else line) + b"\n")
    return path


def import_here(store: storage.Store, format_: str, path: Path, **facts: Any) -> ImportSummary:
    with Progress(quiet=True) as progress:
        return import_rollouts(store, ImportRequest(format_, path, **facts), progress)


def ask(store: storage.Store, query: str) -> list[tuple[Any, ...]]:
    return store.sql(query).fetchall()


def verl_line(n: int, **facts: Any) -> Row:
    """A line of verl: four to a prompt, eight to a step."""
    return {
        "input": f"user\nWhat is {n // 4} + 1?\nassistant\n", "output": f"#### {n}",
        "score": float(n % 2), "step": n // 8,
    } | facts  # fmt: skip
