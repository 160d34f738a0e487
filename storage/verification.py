"""Is the store whole? Checks everything the log promises, and says what does not hold.

Invariant: verification only reads, never stops at the first finding, and trusts nothing: it walks
the whole log from commit 1 and uses checkpoints only to compare them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from storage import segments
from storage.artifacts import artifact_path
from storage.commits import FOLDER, Commit, Head, commit_path
from storage.errors import DamagedError, StorageError
from storage.identity import identify
from storage.integrity import damage
from storage.log import checkpoint_path
from storage.schemas import TABLES
from storage.state import LiveSegment, State, fold
from storage.store import Store


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    `severity` is "error" when something is lost or changed, "warning" when it is only ignored.
    """

    severity: str
    where: str
    message: str


def verify(store: Store, deep: bool = False, anchor: Head | str | None = None) -> list[Finding]:
    """Return everything that is wrong with a store; an empty list means it is whole.

    Args:
        store: what to check.
        deep: read every segment too: hashes, ids and contents of all rows, artifacts in use.
        anchor: a head known from elsewhere, as `number:sha256` or a Head. Without one, a missing
            last commit cannot be noticed, as it breaks no chain.
    """
    commits: dict[int, Commit] = {}
    checkpoints = store.log.checkpoints()  # listed first: what is written meanwhile is left out
    findings = list(_check_commits(store, commits))
    findings += _check_checkpoints(store, commits, checkpoints)
    if anchor is not None:
        findings += _check_anchor(commits, anchor)
    live = _live_segments(commits)
    for segment in live:
        wrong = damage(store.path, segment)
        if wrong is not None:
            findings.append(Finding("error", segment.path, wrong))
    if deep:
        findings += _check_rows(store, live, {finding.where for finding in findings})
    gone = _removed_since(store, max(commits, default=0))
    return [finding for finding in findings if finding.where not in gone]


def require_whole(store: Store) -> None:
    """Raise `DamagedError` when the log, walked from its first commit, is not whole.

    Opening a store reads no commit that a checkpoint covers; whoever builds on history asks for
    more. The rows of segments are compared with their hashes when they are read.
    """
    if errors := [f for f in verify(store) if f.severity == "error"]:
        named = "; ".join(f"`{store.path / f.where}` {f.message}" for f in errors[:3])
        more = f" and {len(errors) - 3} more" if len(errors) > 3 else ""
        raise DamagedError(
            f"{len(errors)} files of the log are damaged: {named}{more}. Restore them from a "
            "backup before training goes on; `rrl verify --deep` lists them all"
        )


def _check_commits(store: Store, commits: dict[int, Commit]) -> Iterator[Finding]:
    """Fill `commits` with those that can be read, and report the others and breaks in the chain."""
    before_it = 0
    for number in store.log.numbers():
        path = commit_path(number)
        if number > before_it + 1:
            yield _gap(before_it + 1, number - 1)
        before_it = number
        try:
            commit = store.log.read(number)
        except StorageError as error:
            yield Finding("error", path, str(error))
            continue
        if commit is None:
            yield _gap(number, number)
            continue
        commits[number] = commit
        before = commits.get(number - 1)
        expected = "" if number == 1 else before and before.sha256
        if commit.number != number or expected not in (None, commit.prev_sha256):
            yield Finding("error", path, "does not continue the chain of the commit before it")
    if list(commits) == list(range(1, len(commits) + 1)):
        try:
            fold(State(), commits.values())
        except StorageError as error:
            yield Finding("error", FOLDER, str(error))


def _gap(first: int, last: int) -> Finding:
    what = "is missing" if first == last else f"and all up to commit {last} are missing"
    return Finding("error", commit_path(first), f"{what} although later commits exist")


def _removed_since(store: Store, number: int) -> set[str]:
    """Return the segments that were compacted after commit `number`: their files may be gone."""
    removed: set[str] = set()
    try:
        while (commit := store.log.read(number + 1)) is not None:
            removed.update(commit.draft.removed)
            number += 1
    except StorageError:
        pass  # written since the log was walked, and not what was asked about
    return removed


