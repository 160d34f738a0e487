"""Ending work that is done in steps: the first Ctrl-C ends it after the step in hand."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flows.progress import Progress


@contextmanager
def stop_on_signal(progress: Progress, step: str) -> Iterator[threading.Event]:
    """Let the first Ctrl-C or SIGTERM finish the step at work, and the second one stop at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        progress.note(f"stopping after this {step}; once more stops at once")

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
