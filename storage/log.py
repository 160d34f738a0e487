"""The numbered commits of a store: finding the head, and taking the next number.

Invariant: commit n+1 exists only after commit n is durable, names its hash, and never changes;
whoever links the file of a number first has it. A checkpoint only saves time: opening reads the
newest good one and the commits after it, never the whole log.
"""

import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from storage.commits import (
    FOLDER,
    Commit,
    Draft,
    Head,
    commit_path,
    decode,
    decode_body,
    encode,
    seal,
)
from storage.errors import DamagedError, QueryError, StorageError
from storage.files import Files
from storage.state import State, checkpoint_state, encode_checkpoint, fold

CHECKPOINT_FOLDER = "_checkpoints"
CHECKPOINT_EVERY = 100  # commits

Answer = TypeVar("Answer")

_logger = logging.getLogger(__name__)


class _WrittenTooLongAgoError(Exception):
    """Files were condemned after the segments of a draft were written."""


@dataclass(frozen=True)
class Begun:
    """A commit that is being prepared: its nonce, and the head before its segments were written."""

    nonce: str
    at: int


class Log:
    """The commits below `files`, with the state of the newest one seen kept in memory."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.RLock()
        self._state: State | None = None
        self._durable_number = 0  # of the newest commit that this process knows to be durable

    def refresh(self) -> State:
        """Return the state as of the newest commit, which may not be durable yet.

        Raises:
            DamagedError: a commit is missing, altered or out of place.
            NewerSchemaError: a commit was written by a newer version.
        """
        with self._lock:
            if self._state is None:
                self._state = self._open()
            else:
                self._state = self._forward(self._state)
            return self._state

    def read(self, number: int) -> Commit | None:
        """Return commit `number`, or None when there is none."""
        path = commit_path(number)
        try:
            return decode(self._files.read(path), path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedError(
                f"`{self._files.root / path}` cannot be read ({error}); restore it from a backup"
            ) from error

    def answered(self, ask: Callable[[State], Answer]) -> Answer:
        """Return what `ask` finds in the present state.

        When it fails and segments were compacted meanwhile, it is asked again: the files it missed
        may be deleted, and the same commits are in other files now.
        """
        state = self.refresh()
        while True:
            try:
                return ask(state)
            except (DamagedError, QueryError):
                newer = self.refresh()
                if state.segments.keys() <= newer.segments.keys():
                    raise
                state = newer

    def begin(self) -> Begun:
        """Return what a commit begins with, before any of its segments is written."""
        return Begun(secrets.token_hex(8), self.refresh().head.number)

    def commit(
        self,
        make_draft: Callable[[str], Draft],
        check: Callable[[State], None],
        begun: Begun | None = None,
    ) -> Commit:
        """Write new segments and commit them.

        When files were condemned in between, everything is written once more under new names:
        the condemned ones may be among those just written, if this process was stalled.

        Args:
            make_draft: writes the segments, their names made with the nonce it is given.
            check: as for `append`.
            begun: where segments were written before this was called.
        """
        while True:
            now = begun or self.begin()

            def check_all(state: State, begun_at: int = now.at) -> None:
                check(state)
                if state.last_condemn > begun_at:
                    raise _WrittenTooLongAgoError

            try:
                return self.append(make_draft(now.nonce), check_all)
            except _WrittenTooLongAgoError:
                begun = None

    def append(self, draft: Draft, check: Callable[[State], None]) -> Commit:
        """Commit `draft` as the next number.

        Args:
            draft: what to commit; its segments are in their place, its artifacts durable.
            check: raises when `draft` must not follow the state it is given; called again each
                time another writer was faster.
        """
        self._files.sync_folders([segment.path for segment in draft.added])
        with self._lock:
            while True:
                state = self.refresh()
                self._check_head(state.head)
                check(state)
                self.make_durable(state.head)
                commit = seal(draft, state.head)
                try:
                    self._files.publish(commit_path(commit.number), encode(commit))
                except FileExistsError:
                    winner = self.read(commit.number)
                    if winner is None or winner.draft.nonce != draft.nonce:
                        continue
                    self.make_durable(Head(commit.number, commit.sha256))
                self._durable_number = commit.number
                self._state = fold(state, [commit])
                self._write_checkpoint(self._state)
                return commit

    def make_durable(self, head: Head) -> None:
        """Sync the commits up to `head`, unless this process did: its writer may have been killed.

        Needed before the next one is linked, which could survive a power cut alone, and before a
        caller is told that something is committed.
        """
        if head.number > self._durable_number:
            self._files.sync_folders([commit_path(head.number)])
            self._durable_number = head.number

    def _check_head(self, head: Head) -> None:
        """Refuse to build on a commit that is no longer the one that was read."""
        if head.number == 0:
            return
        there = self.read(head.number)
        if there is None or there.sha256 != head.sha256:
            raise DamagedError(
                f"commit {head.number} was {head.sha256} when this process read it and is "
                f"{there.sha256 if there else 'missing'} now: the log was replaced while the "
                "process ran, by a backup for one; nothing was committed, start it again"
            )

    def newest_number(self) -> int:
        """Return the highest commit number that has a file."""
        return max(self.numbers(), default=0)

    def numbers(self) -> list[int]:
        """Return the numbers that have a file, in order."""
        return sorted(_numbers(self._files.names(FOLDER)))

    def checkpoints(self) -> list[int]:
        """Return the numbers that have a checkpoint, newest first."""
        return sorted(_numbers(self._files.names(CHECKPOINT_FOLDER)), reverse=True)

    def checkpoint(self, number: int) -> State | None:
        """Return the state written down at `number`; None when the file cannot be believed."""
        path = checkpoint_path(number)
        try:
            state = checkpoint_state(decode_body(self._files.read(path), path))
        except (StorageError, FileNotFoundError, KeyError, TypeError, AttributeError):
            return None
        return state if state.head.number == number else None

    def _open(self) -> State:
        candidates = self.checkpoints()  # listed first: each has its commit in the next listing
        newest = self.newest_number()
        state = self._forward(self._start(candidates))
        if state.head.number < newest:
            raise DamagedError(
                f"commit {state.head.number + 1} is missing although commit {newest} exists; "
                f"restore `{self._files.root / commit_path(state.head.number + 1)}` from a backup"
            )
        return state

    def _start(self, candidates: list[int]) -> State:
        for number in candidates:
            state = self.checkpoint(number)
            if state is None:
                continue
            commit = self.read(number)
            if commit is None:
                raise DamagedError(
                    f"commit {number} is missing although a checkpoint was taken after it; restore "
                    f"`{self._files.root / commit_path(number)}` from a backup"
                )
            if Head(commit.number, commit.sha256) == state.head:
                return state
        return State()

    def _forward(self, state: State) -> State:
        commits = list(self._after(state.head.number))
        return fold(state, commits) if commits else state

    def _after(self, number: int) -> Iterator[Commit]:
        while (commit := self.read(number + 1)) is not None:
            yield commit
            number += 1

    def _write_checkpoint(self, state: State) -> None:
        if state.head.number % CHECKPOINT_EVERY:
            return
        path = checkpoint_path(state.head.number)
        try:
            self._files.place(path, encode_checkpoint(state))  # losing it costs only time
        except FileExistsError:
            pass
        except (StorageError, OSError) as error:  # the commit stands; the next one is written later
            _logger.warning("checkpoint `%s` was not written: %s", path, error)


def checkpoint_path(number: int) -> str:
    """Return the path of the checkpoint taken after commit `number`."""
    return f"{CHECKPOINT_FOLDER}/{number:020d}.json"


def _numbers(names: list[str]) -> list[int]:
    return [int(name[:20]) for name in names if re.fullmatch(r"\d{20}\.json", name)]
