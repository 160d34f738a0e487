"""Many small segments become few large ones; files that nobody can need any more are deleted.

Invariants: compaction changes no answer: a compacted segment holds the rows of the segments it
replaces with the positions they had, and its commit succeeds only while all of those are live. No
file is deleted that is live or could become live: a file is condemned by a commit first, which
makes every writer that wrote its segments before it write them again under new names.

Collecting goes by age as well, counted from the condemnation, so that a reader that is at work
keeps its files; one that loses a file all the same asks again (`Store.answered`).
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from storage import segments
from storage.commits import Draft
from storage.errors import DamagedError, StorageError
from storage.files import TEMPORARY_FOLDER
from storage.identity import find_table
from storage.state import LiveSegment, State
from storage.verification import require_whole

if TYPE_CHECKING:
    from storage.store import Store

TARGET_BYTES = 32 * 2**20  # of a compacted segment: what is read back to memory when it grows
MIN_SEGMENTS = 8  # fewer small ones are left for later
GRACE_S = 3600.0
_BATCH_KEY = "compacted"


@dataclass(frozen=True)
class Compacted:
    """What a compaction did: segments of one table of one run, before and after."""

    run_id: str
    table: str
    num_before: int
    num_after: int
    rows: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Collected:
    """What a collection did: files condemned now, and condemned ones that were deleted."""

    num_condemned: int
    num_deleted: int
    deleted_bytes: int


class _OutdatedError(Exception):
    """Another process changed the files this one was about to change; look again."""


def compact(
    store: "Store",
    run_id: str | None = None,
    *,
    min_segments: int = MIN_SEGMENTS,
    target_bytes: int = TARGET_BYTES,
) -> Iterator[Compacted]:
    """Merge neighbouring small segments of each run and table; yield each merger once committed.

    Runs that are being written may be compacted. Stopped anywhere, nothing is lost.

    Args:
        store: what to compact.
        run_id: only segments of this run; None: of all.
        min_segments: how many neighbours below half the target are worth a merger; at least 2.
        target_bytes: size that merged segments stay below.

    Raises:
        StorageError: `min_segments` is below 2.
        DamagedError: a segment to be merged was changed; nothing was merged with it.
    """
    if min_segments < 2:
        raise StorageError(f"min_segments: expected 2 or more, came {min_segments}")
    require_whole(store)
    for group in _groups(store.log.refresh(), run_id, min_segments, target_bytes):
        try:
            yield _merge(store, group)
        except _OutdatedError:
            continue


def num_small_segments(store: "Store", run_id: str) -> int:
    """Return how many segments of a run have not been compacted yet."""
    live = store.log.refresh().segments.values()
    return sum(s.run_id == run_id and not s.is_compacted for s in live)


def collect(store: "Store", *, grace_s: float = GRACE_S) -> Collected:
    """Condemn files that are not live, and delete those condemned before.

    Args:
        store: what to clean.
        grace_s: how old a file must be to be condemned, and its condemnation for it to be deleted.
            It spares readers and writers at work a second try; no answer depends on it.
    """
    require_whole(store)  # what a wrong checkpoint left out would be taken for left over
    num_deleted, deleted_bytes = _delete_condemned(store, grace_s)
    while True:
        try:
            num_condemned = _condemn(store, grace_s)
            break
        except _OutdatedError:
            continue
    for file in store.files.found(TEMPORARY_FOLDER):
        if file.age_s >= grace_s:
            store.files.delete(file.path)
    return Collected(num_condemned, num_deleted, deleted_bytes)


def _groups(
    state: State, run_id: str | None, min_segments: int, target_bytes: int
) -> Iterator[list[LiveSegment]]:
    """Yield neighbours in the order of their commits: small ones, of one table, run and version."""
    lines: dict[tuple[str, str], list[LiveSegment]] = {}
    for segment in sorted(state.segments.values(), key=lambda s: s.first_commit):
        if run_id in (None, segment.run_id):
            lines.setdefault((segment.run_id, segment.table), []).append(segment)
    for line in lines.values():
        yield from (g for g in _small_neighbours(line, target_bytes) if len(g) >= min_segments)


def _small_neighbours(line: list[LiveSegment], target_bytes: int) -> Iterator[list[LiveSegment]]:
    """Cut a line into groups without large segments, each of one version and below the target."""
    group: list[LiveSegment] = []
    for segment in line:
        is_large = segment.size_bytes >= target_bytes // 2
        total = segment.size_bytes + sum(s.size_bytes for s in group)
        has_other_version = any(s.schema_version != segment.schema_version for s in group)
        if is_large or has_other_version or total > target_bytes:
            yield group
            group = []
        if not is_large:
            group.append(segment)
    yield group


def _merge(store: "Store", group: Sequence[LiveSegment]) -> Compacted:
    table, run_id, version = find_table(group[0].table), group[0].run_id, group[0].schema_version
    paths = tuple(s.path for s in group)

    def check(state: State) -> None:
        if not state.segments.keys() >= set(paths):
            raise _OutdatedError

    check(store.log.refresh())
    try:
        rows = pa.concat_tables([segments.read_stored(store.files, s) for s in group])
    except DamagedError:
        check(store.log.refresh())  # merged by another process, and deleted since
        raise

    def make_draft(nonce: str) -> Draft:
        name = (run_id, _BATCH_KEY, nonce)
        added = segments.write(store.files, table, rows, name, version)
        return Draft(
            nonce=nonce, kind="compact", run_id=run_id, epoch=0, batch_key="", removed=paths,
            recorded_at=datetime.now(UTC).isoformat(), added=(added,),
        )  # fmt: skip

    [added] = store.log.commit(make_draft, check).draft.added
    return Compacted(
        run_id=run_id,
        table=table.name,
        num_before=len(group),
        num_after=1,
        rows=len(rows),
        bytes_before=sum(s.size_bytes for s in group),
        bytes_after=added.size_bytes,
    )


def _delete_condemned(store: "Store", grace_s: float) -> tuple[int, int]:
    """Delete the files whose condemnation is old enough, then commit that they are gone."""
    latest = (datetime.now(UTC) - timedelta(seconds=grace_s)).isoformat()
    paths = [p for p, moment in store.log.refresh().condemned.items() if moment <= latest]
    num_bytes = sum(store.files.delete(path) for path in paths)
    if paths:
        store.log.append(_maintenance("collect", paths), lambda state: None)
    return len(paths), num_bytes


def _condemn(store: "Store", grace_s: float) -> int:
    """Condemn what is neither live nor condemned yet; return how many files that are."""
    found = store.files.found(segments.FOLDER)  # before the state: what is committed later is not
    state = store.log.refresh()
    known = state.segments.keys() | state.condemned.keys()
    paths = [f.path for f in found if f.path not in known and f.age_s >= grace_s]

    def check(state: State) -> None:
        if not state.segments.keys().isdisjoint(paths):
            raise _OutdatedError

    if paths:
        store.log.append(_maintenance("condemn", paths), check)
    return len(paths)


def _maintenance(kind: str, paths: Sequence[str]) -> Draft:
    return Draft(
        nonce=secrets.token_hex(8), kind=kind, run_id="", epoch=0, batch_key="",
        recorded_at=datetime.now(UTC).isoformat(), removed=tuple(paths),
    )  # fmt: skip
