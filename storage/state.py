"""What the log says as of its newest commit, folded from the commits one by one.

Invariant: a state is a function of the commits up to its number and of nothing else; a checkpoint
is a state written down, and is believed only when its own hash and its place in the chain fit.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.commits import Commit, Head, Segment, body_sha256, canonical_json
from storage.errors import DamagedError, NewerSchemaError
from storage.schemas import FORMAT_VERSION, TABLES

NO_COMMIT = Head(0, "")
# Nothing else lies below `events/`, but a collector may have to name what was put there by hand.
_SEGMENT_PATH = re.compile(r"events(/(?!\.\.?/)[^/]+)+(?<!/\.)(?<!/\.\.)")


@dataclass(frozen=True)
class LiveSegment(Segment):
    """A segment that counts, and the stream it belongs to.

    Its rows were committed from `first_commit` to `last_commit`. Those of a compacted segment carry
    their position as columns `_commit` and `_row`; all others have one commit for all rows.
    """

    run_id: str
    first_commit: int
    last_commit: int
    is_compacted: bool = False


@dataclass(frozen=True)
class Stream:
    """One writer's line of events: its newest epoch, and its last closed iteration (-1: none)."""

    epoch: int = 0
    closed_iteration: int = -1


@dataclass(frozen=True)
class State:
    """The live segments by path and the streams by run id, as of `head`.

    `condemned` says when each file was condemned that is not deleted yet, `last_condemn` is the
    newest commit that condemned any: segments written before it must not be committed after it.
    """

    head: Head = NO_COMMIT
    segments: Mapping[str, LiveSegment] = field(default_factory=dict)
    streams: Mapping[str, Stream] = field(default_factory=dict)
    condemned: Mapping[str, str] = field(default_factory=dict)
    last_condemn: int = 0

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
    folding = _Folding(state)
    for commit in commits:
        folding.add(commit)
    return folding.state()


class _Folding:
    """Copies of the parts of a state, changed commit by commit."""

    def __init__(self, state: State) -> None:
        self._head = state.head
        self._segments = dict(state.segments)
        self._streams = dict(state.streams)
        self._condemned = dict(state.condemned)
        self._last_condemn = state.last_condemn

    def state(self) -> State:
        return State(self._head, self._segments, self._streams, self._condemned, self._last_condemn)

    def add(self, commit: Commit) -> None:
        head, draft = self._head, commit.draft
        if (commit.number, commit.prev_sha256) != (head.number + 1, head.sha256):
            raise DamagedError(
                f"commit {commit.number} does not follow commit {head.number}: expected the "
                f"previous hash {head.sha256!r}, came {commit.prev_sha256!r}; the log was edited "
                "or mixed with another, run `rrl verify` and restore it from a backup"
            )
        if draft.kind == "condemn":
            self._condemn(commit)
        elif draft.kind == "collect":
            for path in draft.removed:
                self._condemned.pop(path, None)
        elif draft.kind == "compact":
            self._compact(commit)
        else:
            stream = self._streams.get(draft.run_id, Stream())
            self._streams[draft.run_id] = _next_stream(stream, commit)
            for segment in draft.added:
                number = commit.number
                self._add(LiveSegment(**vars(segment), run_id=draft.run_id,
                                      first_commit=number, last_commit=number))  # fmt: skip
        self._head = Head(commit.number, commit.sha256)

    def _add(self, segment: LiveSegment) -> None:
        _check_known(segment)
        _check_path(segment.path)
        if segment.path in self._condemned or segment.path in self._segments:
            raise DamagedError(
                f"`{segment.path}` was committed twice or after it was condemned; the log was "
                "edited or written by a faulty version, run `rrl verify`"
            )
        self._segments[segment.path] = segment

    def _condemn(self, commit: Commit) -> None:
        for path in commit.draft.removed:
            _check_path(path)
            if path in self._segments:
                raise DamagedError(f"commit {commit.number} condemns `{path}`, which is live")
            self._condemned[path] = commit.draft.recorded_at
        self._last_condemn = commit.number

    def _compact(self, commit: Commit) -> None:
        """Replace segments of one stream and table by others that hold the same rows."""
        draft = commit.draft
        if missing := [path for path in draft.removed if path not in self._segments]:
            raise DamagedError(f"commit {commit.number} removes `{missing[0]}`, which is not live")
        merged = [self._segments.pop(path) for path in draft.removed]
        sources = {(s.run_id, s.table) for s in merged}
        results = {(draft.run_id, s.table) for s in draft.added}
        if sources != results or sum(s.rows for s in merged) != sum(s.rows for s in draft.added):
            raise DamagedError(f"commit {commit.number} adds other rows than it removes")
        for segment in draft.added:
            self._add(
                LiveSegment(
                    **vars(segment),
                    run_id=draft.run_id,
                    first_commit=min(s.first_commit for s in merged),
                    last_commit=max(s.last_commit for s in merged),
                    is_compacted=True,
                )
            )


def encode_checkpoint(state: State) -> bytes:
    """Return the JSON form of a state."""
    body = {
        "format": FORMAT_VERSION,
        "head": asdict(state.head),
        "segments": [vars(segment) for segment in state.segments.values()],
        "streams": {run_id: asdict(stream) for run_id, stream in state.streams.items()},
        "condemned": dict(state.condemned),
        "last_condemn": state.last_condemn,
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
        body["condemned"],
        body["last_condemn"],
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


def _check_path(path: str) -> None:
    """Refuse a path that is not a segment's: what is condemned is deleted one day."""
    if not _SEGMENT_PATH.fullmatch(path):
        raise DamagedError(
            f"expected the path of a segment in a commit, came {path!r}; the log was edited, run "
            "`rrl verify`"
        )


def _check_known(segment: Segment) -> None:
    table = TABLES.get(segment.table)
    if table is None or segment.schema_version > table.version:
        known = "does not exist" if table is None else f"has version {table.version}"
        raise NewerSchemaError(
            f"`{segment.path}`: written for version {segment.schema_version} of table "
            f"`{segment.table}`, which here {known}. Install a newer version of rrl"
            " to use this store"
        )
