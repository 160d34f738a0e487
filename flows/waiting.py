"""A bar on stderr for whatever takes longer than a moment."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def bar_after(seconds: float, title: str) -> Iterator[Callable[[float, str], None]]:
    """Yield a function (fraction done, note) whose last call a bar shows once `seconds` are over.

    Nothing is shown where stderr is no terminal.
    """
    bars: list[Progress] = []
    shown = [(0.0, "")]

    def advance(done_frac: float, note: str) -> None:
        shown[0] = done_frac, note
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done_frac, description=f"{title} {note}")

    def show() -> None:
        bars.append(_started_bar(title))
        advance(*shown[0])

    timer = threading.Timer(seconds, show)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        for bar in bars:
            bar.stop()


def _started_bar(title: str) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(title, total=1.0)
    bar.start()
    return bar
