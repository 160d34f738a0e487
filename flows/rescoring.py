"""Judging history again: one scorer version, a slice of rollouts, shard by shard.

A rescoring is a stream of its own (`runs.kind` rescore) whose iterations are its shards. It never
touches older scores; it adds those that its scorer version lacks, as of the commit it pins:

1. The slice and its shards follow from the pinned commit, so a killed rescoring finds its shards
   again; each is one append that closes its iteration, so none is judged twice.
2. The next shard is read and the last one written by threads, while the judge computes.
3. The same request goes on with its unfinished stream; after a finished one it begins another,
   which adds what is missing by then.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

import storage
from flows.judging import HistoryJudge, Judged, ShardPlace, make_judge
from flows.machine import code_version, package_versions
from flows.progress import Progress
from flows.stopping import stop_on_signal
from flows.translate import Row, failure_row
from storage import StorageError, Store, StreamWriter
from storage.slices import Contents, Shard, Slice, Wanted

NOTE_EVERY_S = 10.0
NOT_FINAL = ("scorer_error", "timeout")


class RescoreError(ValueError):
    """The rescoring asked for is not possible; the message says what to do."""


@dataclass(frozen=True)
class RescoreRequest:
    """What is to be judged again, and by whom.

    `where` is an SQL condition over the columns of `rollouts`; `as_of` None pins the newest commit.
    `settings` are parameters of a reward, as `task.key=value`; the others are those of the run's
    task, and without a run the defaults.
    """

    scorer: str
    where: str | None = None
    run_id: str | None = None
    as_of: int | None = None
    shard_rollouts: int = 512
    settings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the request as canonical JSON, by which its stream is found again."""
        facts = asdict(self)
        if not self.settings:
            del facts["settings"]  # as before there were any
        return json.dumps(facts, sort_keys=True)


@dataclass(frozen=True)
class RescoreSummary:
    """How a rescoring ended; counts of scores, states and skipped rollouts are those of this call.

    `stream_id` is None when nothing was begun. `num_judged_before` counts the rollouts of the slice
    that had their verdict as of `as_of`, `num_shards_before` the shards an earlier call closed.
    """

    stream_id: str | None
    ended: Literal["finished", "interrupted", "nothing to do"]
    scorer: str
    scorer_version: str
    kind: str
    as_of: int
    num_rollouts: int
    num_judged_before: int
    num_shards: int
    num_shards_before: int
    num_shards_judged: int
    scores: dict[str, int]
    num_states: int
    skipped: dict[str, int]
    notices: tuple[str, ...]
    elapsed_s: float


@dataclass(frozen=True)
class _Stream:
    """The stream of a request: its base name and number; what it pinned, where it was begun."""

    base: str
    number: int
    as_of: int | None = None
    scorer_version: str | None = None

    @property
    def run_id(self) -> str:
        return f"{self.base}-{self.number}"


@dataclass
class _Job:
    """A rescoring at work, and what it has done in this call."""

    store: Store
    request: RescoreRequest
    progress: Progress
    stream: _Stream
    judge: HistoryJudge
    as_of: int
    history: Slice
    contents: Contents
    shards: list[Shard]
    started_s: float = field(default_factory=time.monotonic)
    num_before: int = 0
    num_judged: int = 0
    num_states: int = 0
    scores: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


def rescore(store: Store, request: RescoreRequest, progress: Progress) -> RescoreSummary:
    """Judge a slice of history by one scorer version, where it has not judged it yet.

    The first Ctrl-C, in the main thread, ends it after the shard at work.

    Raises:
        RescoreError, QueryError, TaskError: the request is not possible; nothing was written.
        JudgeError: a judge's endpoint serves no one; call again to go on.
        SupersededError: another process went on with the same stream.
        DamagedError: a part of the store that has to be read is damaged.
    """
    job = _prepare(store, request, progress)
    for notice in job.judge.notices:
        progress.note(notice)
    if not job.shards and job.stream.as_of is None:
        return _summary(job, "nothing to do")
    with storage.hold_run(store, job.stream.run_id):
        return _work(job)


