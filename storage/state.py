"""What the log says as of its newest commit, folded from the commits one by one.

Invariant: a state is a function of the commits up to its number and of nothing else; a checkpoint
is a state written down, and is believed only when its own hash and its place in the chain fit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.commits import Commit, Head, Segment, body_sha256, canonical_json
from storage.errors import DamagedError, NewerSchemaError
from storage.schemas import FORMAT_VERSION, TABLES

NO_COMMIT = Head(0, "")


@dataclass(frozen=True)
class LiveSegment(Segment):
    """A segment that counts, with the commit that added it and the stream it belongs to."""

    commit: int
    run_id: str


@dataclass(frozen=True)
class Stream:
    """One writer's line of events: its newest epoch, and its last closed iteration (-1: none)."""

    epoch: int = 0
    closed_iteration: int = -1


@dataclass(frozen=True)
class State:
    """The live segments by path and the streams by run id, as of `head`."""

    head: Head = NO_COMMIT
    segments: Mapping[str, LiveSegment] = field(default_factory=dict)
    streams: Mapping[str, Stream] = field(default_factory=dict)

    def epoch(self, run_id: str) -> int:
        """Return the newest epoch of a stream; 0 when it was never opened."""
        stream = self.streams.get(run_id)
        return 0 if stream is None else stream.epoch

    def closed_iteration(self, run_id: str) -> int:
        """Return the last closed iteration of a stream; -1 when none was closed."""
        stream = self.streams.get(run_id)
        return -1 if stream is None else stream.closed_iteration


def fold(state: State, commits: Iterable[Commit]) -> State:
    """Return the state after `commits`, which must continue the chain of `state`.

    Raises:
        DamagedError: a commit is out of place, or says what cannot be.
        NewerSchemaError: a segment has a table or a version this code does not know.
    """
    head, segments, streams = state.head, dict(state.segments), dict(state.streams)
    for commit in commits:
        if (commit.number, commit.prev_sha256) != (head.number + 1, head.sha256):
            raise DamagedError(
                f"commit {commit.number} does not follow commit {head.number}: expected the "
                f"previous hash {head.sha256!r}, came {commit.prev_sha256!r}; the log was edited "
                "or mixed with another, run `rrl verify` and restore it from a backup"
            )
        draft = commit.draft
        stream = _next_stream(streams.get(draft.run_id, Stream()), commit)
        streams[draft.run_id] = stream
        for path in draft.removed:
            if segments.pop(path, None) is None:
                raise DamagedError(f"commit {commit.number} removes `{path}`, which is not live")
        for segment in draft.added:
            _check_known(segment)
            segments[segment.path] = LiveSegment(
                **vars(segment), commit=commit.number, run_id=draft.run_id
            )
        head = Head(commit.number, commit.sha256)
    return State(head, segments, streams)


def encode_checkpoint(state: State) -> bytes:
    """Return the JSON form of a state."""
    body = {
        "format": FORMAT_VERSION,
        "head": asdict(state.head),
        "segments": [vars(segment) for segment in state.segments.values()],
        "streams": {run_id: asdict(stream) for run_id, stream in state.streams.items()},
    }
    return canonical_json(body | {"sha256": body_sha256(body)}) + b"\n"


def checkpoint_state(body: dict[str, Any]) -> State:
    """Return the state that the checked body of a checkpoint holds."""
    segments = [LiveSegment(**segment) for segment in body["segments"]]
    for segment in segments:
        _check_known(segment)
    return State(
        Head(**body["head"]),
        {segment.path: segment for segment in segments},
        {run_id: Stream(**stream) for run_id, stream in body["streams"].items()},
    )


def _next_stream(stream: Stream, commit: Commit) -> Stream:
    draft = commit.draft
    expected = stream.epoch + (draft.kind == "open")
    if draft.epoch != expected:
        raise DamagedError(
            f"commit {commit.number}: expected epoch {expected} of `{draft.run_id}`, came "
            f"{draft.epoch}; the log was edited, run `rrl verify`"
        )
    closes = -1 if draft.closes_iteration is None else draft.closes_iteration
    return Stream(draft.epoch, max(closes, stream.closed_iteration))


def _check_known(segment: Segment) -> None:
    table = TABLES.get(segment.table)
    if table is None or segment.schema_version > table.version:
        known = "does not exist" if table is None else f"has version {table.version}"
        raise NewerSchemaError(
            f"`{segment.path}`: written for version {segment.schema_version} of table "
            f"`{segment.table}`, which here {known}. Install a newer version of rrl"
            " to use this store"
        )
