"""The formats by name: in which files each is found, and what reads a record of it."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from storage.errors import StorageError
from storage.importers import (
    areal,
    jsonl,
    nemo_gym,
    nemo_rl,
    open_instruct,
    prime_rl,
    skyrl,
    trl,
    verifiers,
    verl,
)
from storage.importers.samples import RecordError, Sample


class ImporterError(StorageError):
    """There is nothing that could be imported; the message says what was looked for."""


@dataclass(frozen=True)
class Format:
    """A format: `pattern` is what the files in a folder are named, a step in it as its group."""

    name: str
    samples: Callable[[Mapping[str, Any], int | None], list[Sample]]
    pattern: str
    kind: Literal["jsonl", "parquet"] = "jsonl"

    def step_of(self, path: Path) -> int | None:
        """Return the step that the name of a file says."""
        found = re.fullmatch(self.pattern, path.name)
        return int(found[1]) if found and found.groups() and len(found[1]) < 10 else None


@dataclass(slots=True)
class Record:
    """What one line became: samples, or why there are none; neither for a blank line.

    `position` is where the file goes on after it, `content_end` where its content ends.
    """

    number: int
    content_end: int
    position: int
    is_ended: bool
    size_bytes: int
    samples: Sequence[Sample] = ()
    error: RecordError | None = None


FORMATS = {
    f.name: f
    for f in (
        Format("verl", verl.samples, r"(\d+)\.jsonl"),
        Format("trl", trl.samples, r"completions_(\d+)\.parquet", "parquet"),
        Format("verifiers", verifiers.samples, r".*results.*\.jsonl"),
        Format("prime-rl", prime_rl.samples, r".*traces.*\.jsonl"),
        Format("nemo-gym", nemo_gym.samples, r".*rollouts.*\.jsonl"),
        Format("nemo-rl", nemo_rl.samples, r"train_data_step(\d+)\.jsonl"),
        Format("open-instruct", open_instruct.samples, r".*_rollouts_\d+\.jsonl"),
        Format("areal", areal.samples, r"[^/]+\.jsonl"),
        Format("skyrl", skyrl.samples, r"(?!aggregated_results).*\.jsonl"),
    )
}


def find_files(format_: Format, path: Path) -> list[Path]:
    """Return the file, or the files of the format in a folder, those with lower numbers first.

    Raises:
        ImporterError: there is none.
    """
    if path.is_dir():
        names = (p for p in path.rglob("*") if re.fullmatch(format_.pattern, p.name))
        files = sorted((p for p in names if p.is_file()), key=_natural)
        if not files:
            raise ImporterError(
                f"expected files named like `{format_.pattern}` (a regular expression) in "
                f"`{path.absolute()}` or below, found none; name the file itself, or another format"
            )
        return files
    if not path.is_file():
        raise ImporterError(
            f"expected a file or folder of {format_.name} at `{path.absolute()}`, found "
            f"{'none' if not path.exists() else 'something else'}"
        )
    return [path]


class FileReader:
    """The records of a file, one at a time, and the hash of what was read.

    `amend` may fill in what a sample lacks.
    """

    def __init__(
        self, format_: Format, path: Path, amend: Callable[[Sample], None] | None = None
    ) -> None:
        self.path = path
        self._format = format_
        self._amend = amend
        self._step = format_.step_of(path)
        self._lines = jsonl.Reader(path) if format_.kind == "jsonl" else _ParquetRows(path)

    def sha256(self, with_last: bool = True) -> str:
        """Return the hash up to the last record's end, or its beginning; of Parquet, of all."""
        return self._lines.sha256(with_last)

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from map(self._record, self._lines)
        except OSError as error:
            raise ImporterError(
                f"`{self.path.absolute()}` cannot be read: {error.strerror}; nothing after it was"
            ) from error

    def _record(self, line: "jsonl.Line | _Row") -> Record:
        size = len(line.raw or b"") if isinstance(line, jsonl.Line) else line.size_bytes
        record = Record(line.number, line.content_end, line.end, line.is_ended, size)
        try:
            values = jsonl.decoded(line) if isinstance(line, jsonl.Line) else line.values
            if isinstance(values, RecordError):
                raise values
            if values is not None:
                record.samples = self._format.samples(values, self._step)
                if self._amend is not None:
                    for sample in record.samples:
                        self._amend(sample)
        except RecordError as error:
            record.error = error
        except RecursionError:
            record.error = RecordError("unexpected", "expected values that nest less deep")
        return record


@dataclass(slots=True)
class _Row:
    number: int
    values: dict[str, Any] | RecordError
    size_bytes: int

    is_ended = True

    @property
    def end(self) -> int:
        return self.number

    content_end = end


class _ParquetRows:
    """The rows of a Parquet file, read by row groups; columns of bytes are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sha256(self, with_last: bool = True) -> str:
        return file_sha256(self._path)

    def __iter__(self) -> Iterator[_Row]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = 0
        try:
            with pq.ParquetFile(self._path) as file:
                names = [f.name for f in file.schema_arrow if not _holds_bytes(f.type)]
                groups = ([n] for n in range(file.num_row_groups))  # one may be damaged
                for batch in chain.from_iterable(
                    file.iter_batches(1_024, group, names) for group in groups
                ):
                    size = batch.nbytes // max(1, len(batch))
                    for values in batch.to_pylist():
                        number += 1
                        yield _Row(number, values, size)
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # Arrow tells of damage by an OSError without a number
            yield _Row(number + 1, RecordError("not_parquet", f"expected Parquet: {error}"), 0)


def file_sha256(path: Path) -> str:
    """Return the hash of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def num_parquet_rows(path: Path) -> int:
    """Return how many rows a Parquet file says it has; 0 for none that can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError):
        return 0


def _holds_bytes(arrow_type: Any) -> bool:
    return "binary" in str(arrow_type)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts 10.jsonl after 9.jsonl."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(p) if p.isdigit() and p.isascii() else -1, n, p) for n, p in enumerate(parts)]
