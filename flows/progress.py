"""What a person sees of a run, on stderr: bars on a terminal, one line an iteration elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from storage import Store
from storage.answers import printable


class Progress:
    """Progress of one run on stderr; `quiet` shows nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._overall: TaskID | None = None
        self._first_iteration = 0
        self._started_s = time.monotonic()
        self._num_sampled = 0
        self._sampled_s = 0.0

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Say what is being waited for, and how long it took."""
        started = time.monotonic()
        bar = self._bars.add_task(text, total=None, note="")
        try:
            yield
        finally:
            self._bars.remove_task(bar)
        self.note(f"{text}: {time.monotonic() - started:.1f} s")

    @contextmanager
    def phase(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar of `total` parts; the yielded function advances it."""
        bar = self._bars.add_task(text, total=total, note="")
        try:
            yield lambda amount: self._bars.advance(bar, amount)
        finally:
            self._bars.remove_task(bar)

    def sampled(self, num_sequences: int, elapsed_s: float) -> None:
        """Count newly sampled sequences and the seconds they took."""
        self._num_sampled += num_sequences
        self._sampled_s += elapsed_s

    def note(self, text: str) -> None:
        """Print one line."""
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def iteration_done(self, store: Store, run_id: str, iteration: int, planned: int) -> None:
        """Show how an iteration ended: reward, evaluation, tokens a second, time left."""
        if self._overall is None:
            self._overall = self._bars.add_task("iterations", total=planned, note="")
            self._first_iteration = iteration
            self._started_s = time.monotonic()
        parts = [f"iteration {iteration}/{planned}"]
        for row in store.view("training_history", run_id=run_id, iteration=iteration):
            if row["mean_reward"] is not None:
                parts.append(f"reward {row['mean_reward']:.3f}")
            elif row["num_learned_samples"] and row["loss"] is not None:
                parts.append(f"loss {row['loss']:.4f}")
            elif iteration > 0:
                parts.append(
                    'nothing was scored, nothing learned: see `rrl sql "select status, error, '
                    'count(*) from rollouts group by all"` and the same of `scores`'
                )
            if row["sampled_tokens_per_s"] is not None:
                parts.append(f"{row['sampled_tokens_per_s']:.0f} tokens/s")
        parts += [
            f"held-out {row['scorer']} {row['mean_score']:.3f} "
            f"[{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
            for row in store.read("evaluations", run_id=run_id, iteration=iteration)
            if row["mean_score"] is not None
        ]
        parts.append(self._time_left(iteration, planned))
        self._bars.update(self._overall, completed=iteration, note=parts[1])
        self.note(" · ".join(part for part in parts if part))

    def _time_left(self, iteration: int, planned: int) -> str:
        done = iteration - self._first_iteration
        if done <= 0 or iteration >= planned:
            return ""
        left_s = (time.monotonic() - self._started_s) / done * (planned - iteration)
        return f"{left_s / 60:.0f} min left" if left_s >= 90 else f"{left_s:.0f} s left"
