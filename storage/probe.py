"""Can this folder hold a store? Tries what a store relies on, instead of knowing file systems.

Invariant: nothing is left behind, and no folder is made.
"""

import fcntl
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from storage.files import Disk

MIN_FREE_BYTES = 2**30
_NUM_SYNCS = 5
_BLOCK = b"x" * 4096


@dataclass(frozen=True)
class Check:
    """One thing that was tried; a store cannot be kept without those that `is_needed`."""

    name: str
    is_ok: bool
    detail: str
    is_needed: bool = True


def probe(path: str | Path) -> list[Check]:
    """Try what a store at `path` would do, in that folder or the one it would be created in.

    Returns:
        the checks in the order they were made; when no file can be written, that is the only one.
    """
    root = Path(path).absolute()
    folder = next(f for f in (root, *root.parents) if os.path.exists(f))  # False if out of reach
    disk = Disk()
    file_path = folder / f".rrl-probe-{secrets.token_hex(8)}"
    link_path = file_path.with_name(f"{file_path.name}-link")
    try:
        with disk.create(file_path) as file:
            disk.write(file, _BLOCK)
            files = Check("files", True, f"can be written in `{folder}`")
            return [files, *_checks(disk, file, file_path, link_path)]
    except OSError as error:
        return [Check("files", False, f"cannot be written in `{folder}`: {error.strerror}")]
    finally:
        for left in (file_path, link_path):
            with suppress(FileNotFoundError, NotADirectoryError):
                disk.unlink(left)


def _checks(disk: Disk, file: BinaryIO, file_path: Path, link_path: Path) -> Iterator[Check]:
    def write_and_sync() -> None:
        disk.write(file, _BLOCK)
        disk.sync_file(file)

    def link_and_sync() -> None:
        with suppress(FileNotFoundError):
            disk.unlink(link_path)
        with suppress(OSError):  # reported by the check before
            disk.link(file_path, link_path)
        disk.sync_folder(file_path.parent)

    yield _check_links(disk, file_path, link_path)
    yield _check_taken(disk, file_path, link_path)
    yield _timed("file sync", write_and_sync)
    yield _timed("folder sync", link_and_sync)
    yield _check_space(file_path.parent)
    yield _check_locks(file, file_path)


def _check_links(disk: Disk, file_path: Path, link_path: Path) -> Check:
    try:
        disk.link(file_path, link_path)
    except OSError as error:
        return Check("hard links", False, f"a second name was refused: {error.strerror}")
    if not link_path.samefile(file_path):
        return Check("hard links", False, "a second name stands for another file")
    return Check("hard links", True, "one file has two names")


def _check_taken(disk: Disk, file_path: Path, link_path: Path) -> Check:
    try:
        disk.link(file_path, link_path)
    except FileExistsError:
        return Check("taken names", True, "are refused, so of two writers one gets a commit number")
    except OSError as error:
        return Check("taken names", False, f"expected EEXIST, came {error.strerror}")
    return Check("taken names", False, "a link replaced another: two writers could both win")


def _timed(name: str, work: Callable[[], None]) -> Check:
    took_ms = []
    for _ in range(_NUM_SYNCS):
        start_s = time.perf_counter()
        try:
            work()
        except OSError as error:
            return Check(name, False, f"failed, so a commit cannot be durable: {error.strerror}")
        took_ms.append((time.perf_counter() - start_s) * 1000)
    return Check(name, True, f"median {statistics.median(took_ms):.2f} ms of {_NUM_SYNCS}")


def _check_space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**30:.1f} GiB"
    if free < MIN_FREE_BYTES:
        detail += f", less than {MIN_FREE_BYTES / 2**30:.0f}: a run may stop with a full disk"
    return Check("free space", free >= MIN_FREE_BYTES, detail, is_needed=False)


def _check_locks(file: BinaryIO, file_path: Path) -> Check:
    """Two opened files stand for two processes, as `flock` belongs to what was opened."""
    missing = "`rrl runs` cannot tell runs that are alive"
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        with file_path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Check("locks", True, "are seen by other processes", is_needed=False)
    except OSError as error:
        return Check("locks", False, f"{missing}: {error.strerror}", is_needed=False)
    return Check("locks", False, f"{missing}: a lock is not seen by others", is_needed=False)
