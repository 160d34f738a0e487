"""Which of the events a stream could append again are committed already.

Invariant: events of iterations that are still open, and of tables whose place has no iteration, are
in memory; those of closed iterations are looked up in the segments that may hold them. Only
committed events count.
"""

from collections.abc import Iterator

from storage import segments
from storage.batch import Batch, Event
from storage.commits import Segment
from storage.files import Files
from storage.schemas import TABLES
from storage.state import LiveSegment, State


class KnownEvents:
    """The committed events of one stream, by id."""

    def __init__(self, files: Files, run_id: str) -> None:
        self._files = files
        self._run_id = run_id
        self._events: dict[str, Event] = {}

    def load(self, state: State) -> None:
        """Read the ids of everything that is not in a closed iteration."""
        closed = state.closed_iteration(self._run_id)
        self._events = {}
        for segment in self._of_stream(state):
            if not _has_iteration(segment) or _last_iteration(segment) > closed:
                self._events |= self._read(segment)
        self.close(closed)

    def find(self, state: State, batch: Batch) -> dict[str, Event]:
        """Return the committed ones among the rows of `batch`."""
        found = {i: self._events[i] for i in batch.ids if i in self._events}
        if "iteration" not in batch.table.place_columns:
            return found
        closed = state.closed_iteration(self._run_id)
        old = {
            event_id: iteration
            for event_id, iteration in zip(batch.ids, batch.iterations, strict=True)
            if iteration is not None and iteration <= closed
        }
        for segment in self._of_stream(state) if old else ():
            if segment.table == batch.table.name and _may_hold(segment, set(old.values())):
                found |= {i: event for i, event in self._read(segment).items() if i in old}
        return found

    def add(self, events: dict[str, Event]) -> None:
        """Remember events that were just committed."""
        self._events |= events

    def close(self, iteration: int) -> None:
        """Forget the events of iterations up to `iteration`."""
        self._events = {
            event_id: event
            for event_id, event in self._events.items()
            if event.iteration is None or event.iteration > iteration
        }

    def _of_stream(self, state: State) -> Iterator[LiveSegment]:
        return (s for s in state.segments.values() if s.run_id == self._run_id)

    def _read(self, segment: LiveSegment) -> dict[str, Event]:
        columns = ["event_id", "content_sha256", *(["iteration"] * _has_iteration(segment))]
        rows = segments.read_positioned(self._files, segment, columns).to_pylist()
        return {
            row["event_id"]: Event(row["_commit"], row.get("iteration"), row["content_sha256"])
            for row in rows
        }


def _has_iteration(segment: Segment) -> bool:
    return "iteration" in TABLES[segment.table].place_columns


def _last_iteration(segment: Segment) -> int:
    return -1 if segment.max_iteration is None else segment.max_iteration


def _may_hold(segment: Segment, iterations: set[int]) -> bool:
    low = segment.min_iteration
    return low is not None and any(low <= i <= _last_iteration(segment) for i in iterations)
