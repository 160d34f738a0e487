"""Which of the events a stream could append again are committed already.

Invariant: events of iterations that are still open, and of tables whose place has no iteration, are
in memory; those of closed iterations are looked up in the segments that may hold them. Only
committed events count.
"""

from collections.abc import Iterator, Sequence

from storage import segments
from storage.batch import Batch, Event
from storage.commits import Segment
from storage.files import Files
from storage.schemas import TABLES
from storage.state import LiveSegment, State

_Place = tuple[int, int | None]  # commit and iteration, as in `Event`


class KnownEvents:
    """The committed events of one stream, by id."""

    def __init__(self, files: Files, run_id: str) -> None:
        self._files = files
        self._run_id = run_id
        self._contents: dict[str, str] = {}
        self._places: dict[str, _Place] = {}  # few, shared by many events: objects cost memory
        self._iterations: set[int | None] = set()  # that `_places` name

    def load(self, state: State) -> None:
        """Read the ids of everything that is not in a closed iteration."""
        closed = state.closed_iteration(self._run_id)
        self._contents, self._places, self._iterations = {}, {}, set()
        for segment in self._of_stream(state):
            if not _has_iteration(segment) or _last_iteration(segment) > closed:
                for event_id, event in self._read(segment).items():
                    self._contents[event_id] = event.content_sha256
                    self._places[event_id] = event[:2]
                    self._iterations.add(event.iteration)
        self.close(closed)

    def find(self, state: State, batch: Batch) -> dict[str, Event]:
        """Return the committed ones among the rows of `batch`."""
        found = {
            i: Event(*self._places[i], self._contents[i]) for i in batch.ids if i in self._places
        }
        if "iteration" not in batch.table.place_columns:
            return found
        closed = state.closed_iteration(self._run_id)
        if not any(i is not None and i <= closed for i in set(batch.iterations)):
            return found
        old = {
            event_id: iteration
            for event_id, iteration in zip(batch.ids, batch.iterations, strict=True)
            if iteration is not None and iteration <= closed
        }
        for segment in self._of_stream(state):
            if segment.table == batch.table.name and _may_hold(segment, set(old.values())):
                found |= {i: event for i, event in self._read(segment).items() if i in old}
        return found

    def add(self, batch: Batch, numbers: Sequence[int], commit: int) -> None:
        """Remember the rows `numbers` of `batch`, which `commit` has."""
        has_iteration = "iteration" in batch.table.place_columns
        places: dict[int | None, _Place] = {}
        for n in numbers:
            iteration = batch.iterations[n] if has_iteration else None
            self._places[batch.ids[n]] = places.setdefault(iteration, (commit, iteration))
            self._contents[batch.ids[n]] = batch.hashes[n]
        self._iterations |= places.keys()

    def close(self, iteration: int) -> None:
        """Forget the events of iterations up to `iteration`."""
        closed = {i for i in self._iterations if i is not None and i <= iteration}
        if not closed:
            return  # the others may be many
        self._iterations -= closed
        self._places = {
            event_id: place
            for event_id, place in self._places.items()
            if place[1] is None or place[1] > iteration
        }
        self._contents = {event_id: self._contents[event_id] for event_id in self._places}

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
