"""Appending to one stream of the log.

Invariant: one writer per stream and epoch; a place is committed at most once; an append is one
commit or nothing. A writer that finds a higher epoch of its stream stops: somebody else resumed the
run. What the caller gets back are the committed rows, never the ones it passed in.
"""

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage import segments
from storage.batch import Batch, Event, fresh_rows, make_batch
from storage.commits import Commit, Draft, Head
from storage.errors import DamagedError, RowError, SupersededError
from storage.files import Files
from storage.identity import event_id, find_table, is_storable_text
from storage.known import KnownEvents
from storage.log import Log
from storage.rows import Row
from storage.state import LiveSegment, State


@dataclass(frozen=True)
class Committed:
    """What is in the log after an append: the rows in the order given, and a commit that has all.

    `rows` hold every column of their table, the common ones included.
    """

    commit: int
    sha256: str
    rows: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class _Part:
    """The rows of one table in an append, and which of them are new."""

    batch: Batch
    fresh: list[int]


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
        rows: Mapping[str, Sequence[Row]],
        batch_key: str,
        closes_iteration: int | None = None,
    ) -> Committed:
        """Commit all of `rows` at once and return what is committed for them.

        A row whose place is committed already is not written again: an observed one comes back as
        it was first committed, a derived one must have the same content. When there is nothing new
        no commit is made, and the answer names the newest commit that holds one of the rows.

        Args:
            rows: by table; each without the common columns, `run_id` is filled in.
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
        batches = [make_batch(name, table_rows, self.run_id) for name, table_rows in rows.items()]
        with self._lock:
            state = self._load()
            known = {i: e for batch in batches for i, e in self._known.find(state, batch).items()}
            closed = state.closed_iteration(self.run_id)
            parts = [_Part(batch, fresh_rows(batch, known, closed)) for batch in batches]
            if closes_iteration is not None and closes_iteration <= closed:
                closes_iteration = None
            if closes_iteration is None and not any(part.fresh for part in parts):
                self._log.make_durable(state.head)  # a sync of ours may have failed
                return self._answer(self._newest(state, known), parts, known, {})
            self._is_loaded = False  # until it is sure what became of the commit
            commit, written = self._commit(
                "append", parts, batch_key, self._check_epoch, closes_iteration
            )
            self._remember(commit, parts)
            return self._answer(Head(commit.number, commit.sha256), parts, known, written)

    def _load(self) -> State:
        state = self._log.refresh()
        self._check_epoch(state)
        if not self._is_loaded:
            self._known.load(state)
            self._is_loaded = True
        return state

    def _commit(
        self,
        kind: str,
        parts: Sequence[_Part],
        batch_key: str,
        check: Callable[[State], None],
        closes_iteration: int | None = None,
    ) -> tuple[Commit, dict[str, pa.Table]]:
        """Write the new rows into segments, then the commit; return it and the rows by table."""
        now = datetime.now(UTC)
        written = {
            p.batch.table.name: p.batch.complete(p.fresh, self.epoch, now) for p in parts if p.fresh
        }

        def make_draft(nonce: str) -> Draft:
            return Draft(
                nonce=nonce,
                kind=kind,
                run_id=self.run_id,
                epoch=self.epoch,
                batch_key=batch_key,
                recorded_at=now.isoformat(),
                closes_iteration=closes_iteration,
                added=tuple(
                    segments.write(
                        self._files, find_table(name), rows, (self.run_id, batch_key, nonce)
                    )
                    for name, rows in written.items()
                ),
            )

        return self._log.commit(make_draft, check), written

    def _remember(self, commit: Commit, parts: Sequence[_Part]) -> None:
        for part in parts:
            self._known.add(part.batch.events(part.fresh, commit.number))
        if commit.draft.closes_iteration is not None:
            self._known.close(commit.draft.closes_iteration)
        self._is_loaded = True

    def _answer(
        self,
        head: Head,
        parts: Sequence[_Part],
        known: Mapping[str, Event],
        written: Mapping[str, pa.Table],
    ) -> Committed:
        """Gather the committed rows of every part in the order they were given."""
        state = self._log.refresh()
        rows = {}
        for part in parts:
            table, wanted = part.batch.table, set(part.batch.ids)
            stored = written[table.name].to_pylist() if table.name in written else []
            commits = {known[i].commit for i in wanted if i in known}
            for segment in self._holding(state, table.name, commits):
                found = segments.read(self._files, segment)
                stored += found.filter(pc.field("event_id").isin(list(wanted))).to_pylist()
            by_id = {row["event_id"]: row for row in stored}
            rows[table.name] = [by_id[event_id] for event_id in part.batch.ids]
        return Committed(head.number, head.sha256, rows)

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
        part = _Part(make_batch("runs", [row], run_id), [0])

        def is_next(state: State, epoch: int = epoch) -> None:
            if state.epoch(run_id) != epoch - 1:
                raise SupersededError(f"epoch {epoch} of run `{run_id}` was taken")

        try:
            writer._commit("open", [part], f"open-{epoch}", is_next)
        except SupersededError:
            continue
        return writer
