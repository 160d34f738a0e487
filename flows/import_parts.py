"""The parts of an import as they are committed: read, grouped, and made into rows.

Light, and without a store: a process of its own may do it (`flows.import_child`).
"""

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rrl_core.tasks.protocol import make_prompt_id
from storage.identity import find_table
from storage.importers.formats import FORMATS, FileReader
from storage.importers.known import KnownFiles
from storage.importers.parts import Cutter, Part, Source
from storage.importers.rows import Declared, Place, main_scorer, part_rows, problem_text
from storage.importers.samples import Sample
from storage.rows import Columns, to_arrow


@dataclass
class Reading:
    """How far the files of a stream were read, and which part is made next."""

    format: str
    run_id: str
    declared: Declared
    known: KnownFiles
    next_iteration: int
    looked_at: dict[Path, tuple[int, int]] = field(default_factory=dict)  # size and time


@dataclass(frozen=True)
class MadePart:
    """A part as it is committed; `scorer` is the name of its first reward column."""

    place: Place
    rows: dict[str, list[dict[str, Any]] | pa.Table]
    num_samples: int
    scorer: str | None
    paths: frozenset[Path]
    problems: list[str]


@dataclass(frozen=True)
class Looked:
    """A file was found to have lines that are known, or all of its bytes were read."""

    num_lines_before: int = 0
    size_bytes: int = 0


def made_parts(
    reading: Reading,
    files: Sequence[Path],
    with_open_line: bool = True,
    amend: Callable[[Sample], None] | None = None,
) -> Generator[MadePart | Looked, None, None]:
    """Yield what is new in files, part by part, and how far they were looked at.

    `reading` goes along. `with_open_line` takes last lines without a newline for whole; `amend` may
    fill in what a sample lacks.
    """
    format_ = FORMATS[reading.format]
    cutter = Cutter(partial(_prompt_id, reading.declared))
    for path in files:
        stat = path.stat()
        if reading.looked_at.get(path) == (stat.st_size, stat.st_mtime_ns):
            continue
        reading.looked_at[path] = stat.st_size, stat.st_mtime_ns
        if cutter.is_full:
            yield _made(reading, cutter.rest())
        found = reading.known.find(format_, path)
        yield Looked(num_lines_before=found.num_lines)
        if not found.is_whole:
            key = found.key or f"{reading.next_iteration}/{cutter.num_slices}"
            source = Source(FileReader(format_, path, amend), key, found.position)
            for part in cutter.cut(source, with_open_line):
                yield _made(reading, part)
            reading.known.add(source.position, source.sha256, key, 0)
        yield Looked(size_bytes=stat.st_size)
    if cutter.num_slices:
        yield _made(reading, cutter.rest())


def _made(reading: Reading, part: Part) -> MadePart:
    """Return the next part of the stream, its large tables in Arrow."""
    place = Place(reading.run_id, reading.next_iteration)
    reading.next_iteration += 1
    rows = {
        name: to_arrow(find_table(name), found, reading.run_id)
        if isinstance(found, Columns)
        else found
        for name, found in part_rows(part, place, reading.declared).items()
    }
    paths = frozenset(piece.path for piece in part.slices)
    problems = [problem_text(p, kind) for p in part.slices for kind in sorted(p.problems)]
    return MadePart(place, rows, part.num_samples, main_scorer(part), paths, problems)


def _prompt_id(declared: Declared, sample: Sample) -> str:
    """Return the id of a sample's prompt, the one that our own tasks give it."""
    messages = sample.messages
    if not messages and sample.turns:
        digest = hashlib.sha256(json.dumps(sample.turns[0].prompt_ids).encode()).hexdigest()
        messages = [{"role": "token_ids", "content": digest}]
    return make_prompt_id(declared.task, declared.split, messages, sample.answer)
