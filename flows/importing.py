"""Importing what other frameworks rolled out: one stream, part by part.

An import is a stream of its own (`runs.kind` import) whose iterations are its parts, each one
append that closes its iteration. Its `imports` rows say how far it read which file, by content:

1. A file that begins with what was imported before goes on where that ended, wherever it lies now;
   so the same file twice is imported once, and a killed import goes on.
2. The stream's name follows from what the importer was told and from the first line of the first
   file, unless `name` says another: new files of a folder join the stream of the old ones.
3. Nothing is written before the first line that can be imported.

Parts are made one ahead of the one that is committed, those of large files in a process of their
own.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal

import storage
from flows.import_child import is_child_worth_it, parts_of_child
from flows.import_parts import Looked, MadePart, Reading, made_parts
from flows.machine import code_version, package_versions
from flows.progress import Progress
from flows.stopping import stop_on_signal
from flows.streams import Row
from storage import Committed, StorageError, Store, StreamWriter
from storage.importers.formats import FORMATS, FileReader, Format, ImporterError, find_files
from storage.importers.known import KnownFiles
from storage.importers.rows import SCORER_VERSION, Declared
from storage.importers.samples import Sample

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

KIND = "import"
SHOWN_PROBLEMS, SHOWN_IN_ERROR = 20, 3


@dataclass(frozen=True)
class ImportRequest:
    """What is to be imported, and what the files do not say themselves.

    `task` and `split` are given to every prompt. `temperature` and `model` are those that the
    rollouts were sampled with, for whoever wants to learn from them; None: not known. `follow_s`
    None ends with the last file; else the folder is looked at again after so many seconds.
    """

    format: str
    path: Path
    name: str | None = None
    task: str = "imported"
    split: Literal["train", "eval"] = "train"
    temperature: float | None = None
    model: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    follow_s: float | None = None


@dataclass(frozen=True)
class ImportSummary:
    """How an import ended; counts are those of this call, `num_lines_before` of earlier ones.

    `problems` says which lines were left out and why, the first `SHOWN_PROBLEMS`.
    """

    stream_id: str
    ended: Literal["finished", "interrupted", "nothing to do"]
    num_files: int
    num_lines: int
    num_rollouts: int
    num_token_rollouts: int
    num_scores: int
    num_guessed_groups: int
    num_failures: int
    num_lines_before: int
    problems: tuple[str, ...]
    elapsed_s: float


@dataclass
class _Job:
    """An import at work: its stream, and what it has done in this call."""

    store: Store
    format: Format
    run_id: str
    opened: Row
    tokenizer: "PreTrainedTokenizerBase | None"
    reading: Reading
    progress: Progress
    is_pinned: bool
    started_s: float = field(default_factory=time.monotonic)
    writer: StreamWriter | None = None
    waiting: list[MadePart] = field(default_factory=list)  # before the first that has a rollout
    writing: Future[Committed] | None = None
    files: set[Path] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def import_rollouts(store: Store, request: ImportRequest, progress: Progress) -> ImportSummary:
    """Import what is new in a file or folder.

    The first Ctrl-C, in the main thread, ends it after the part at work.

    Raises:
        ImporterError: there is no such format or file, or no line could be imported; nothing was
            written.
        SupersededError: another process went on with the same stream.
    """
    check_request(request)
    storage.require_whole(store)
    with stop_on_signal(progress, "part") as stop:
        if request.follow_s is not None:
            _wait_for_a_line(request, stop)
        job = _job(store, request, progress)
        with storage.hold_run(store, job.run_id), ThreadPoolExecutor(1) as committer:
            try:
                _import_files(job, request, committer, stop)
                while request.follow_s is not None and not stop.wait(request.follow_s):
                    _import_files(job, request, committer, stop)
            except BaseException as error:
                with suppress(StorageError, OSError):  # the first error is the one to show
                    _end(job, "failed", f"{type(error).__name__}: {error}"[:2000])
                raise
            return _ended(job, stop.is_set() and request.follow_s is None)


def check_request(request: ImportRequest) -> None:
    """Raise `ImporterError` where there is no such format, or nothing to read at the path."""
    if request.format not in FORMATS:
        raise ImporterError(f"format {request.format!r}: expected one of {', '.join(FORMATS)}")
    if request.follow_s is None:
        find_files(FORMATS[request.format], request.path)
    elif not request.path.is_dir():
        raise ImporterError(f"--follow: expected a folder, came `{request.path.absolute()}`")


def _wait_for_a_line(request: ImportRequest, stop: Event) -> None:
    """Wait until the folder has a file with a whole line, which names the stream."""
    assert request.follow_s is not None
    while not stop.is_set():
        with suppress(ImporterError):
            path = find_files(FORMATS[request.format], request.path)[0]
            first = next(iter(FileReader(FORMATS[request.format], path)), None)
            if first is not None and first.is_ended:
                return
        stop.wait(request.follow_s)


def _job(store: Store, request: ImportRequest, progress: Progress) -> _Job:
    """Find the stream, and what it has already; refuse what was declared otherwise before."""
    format_ = FORMATS[request.format]
    files = find_files(format_, request.path)
    base_digest, tokenizer = _model(request, progress)
    declared = Declared(format_.name, request.task, request.split, request.temperature, base_digest)
    run_id = request.name or _derived_name(declared, format_, files)
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,99}", run_id):
        raise ImporterError(
            f"--name {run_id!r}: expected at most 100 of a-z, 0-9 and `-`, the first no `-`"
        )
    asked = {**asdict(request), "path": str(request.path.absolute())}
    opened = store.read("runs", run_id=run_id)
    if opened and opened[0]["kind"] != KIND:
        raise ImporterError(f"{run_id!r} is a run of another kind: give the import another --name")
    told = json.loads(opened[0]["config_json"])["declared"] if opened else asdict(declared)
    if told != asdict(declared):
        raise ImporterError(
            f"{run_id!r} was begun with {json.dumps(told)}, came {json.dumps(asdict(declared))}: "
            "say the same about its rollouts, or give this import another --name"
        )
    known = KnownFiles(store.read("imports", run_id=run_id))
    row = {
        "kind": KIND,
        "config_json": json.dumps({"declared": told, "asked": asked}, sort_keys=True),
        "seed_root": 0,  # nothing is drawn
        "planned_iterations": 0,
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions(), sort_keys=True),
    }
    closed = store.log.refresh().closed_iteration(run_id)
    reading = Reading(format_.name, run_id, declared, known, closed + 1)
    is_pinned = bool(store.read("views_pinned", run_id=run_id))
    return _Job(store, format_, run_id, row, tokenizer, reading, progress, is_pinned)


def _derived_name(declared: Declared, format_: Format, files: Sequence[Path]) -> str:
    """Return the name of a stream by what was declared and the first line of the first file."""
    content = ""
    for path in files:
        reader = FileReader(format_, path)
        if next(iter(reader), None) is not None:
            content = reader.sha256()
            break
    text = json.dumps([asdict(declared), content], sort_keys=True)
    return f"import-{format_.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _model(
    request: ImportRequest, progress: Progress
) -> "tuple[str | None, PreTrainedTokenizerBase | None]":
    """Return digest and tokenizer of the base model that was named."""
    if request.model is None:
        return None, None
    from rrl_core.policy.model import ModelSpec, load_policy_model

    with progress.status(f"looking at model {request.model}"):
        spec = ModelSpec(request.model, request.dtype, "cpu")
        policy = load_policy_model(spec, seed=0)  # of an adapter that is never used
    return policy.base_digest, policy.tokenizer


def _import_files(
    job: _Job, request: ImportRequest, committer: ThreadPoolExecutor, stop: Event
) -> None:
    """Import what is new in the files that there are now."""
    files = find_files(job.format, request.path)
    is_last_look = request.follow_s is None
    if is_last_look and job.tokenizer is None and is_child_worth_it(files):
        parts = parts_of_child(job.reading, files)
    else:
        amend = partial(_amend, job.tokenizer) if job.tokenizer is not None else None
        parts = made_parts(job.reading, files, is_last_look, amend)
    total = sum(path.stat().st_size for path in files)
    with job.progress.phase(f"importing {job.format.name}", total) as advance, closing(parts):
        for part in parts:
            if isinstance(part, Looked):
                job.counts["lines_before"] += part.num_lines_before
                advance(part.size_bytes)
                continue
            _take(job, part, committer)
            if stop.is_set():
                break
    if job.writer is None and not job.counts["lines_before"]:
        if is_last_look:
            raise _nothing_error(job, request)
        job.reading.next_iteration -= len(job.waiting)
        job.waiting.clear()  # it is looked at again
        return
    _flush(job, committer)
    if job.writing is not None:
        job.writing.result()


def _amend(tokenizer: "PreTrainedTokenizerBase", sample: Sample) -> None:
    """Decode a sample that the file has as token ids alone."""
    if sample.messages or not sample.turns:
        return
    first, last = sample.turns[0], sample.turns[-1]
    text = str(tokenizer.decode(first.prompt_ids, skip_special_tokens=True))
    sample.messages = [{"role": "user", "content": text}]
    if not sample.completion:
        ids = [*last.prompt_ids, *last.completion_ids][len(first.prompt_ids) :]
        sample.completion = str(tokenizer.decode(ids, skip_special_tokens=True))
        last.text = sample.completion


def _take(job: _Job, part: MadePart, committer: ThreadPoolExecutor) -> None:
    """Commit a part, unless nothing that can be imported came yet: then it waits."""
    job.waiting.append(part)
    if job.writer is not None or part.num_samples:
        _flush(job, committer)


def _flush(job: _Job, committer: ThreadPoolExecutor) -> None:
    for part in job.waiting:
        _submit(job, part, committer)
    job.waiting.clear()


def _submit(job: _Job, part: MadePart, committer: ThreadPoolExecutor) -> None:
    """Hand the rows of a part to the thread that commits, once it is done with the last one."""
    if job.writer is None:
        job.progress.note(f"{job.run_id} · store {job.store.path}")
        job.writer = job.store.open_stream(job.run_id, job.opened)
    rows = _pin_rows(job, part) | part.rows
    if job.writing is not None:
        job.writing.result()
    place = part.place
    job.writing = committer.submit(
        job.writer.append, rows, place.batch_key, closes_iteration=place.iteration
    )
    _count(job, part)


def _pin_rows(job: _Job, part: MadePart) -> "dict[str, list[Row] | pa.Table]":
    """Return the row that says which column is the reward, where the stream has none yet."""
    if job.is_pinned or part.scorer is None:
        return {}
    job.is_pinned, head = True, job.store.head()
    pin = {
        "iteration": part.place.iteration,
        "as_of": head.number,
        "as_of_sha256": head.sha256,
        "scorer_versions_json": json.dumps({part.scorer: SCORER_VERSION}),
    }
    return {"views_pinned": [pin]}


def _count(job: _Job, part: MadePart) -> None:
    job.files |= part.paths
    job.problems += part.problems
    job.counts["scores"] += len(part.rows.get("scores", ()))
    for row in part.rows["imports"]:
        for name in ("lines", "rollouts", "token_rollouts", "guessed_groups", "failures"):
            job.counts[name] += row[f"num_{name}"]


def _nothing_error(job: _Job, request: ImportRequest) -> ImporterError:
    """Return why nothing of the files could be imported."""
    problems = [text for part in job.waiting for text in part.problems]
    why = "; ".join(problems[:SHOWN_IN_ERROR]) or "it holds none"
    return ImporterError(
        f"expected lines of {job.format.name} to import in `{request.path.absolute()}`, nothing "
        f"was written: {why}"
    )


def _ended(job: _Job, is_stopped: bool) -> ImportSummary:
    """End the stream, if it was opened, and say what was done."""
    ended: Literal["finished", "interrupted"] = "interrupted" if is_stopped else "finished"
    _end(job, ended, "stopped by the user" if is_stopped else None)
    counts = job.counts
    return ImportSummary(
        stream_id=job.run_id,
        ended=ended if job.writer is not None else "nothing to do",
        num_files=len(job.files),
        num_lines=counts["lines"],
        num_rollouts=counts["rollouts"],
        num_token_rollouts=counts["token_rollouts"],
        num_scores=counts["scores"],
        num_guessed_groups=counts["guessed_groups"],
        num_failures=counts["failures"],
        num_lines_before=counts["lines_before"],
        problems=tuple(job.problems[:SHOWN_PROBLEMS]),
        elapsed_s=time.monotonic() - job.started_s,
    )


def _end(job: _Job, what: str, reason: str | None = None) -> None:
    if job.writer is None:
        return
    row = job.opened | {
        "run_epoch": job.writer.epoch,
        "what": what,
        "reason": reason,
        "elapsed_s": time.monotonic() - job.started_s,
    }
    job.writer.append({"runs": [row]}, batch_key=what)
