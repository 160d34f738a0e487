"""Whether a process on this machine works on a run: for people to see, never for correctness.

A process that works on a run holds a shared lock on `live/<run>.lock`; the kernel drops it with the
process, however that ends. Who may write is decided by the epochs in the log alone. The file is
empty and may be lost, so it is made here and not by `files.py`.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from storage.files import slug

if TYPE_CHECKING:
    from storage.store import Store


@contextmanager
def hold_run(store: "Store", run_id: str) -> Iterator[None]:
    """Show the run as alive while the block runs."""
    path = _lock_path(store, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_run_held(store: "Store", run_id: str) -> bool:
    """Tell whether a process on this machine works on the run."""
    path = _lock_path(store, run_id)
    if not path.exists():
        return False
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_path(store: "Store", run_id: str) -> Path:
    return store.path / "live" / f"{slug(run_id)}.lock"