def _prepare(store: Store, request: RescoreRequest, progress: Progress) -> _Job:
    """Find the stream, load the judge, and look where in the log its work is."""
    if request.shard_rollouts < 1:
        raise RescoreError(f"expected shards of 1 rollout or more, came {request.shard_rollouts}")
    storage.require_whole(store)
    if request.run_id is not None and request.run_id not in store.log.refresh().streams:
        raise RescoreError(
            f"no run {request.run_id!r} in {store.path}: `rrl runs` lists those there are"
        )
    stream = _unfinished_stream(store, request)
    judge = make_judge(
        store, request.scorer, request.run_id, stream.scorer_version, request.settings
    )
    if stream.scorer_version not in (None, judge.version):
        progress.note(
            f"{stream.run_id} was begun with version {stream.scorer_version} of {judge.name}, "
            f"which is version {judge.version} now: its scores stay, those of this one are added"
        )
        stream = _unfinished_stream(store, request, judge.version)
    as_of = store.number(request.as_of if stream.as_of is None else stream.as_of)
    history = _slice(store, request, judge, as_of)
    with progress.status(f"looking for what {judge.name} {judge.version} has not judged"):
        contents, shards = history.shards(request.shard_rollouts)
    return _Job(store, request, progress, stream, judge, as_of, history, contents, shards)


def _slice(store: Store, request: RescoreRequest, judge: HistoryJudge, as_of: int) -> Slice:
    wanted = Wanted(
        as_of, judge.name, judge.version, judge.target_kind, request.where, request.run_id,
        judge.unfit_runs,
    )  # fmt: skip
    return Slice(store, wanted)


def _unfinished_stream(
    store: Store, request: RescoreRequest, version: str | None = None
) -> _Stream:
    """Return the first unfinished stream of the request, or a new one.

    With `version` one that another scorer version began does not count.
    """
    digest = hashlib.sha256(request.to_json().encode()).hexdigest()[:8]
    scorer = re.sub("[^a-z0-9]+", "-", request.scorer.lower()).strip("-")[:40]
    base = f"rescore-{scorer}-{digest}"
    number = 1
    while rows := store.read("runs", run_id=f"{base}-{number}"):
        if all(row["what"] != "finished" for row in rows):
            pins = store.read("views_pinned", run_id=f"{base}-{number}")
            if not pins:
                return _Stream(base, number)
            [begun_with] = json.loads(pins[0]["scorer_versions_json"]).values()
            if version in (None, begun_with):
                return _Stream(base, number, pins[0]["as_of"], begun_with)
        number += 1
    return _Stream(base, number)


def _work(job: _Job) -> RescoreSummary:
    job.progress.note(f"{job.stream.run_id} · store {job.store.path} as of commit {job.as_of}")
    writer = job.store.open_stream(job.stream.run_id, _opened_row(job))
    try:
        if job.stream.as_of is None:
            _pin(job, writer)
        closed = writer.last_closed_iteration
        job.num_before = 0 if closed is None else closed + 1
        with stop_on_signal(job.progress, "shard") as stop:
            _judge_shards(job, writer, stop.is_set)
    except BaseException as error:
        with suppress(StorageError, OSError):  # the first error is the one to show
            _end(job, writer, "failed", f"{type(error).__name__}: {error}"[:2000])
        raise
    if job.num_before + job.num_judged < len(job.shards):
        _end(job, writer, "interrupted", "stopped by the user")
        return _summary(job, "interrupted")
    _end(job, writer, "finished")
    return _summary(job, "finished")


def _pin(job: _Job, writer: StreamWriter) -> None:
    """Fix the commit to judge as of; where another process did so first, take up its shards."""
    committed = writer.append({"views_pinned": [_pin_row(job)]}, batch_key="pin")
    [pin] = committed.rows["views_pinned"]
    if json.loads(pin["scorer_versions_json"]) != {job.judge.name: job.judge.version}:
        raise RescoreError(
            f"{job.stream.run_id} was begun meanwhile by another version of {job.judge.name} than "
            f"{job.judge.version}; call again for a stream of its own"
        )
    if pin["as_of"] != job.as_of:
        job.as_of = pin["as_of"]
        job.history = _slice(job.store, job.request, job.judge, job.as_of)
        job.contents, job.shards = job.history.shards(job.request.shard_rollouts)


