"""Appending to one stream of the log.

Invariant: one writer per stream and epoch; a place is committed at most once; an append is one
commit or nothing. A writer that finds a higher epoch of its stream stops: somebody else resumed the
run. What the caller gets back are the committed rows, never the ones it passed in.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage import segments
from storage.batch import Batch, Event, fresh_rows, make_batch
from storage.commits import Commit, Draft, Head, Segment
from storage.errors import DamagedError, RowError, StorageError, SupersededError
from storage.files import Files
from storage.identity import event_id, find_table, is_storable_text
from storage.known import KnownEvents
from storage.log import Begun, Log
from storage.rows import Row, Rows
from storage.state import LiveSegment, State


@dataclass(frozen=True)
class Committed:
    """What is in the log after an append: the rows in the order given, and a commit that has all.

    `tables` and `rows` hold every column of their table, the common ones included. The rows are
    made when they are first looked at, which takes longer than the append.
    """

    commit: int
    sha256: str
    tables: dict[str, pa.Table]

    @cached_property
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows as dicts, by table."""
        return {name: table.to_pylist() for name, table in self.tables.items()}


@dataclass(frozen=True)
class _Part:
    """The rows of one table in an append, which of them are new, and these as they are stored.

    `segment` is in its place once it is there, None when nothing is new.
    """

    batch: Batch
    fresh: Sequence[int]
    written: pa.Table
    segment: Future[Segment] | None


class _Storing:
    """Stores the new rows of an append while those of its next table are identified.

    One thread encodes and places them, in the order they came: encoding needs no interpreter, and
    waiting for the disk needs no processor. What is in its place means nothing until a commit
    names it.
    """

    def __init__(
        self, files: Files, thread: ThreadPoolExecutor, begun: Begun, name: tuple[str, str]
    ) -> None:
        self.begun = begun
        self._files = files
        self._thread = thread
        self._name = name  # run id and batch key
        self._stored: list[Future[Segment]] = []

    def part(self, batch: Batch, fresh: Sequence[int], epoch: int, now: datetime) -> _Part:
        """Begin to store the rows `fresh` of a batch."""
        written = batch.complete(fresh, epoch, now)
        if not fresh:
            return _Part(batch, fresh, written, None)
        name = (*self._name, self.begun.nonce)
        segment = self._thread.submit(segments.write, self._files, batch.table, written, name)
        self._stored.append(segment)
        return _Part(batch, fresh, written, segment)

    def added(self, parts: Sequence[_Part], nonce: str) -> tuple[Segment, ...]:
        """Return the segments of `parts`; written again when `nonce` is another than at first."""
        name = (*self._name, nonce)
        return tuple(
            p.segment.result()
            if nonce == self.begun.nonce
            else segments.write(self._files, p.batch.table, p.written, name)
            for p in parts
            if p.segment is not None
        )

    def undo(self) -> None:
        """Delete what an append stored that was refused; a collector would find it too."""
        for segment in self._stored:
            with suppress(StorageError, OSError):
                self._files.delete(segment.result().path)


