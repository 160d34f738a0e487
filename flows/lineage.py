"""Where a run's history begins: in itself, or in the run it was forked from.

A fork shares its parent's events up to the iteration it was forked at, as they were when it was
forked; nothing is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from storage import Store


@dataclass(frozen=True)
class Stretch:
    """What of a run belongs to a history: iterations and commits up to these; None for all."""

    run_id: str
    last_iteration: int | None
    last_commit: int | None = None

    def until(self, as_of: int | None) -> int | None:
        """Return the earlier of its last commit and `as_of`, where None is the newest."""
        known = [number for number in (self.last_commit, as_of) if number is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class Lineage:
    """A run and its ancestors, the run first."""

    stretches: tuple[Stretch, ...]

    @property
    def first_iteration(self) -> int:
        """The iteration the run starts from: 0, or the one it was forked at."""
        return 0 if len(self.stretches) < 2 else self.stretches[1].last_iteration or 0

    def run_of(self, iteration: int) -> str:
        """Return the run whose events tell of an iteration."""
        for stretch, older in zip(self.stretches, self.stretches[1:], strict=False):
            if iteration > (older.last_iteration or 0):
                return stretch.run_id
        return self.stretches[-1].run_id

    def read(self, store: Store, table: str, as_of: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of a table with an iteration, of all of the history, oldest first."""
        return self._gathered(partial(store.read, table), as_of)

    def view(self, store: Store, name: str, as_of: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of a view with an iteration, of all of the history, oldest first."""
        return self._gathered(partial(store.view, name), as_of)

    def _gathered(
        self, rows_of: Callable[..., list[dict[str, Any]]], as_of: int | None
    ) -> list[dict[str, Any]]:
        rows = []
        for number, stretch in enumerate(reversed(self.stretches)):
            last = stretch.last_iteration
            first = 0 if number == 0 else (self.stretches[-number].last_iteration or 0) + 1
            rows += [
                row
                for row in rows_of(run_id=stretch.run_id, as_of=stretch.until(as_of))
                if first <= row["iteration"] and (last is None or row["iteration"] <= last)
            ]
        return rows


def lineage_of(store: Store, run_id: str) -> Lineage:
    """Return the lineage of a run that was opened."""
    stretches = [Stretch(run_id, None)]
    while rows := store.read("runs", run_id=stretches[-1].run_id):
        parent, iteration = rows[0]["parent_run_id"], rows[0]["parent_iteration"]
        if parent is None:
            break
        newest = stretches[-1]
        last = iteration if newest.last_iteration is None else min(newest.last_iteration, iteration)
        stretches.append(Stretch(parent, last, newest.until(rows[0]["parent_as_of"])))
    return Lineage(tuple(stretches))