def _check_checkpoints(
    store: Store, commits: dict[int, Commit], checkpoints: list[int]
) -> Iterator[Finding]:
    state = State()
    for number in reversed(checkpoints):
        path = checkpoint_path(number)
        if number not in commits:
            yield Finding("error", path, f"was taken after commit {number}, which cannot be read")
            continue
        try:
            between = range(state.head.number + 1, number + 1)
            state = fold(state, [commits[n] for n in between])
        except (StorageError, KeyError):
            return  # the log itself is damaged, which is reported already
        written = store.log.checkpoint(number)
        if written is None:
            yield Finding("warning", path, "cannot be read; it is ignored, delete it")
        elif written != state:
            yield Finding("error", path, "says something else than the log; delete it")


def _check_anchor(commits: dict[int, Commit], anchor: Head | str) -> Iterator[Finding]:
    if isinstance(anchor, str):
        number, _, sha256 = anchor.partition(":")
        if not (number.isdecimal() and sha256):
            raise StorageError(f"anchor: expected NUMBER:SHA256, came {anchor!r}")
        anchor = Head(int(number), sha256)
    commit = commits.get(anchor.number)
    if anchor.number == 0:
        return
    if commit is None:
        newest = max(commits, default=0)
        yield Finding(
            "error",
            commit_path(anchor.number),
            f"is missing: the head was commit {anchor.number} once, the newest is now {newest}",
        )
    elif commit.sha256 != anchor.sha256:
        yield Finding(
            "error",
            commit_path(anchor.number),
            f"has the hash {commit.sha256}, it was {anchor.sha256} once: the history was rewritten",
        )


def _live_segments(commits: dict[int, Commit]) -> list[LiveSegment]:
    """Return the live segments, as far as the commits that can be read tell."""
    live: dict[str, LiveSegment] = {}
    for number, commit in commits.items():
        draft = commit.draft
        merged = [live.pop(path) for path in draft.removed if path in live]
        for segment in draft.added:
            live[segment.path] = LiveSegment(
                **vars(segment),
                run_id=draft.run_id,
                first_commit=min((s.first_commit for s in merged), default=number),
                last_commit=max((s.last_commit for s in merged), default=number),
                is_compacted=draft.kind == "compact",
            )
    return list(live.values())


def _check_rows(store: Store, live: list[LiveSegment], known: set[str]) -> Iterator[Finding]:
    """Read every segment that is not yet reported and check its rows."""
    seen: dict[str, str] = {}
    for segment in live:
        if segment.path in known:
            continue
        try:
            rows = segments.read_stored(store.files, segment)
        except DamagedError as error:
            yield Finding("error", segment.path, str(error))
            continue
        stored = rows.column("event_id").to_pylist()
        ids, contents = identify(TABLES[segment.table], rows)
        for event_id in stored:
            if event_id in seen:
                message = f"`{event_id}` is in {seen[event_id]} too"
                yield Finding("error", segment.path, message)
            seen[event_id] = segment.path
        if ids != stored or set(rows.column("run_id").to_pylist()) != {segment.run_id}:
            yield Finding("error", segment.path, "has event ids that do not fit their places")
        if contents != rows.column("content_sha256").to_pylist():
            yield Finding("error", segment.path, "has rows that do not fit their content hashes")
        if len(rows) != segment.rows:
            message = f"has {len(rows)} rows, expected {segment.rows}"
            yield Finding("error", segment.path, message)
        if segment.is_compacted and not _has_good_positions(segment, rows):
            yield Finding("error", segment.path, "has rows out of the order of their commits")
        if segment.table == "policies":
            yield from _check_artifacts(store, rows.to_pylist())


def _has_good_positions(segment: LiveSegment, rows: pa.Table) -> bool:
    positions = list(zip(*(rows.column(n).to_pylist() for n in segments.POSITIONS), strict=True))
    is_rising = all(a < b for a, b in pairwise(positions))
    return is_rising and all(
        segment.first_commit <= commit <= segment.last_commit for commit, _ in positions
    )


def _check_artifacts(store: Store, policies: list[dict[str, Any]]) -> Iterator[Finding]:
    """Check adapters, which are kept for ever, and those optimizer states that were kept."""
    for policy in policies:
        optimizer = policy["optimizer_artifact"]
        is_kept = optimizer is not None and store.artifacts.has(optimizer)
        for artifact in [policy["adapter_artifact"], *([optimizer] if is_kept else [])]:
            try:
                store.artifacts.get(artifact)
            except StorageError as error:
                yield Finding("error", artifact_path(artifact), str(error))