class StreamWriter:
    """The one writer of an epoch of a stream; made by `open_stream`."""

    def __init__(self, files: Files, log: Log, run_id: str, epoch: int) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self._files = files
        self._log = log
        self._known = KnownEvents(files, run_id)
        self._is_loaded = False
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1)  # starting one takes as long as encoding a small table

    @property
    def last_closed_iteration(self) -> int | None:
        """The last iteration of the stream that was closed, None when none was."""
        closed = self._log.refresh().closed_iteration(self.run_id)
        return None if closed < 0 else closed

    def event_id_of(self, table_name: str, row: Row) -> str:
        """Return the id that a row of this stream has or would have."""
        return event_id(table_name, {**row, "run_id": self.run_id})

    def append(
        self,
        rows: Mapping[str, Rows],
        batch_key: str,
        closes_iteration: int | None = None,
    ) -> Committed:
        """Commit all of `rows` at once and return what is committed for them.

        A row whose place is committed already is not written again: an observed one comes back as
        it was first committed, a derived one must have the same content. When there is nothing new
        no commit is made, and the answer names the newest commit that holds one of the rows.

        Args:
            rows: by table, as dicts, by column or in Arrow; without the common columns, `run_id`
                is filled in.
            batch_key: name of the unit of work, part of the file names.
            closes_iteration: no new row of this iteration or an earlier one is taken afterwards.

        Raises:
            RowError: a row does not fit its table.
            ConflictError: a derived row is committed with another content.
            ClosedIterationError: a new row belongs to a closed iteration.
            SupersededError: the stream was opened again since.
            DiskFullError: append again once there is room.
            Whatever is raised, nothing of the append became visible, or all of it.
        """
        if closes_iteration is not None and closes_iteration < 0:
            raise RowError(f"closes_iteration: expected 0 or more, came {closes_iteration}")
        if self._process != os.getpid():
            raise StorageError(
                f"this writer of `{self.run_id}` was made by process {self._process}, this is "
                f"{os.getpid()}: open the stream again after a fork"
            )
        now = datetime.now(UTC)
        with self._lock:
            state = self._load()
            storing = self._storing(batch_key)
            try:
                parts, known = self._parts(rows, state, storing, now)
            except BaseException:
                storing.undo()
                raise
            closed = state.closed_iteration(self.run_id)
            if closes_iteration is not None and closes_iteration <= closed:
                closes_iteration = None
            if closes_iteration is None and not any(part.fresh for part in parts):
                self._log.make_durable(state.head)  # a sync of ours may have failed
                return self._answer(self._newest(state, known), parts, known)
            self._is_loaded = False  # until it is sure what became of the commit
            what = ("append", batch_key, now)
            commit = self._commit(what, parts, storing, self._check_epoch, closes_iteration)
            self._remember(commit, parts)
            return self._answer(Head(commit.number, commit.sha256), parts, known)

    def _storing(self, batch_key: str) -> _Storing:
        """Begin an append."""
        return _Storing(self._files, self._thread, self._log.begin(), (self.run_id, batch_key))

    def _parts(
        self, rows: Mapping[str, Rows], state: State, storing: _Storing, now: datetime
    ) -> tuple[list[_Part], dict[str, Event]]:
        """Check and identify rows, begin to store the new ones, and find those that are known."""
        closed = state.closed_iteration(self.run_id)
        known: dict[str, Event] = {}
        parts = []
        # Lists take longest to encode: begun first, they are done by the time the rest is ready.
        for name in sorted(rows, key=lambda n: not any(c.is_list for c in find_table(n).columns)):
            batch = make_batch(name, rows[name], self.run_id)
            committed = self._log.answered(partial(self._known.find, batch=batch))
            known |= committed
            fresh = fresh_rows(batch, committed, closed)
            parts.append(storing.part(batch, fresh, self.epoch, now))
        return parts, known

    def _load(self) -> State:
        state = self._log.refresh()
        self._check_epoch(state)
        if not self._is_loaded:
            self._log.answered(self._known.load)
            self._is_loaded = True
        return state

    def _commit(
        self,
        what: tuple[str, str, datetime],
        parts: Sequence[_Part],
        storing: _Storing,
        check: Callable[[State], None],
        closes_iteration: int | None = None,
    ) -> Commit:
        """Commit the new rows; `what` is kind, batch key and time."""
        kind, batch_key, now = what

        def make_draft(nonce: str) -> Draft:
            try:
                added = storing.added(parts, nonce)
            except BaseException:
                storing.undo()
                raise
            return Draft(
                nonce=nonce,
                kind=kind,
                run_id=self.run_id,
                epoch=self.epoch,
                batch_key=batch_key,
                recorded_at=now.isoformat(),
                closes_iteration=closes_iteration,
                added=added,
            )

        return self._log.commit(make_draft, check, storing.begun)

    def _remember(self, commit: Commit, parts: Sequence[_Part]) -> None:
        closes = commit.draft.closes_iteration
        for part in parts:
            if closes is None or not part.batch.ends_by(closes):
                self._known.add(part.batch, part.fresh, commit.number)
        if closes is not None:
            self._known.close(closes)
        self._is_loaded = True

    def _answer(self, head: Head, parts: Sequence[_Part], known: Mapping[str, Event]) -> Committed:
        """Gather the committed rows of every part in the order they were given."""
        tables = {
            part.batch.table.name: part.written
            if len(part.fresh) == len(part.batch.ids)
            else self._log.answered(partial(self._with_committed, part=part, known=known))
            for part in parts
        }
        return Committed(head.number, head.sha256, tables)

    def _with_committed(self, state: State, part: _Part, known: Mapping[str, Event]) -> pa.Table:
        """Return the rows of a part: those just written, and those committed before."""
        name, ids = part.batch.table.name, part.batch.ids
        commits = {known[i].commit for i in ids if i in known}
        stored = [part.written]
        for segment in self._holding(state, name, commits):
            found = segments.read(self._files, segment)
            stored.append(found.filter(pc.field("event_id").isin(pa.array(set(ids), pa.string()))))
        rows = pa.concat_tables(stored)
        numbers = {i: n for n, i in enumerate(rows.column("event_id").to_pylist())}
        return rows.take(pa.array([numbers[i] for i in ids], pa.int64()))

    def _holding(self, state: State, table: str, commits: Set[int]) -> list[LiveSegment]:
        """Return the stream's segments of `table` that hold rows of `commits`."""
        return [
            s
            for s in state.segments.values()
            if s.table == table
            and s.run_id == self.run_id
            and any(s.first_commit <= number <= s.last_commit for number in commits)
        ]

    def _newest(self, state: State, known: Mapping[str, Event]) -> Head:
        if not known:
            return state.head
        number = max(event.commit for event in known.values())
        commit = self._log.read(number)
        if commit is None:
            raise DamagedError(f"commit {number} is missing; run `rrl verify`")
        return Head(number, commit.sha256)

    def _check_epoch(self, state: State) -> None:
        newest = state.epoch(self.run_id)
        if newest != self.epoch:
            raise SupersededError(
                f"run `{self.run_id}` was opened again (epoch {newest}) since this writer opened "
                f"it (epoch {self.epoch}); nothing was appended. Let the newer writer go on, or "
                "end it and resume the run"
            )


def open_stream(files: Files, log: Log, run_id: str, opened: Row) -> StreamWriter:
    """Start the next epoch of a stream and return its writer; earlier writers are superseded.

    Args:
        files: the store.
        log: its log.
        run_id: the stream; any text that has a UTF-8 form.
        opened: the columns of `runs` except run_id, run_epoch and what.
    """
    if not isinstance(run_id, str) or not run_id or not is_storable_text(run_id):
        raise RowError(
            f"expected a run id: text that is not empty and has a UTF-8 form, came {run_id!r}"
        )
    while True:
        epoch = log.refresh().epoch(run_id) + 1
        writer = StreamWriter(files, log, run_id, epoch)
        row = {**opened, "run_epoch": epoch, "what": "opened"}
        now = datetime.now(UTC)

        def is_next(state: State, epoch: int = epoch) -> None:
            if state.epoch(run_id) != epoch - 1:
                raise SupersededError(f"epoch {epoch} of run `{run_id}` was taken")

        try:
            key = f"open-{epoch}"
            storing = writer._storing(key)
            part = storing.part(make_batch("runs", [row], run_id), [0], epoch, now)
            writer._commit(("open", key, now), [part], storing, is_next)
        except SupersededError:
            continue
        return writer
