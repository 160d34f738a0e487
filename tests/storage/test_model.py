"""Any sequence of operations equals a simple model in memory, and answers `as of N` stay for ever.

The model is a list of events in the order they were committed. Operations: appends that overlap
earlier ones, repeats, closed iterations, other runs, new epochs, compactions, collections, and
crashes at any step of any of them.
"""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import storage
from tests.storage.rows import OPENED, rollout

RUNS = st.sampled_from(["r1", "r2"])
PROMPTS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
INSTANTS = st.one_of(st.none(), st.integers(0, 40))  # None: no crash
MAX_CHECKED = 6  # earlier answers compared after each operation


class CrashError(Exception):
    """The process died at this step."""


class LogMachine(RuleBasedStateMachine):
    """The store beside its model."""

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = storage.open(self.folder / "store", create=True)
        self.writers: dict[str, storage.StreamWriter] = {}
        self.events: dict[str, tuple[str, str]] = {}  # id: (run, completion), in commit order
        self.open_iteration = {"r1": 0, "r2": 0}
        self.answers: dict[int, Any] = {}
        self.num_texts = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(run=RUNS, prompts=PROMPTS, crash=INSTANTS)
    def append(self, run: str, prompts: list[int], crash: int | None) -> None:
        """Append rows of the open iteration; some of their places are taken already."""
        text = f"text {next(self.num_texts)}"
        iteration = self.open_iteration[run]
        rows = [rollout(f"p{p}", 0, iteration, completion=text) for p in prompts]
        ids = [storage.event_id("rollouts", {**row, "run_id": run}) for row in rows]
        committed = self.survive(crash, lambda: self.writer(run).append({"rollouts": rows}, "b"))
        fresh = [event_id for event_id in ids if event_id not in self.events]
        if committed is None and not (fresh and fresh[0] in self.stored()):
            return  # it crashed before its commit
        for event_id in ids:
            self.events.setdefault(event_id, (run, text))
        if committed is not None:
            returned = [(row["event_id"], row["completion"]) for row in committed.rows["rollouts"]]
            assert returned == [(event_id, self.events[event_id][1]) for event_id in ids]

    @rule(run=RUNS)
    def close_iteration(self, run: str) -> None:
        self.writer(run).append({}, "close", closes_iteration=self.open_iteration[run])
        self.open_iteration[run] += 1

    @rule(run=RUNS)
    def open_again(self, run: str) -> None:
        self.writers.pop(run, None)

    @rule(crash=INSTANTS, min_segments=st.integers(2, 4))
    def compact(self, crash: int | None, min_segments: int) -> None:
        self.survive(crash, lambda: list(storage.compact(self.store, min_segments=min_segments)))

    @rule(crash=INSTANTS)
    def collect(self, crash: int | None) -> None:
        self.survive(crash, lambda: storage.collect(self.store, grace_s=0))

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.stored() == {i: text for i, (_, text) in self.events.items()}
        head = self.store.head().number
        self.answers.setdefault(head, self.read(head))
        for number in sorted(self.answers)[-MAX_CHECKED:]:
            assert self.read(number) == self.answers[number]
        for asked in {min(self.answers), sorted(self.answers)[len(self.answers) // 2], head}:
            assert self.ask(asked) == self.answers[asked]

    def writer(self, run: str) -> storage.StreamWriter:
        if run not in self.writers:
            self.writers[run] = self.store.open_stream(run, OPENED)
        return self.writers[run]

    def survive(self, crash: int | None, work: Callable[[], Any]) -> Any:
        """Do the work; after a crash go on as a new process would, and return None."""
        steps = itertools.count()

        def passed(step: str, path: str) -> None:
            if next(steps) == crash:
                raise CrashError

        self.store.files.passed = passed  # type: ignore[method-assign]
        try:
            return work()
        except CrashError:
            self.writers.clear()
            self.store = storage.open(self.store.path)
        finally:
            self.store.files.passed = lambda step, path: None  # type: ignore[method-assign]

    def stored(self) -> dict[str, str]:
        rows = self.store.read("rollouts")
        assert len({row["event_id"] for row in rows}) == len(rows)
        return {row["event_id"]: row["completion"] for row in rows}

    def read(self, number: int) -> list[tuple[str, str]]:
        rows = self.store.read("rollouts", as_of=number)
        return [(row["event_id"], row["completion"]) for row in rows]

    def ask(self, number: int) -> list[tuple[str, str]]:
        query = f"select event_id, completion from rollouts({number}) order by _commit, _row"
        return self.store.sql(query).fetchall()


TestLog = LogMachine.TestCase
TestLog.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.soak
def test_many_random_sequences_equal_the_model():
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LogMachine, settings=settings(TestLog.settings, max_examples=300, derandomize=False)
    )