def _judge_shards(job: _Job, writer: StreamWriter, should_stop: Callable[[], bool]) -> None:
    """Judge the open shards in order, until told to stop."""
    numbers = range(job.num_before, len(job.shards))
    if not numbers:
        return
    written: Future[None] | None = None
    with (
        ThreadPoolExecutor(1) as reader,
        ThreadPoolExecutor(1) as committer,
        _advancing(job) as advance,
    ):
        reading = reader.submit(job.history.read, job.shards[numbers[0]])
        for number in numbers:
            rows = reading.result()
            if number + 1 in numbers:
                reading = reader.submit(job.history.read, job.shards[number + 1])
            judged = job.judge.judge(rows, ShardPlace(job.stream.run_id, number))
            if written is not None:
                written.result()
            written = committer.submit(_commit, writer, number, judged)
            _count(job, judged)
            advance(job.shards[number].num_left)
            if should_stop():
                break
        if written is not None:
            written.result()


def _commit(writer: StreamWriter, number: int, judged: Judged) -> None:
    batch_key = f"shard-{number:06d}"
    rows = {
        "states": judged.states,
        "scores": judged.scores,
        "failures": _failure_rows(number, batch_key, judged.scores),
    }
    writer.append(rows, batch_key, closes_iteration=number)


def _failure_rows(number: int, batch_key: str, scores: Sequence[Row]) -> list[Row]:
    """Return one `failures` row for each way in which judgements of the shard failed."""
    rows = []
    for status in NOT_FINAL:
        failed = [score for score in scores if score["status"] == status]
        if failed:
            [(feedback, _)] = Counter(score["feedback"] for score in failed).most_common(1)
            message = (
                f"{len(failed)} of {len(scores)} judgements by {failed[0]['scorer']} "
                f"{failed[0]['scorer_version']} ended with {status}, most often: {feedback}; the "
                f"first was that of {failed[0]['target_id']}. Rescore again to try once more"
            )
            rows.append(failure_row(number, "score", f"{batch_key}/{status}", status, message))
    return rows


def _count(job: _Job, judged: Judged) -> None:
    job.num_judged += 1
    job.num_states += len(judged.states)
    job.scores.update(score["status"] for score in judged.scores)
    job.skipped.update(judged.skipped)


def _opened_row(job: _Job) -> Row:
    return {
        "kind": "rescore",
        "config_json": job.request.to_json(),
        "seed_root": 0,  # nothing is drawn
        "planned_iterations": len(job.shards),
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions(), sort_keys=True),
    }


def _pin_row(job: _Job) -> Row:
    commit = job.store.log.read(job.as_of)
    return {
        "iteration": 0,
        "as_of": job.as_of,
        "as_of_sha256": "" if commit is None else commit.sha256,
        "scorer_versions_json": json.dumps({job.judge.name: job.judge.version}),
    }


def _end(job: _Job, writer: StreamWriter, what: str, reason: str | None = None) -> None:
    row = _opened_row(job) | {
        "run_epoch": writer.epoch,
        "what": what,
        "reason": reason,
        "elapsed_s": time.monotonic() - job.started_s,
    }
    writer.append({"runs": [row]}, batch_key=what)


def _summary(
    job: _Job, ended: Literal["finished", "interrupted", "nothing to do"]
) -> RescoreSummary:
    return RescoreSummary(
        stream_id=None if ended == "nothing to do" else job.stream.run_id,
        ended=ended,
        scorer=job.judge.name,
        scorer_version=job.judge.version,
        kind=job.judge.kind,
        as_of=job.as_of,
        num_rollouts=job.contents.num_rollouts,
        num_judged_before=job.contents.num_judged,
        num_shards=len(job.shards),
        num_shards_before=job.num_before,
        num_shards_judged=job.num_judged,
        scores=dict(job.scores),
        num_states=job.num_states,
        skipped=job.contents.unfit | dict(job.skipped),
        notices=job.judge.notices,
        elapsed_s=time.monotonic() - job.started_s,
    )


@contextmanager
def _advancing(job: _Job) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, and elsewhere a line now and then."""
    total = sum(shard.num_left for shard in job.shards)
    before = done = sum(shard.num_left for shard in job.shards[: job.num_before])
    started = noted = time.monotonic()
    with job.progress.phase(f"judging by {job.judge.name}", total) as show:

        def advance(amount: int) -> None:
            nonlocal done, noted
            done += amount
            show(amount)
            now = time.monotonic()
            if now - noted >= NOTE_EVERY_S and not job.progress.console.is_terminal:
                noted = now
                left_s = (now - started) / (done - before) * (total - done)
                job.progress.note(f"{done:,} of {total:,} rollouts · {left_s:.0f} s left")

        show(before)
        yield advance
