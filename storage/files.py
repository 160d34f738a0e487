"""The one place where a store changes the disk.

Invariant: a file under its final name is whole, durable and never written again. It is written and
synced under a temporary name outside every folder that is ever listed, then linked (which fails if
the name is taken), then its folder and all folders above it that are not yet known to be durable
are synced. So a crash or a power cut at any point leaves the whole file or none.

Every sync is needed, and tests show it by leaving out each (`tests/storage/test_power_loss.py`).
What may be lost is not synced: deletions, and the folders of a file that only saves time.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from storage.errors import DiskFullError, StorageError

TEMPORARY_FOLDER = "_tmp"
_SLUG_LENGTH = 40
_RETRIES = 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class FoundFile:
    """A file below the root, and the seconds since it was written by the clock of this machine."""

    path: str
    age_s: float


class Disk:
    """The operations that change a disk, one each; tests record them, fail them or leave them out.

    Nothing else in this package writes, links, deletes or syncs.
    """

    def create(self, path: Path) -> BinaryIO:
        """Open a new, empty file for writing; raise `FileExistsError` when the name is taken."""
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes) -> None:
        """Hand all of `data` to the system."""
        file.write(data)
        file.flush()

    def sync_file(self, file: BinaryIO) -> None:
        """Make the content of a file durable, under whatever names it has or gets."""
        os.fsync(file.fileno())

    def make_read_only(self, file: BinaryIO) -> None:
        """Guard a file against being written by mistake."""
        os.fchmod(file.fileno(), 0o444)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; raise `FileExistsError` when that is taken."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Take a name away; raise `FileNotFoundError` when there is none."""
        path.unlink()

    def make_folder(self, folder: Path) -> None:
        """Make one folder; fine when another process was faster."""
        folder.mkdir(exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable, as they are now."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Files:
    """Immutable files below `root`, addressed by relative paths with `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = Disk()
        self._durable_folders: set[Path] = set()  # they and all above them up to the root

    def publish(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, durably and all at once.

        Raises:
            FileExistsError: the name is taken; the file there is left alone.
            DiskFullError: nothing became visible.
        """
        self.place(path, data)
        self.sync_folders([path])

    def place(self, path: str, data: bytes) -> None:
        """Store `data` under `path` all at once; a power cut may take it away, but cannot cut it.

        Raises as `publish` does. `sync_folders` makes it durable.
        """
        target = self.root / path
        for is_last in (*[False] * _RETRIES, True):
            try:
                self._place_once(target, data)
                break
            except FileNotFoundError:  # the temporary file was collected while this one stalled
                if is_last:
                    raise
        self.passed("linked", path)

    def _place_once(self, target: Path, data: bytes) -> None:
        temporary = self.root / TEMPORARY_FOLDER / secrets.token_hex(16)
        try:
            self._write(temporary, data)
            self._make_folders(target.parent)
            self._link(temporary, target)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            free = shutil.disk_usage(self.root).free
            raise DiskFullError(
                f"could not write {len(data)} bytes to `{target}`: the disk is full ({free} bytes "
                "free); nothing of it is visible. Free some space and run again"
            ) from error
        finally:
            with suppress(FileNotFoundError):
                self.disk.unlink(temporary)

    def create_root(self) -> None:
        """Create the root and the folders above it that are missing, each durable before the next.

        So of the folders that are there, only the last may not be durable: whoever made it may
        have been killed right afterwards.
        """
        missing = _missing(self.root)
        newest = missing[-1].parent if missing else self.root
        if not newest.is_mount():
            with suppress(PermissionError):  # a folder above that is not ours to read
                self.disk.sync_folder(newest.parent)
        for folder in reversed(missing):
            self.disk.make_folder(folder)
            self.disk.sync_folder(folder.parent)

    def make_folder(self, path: str) -> None:
        """Create a folder below the root and make it durable."""
        folder = self.root / path
        self._make_folders(folder)
        self._sync(set(), self._above(folder))

    def sync_folders(self, paths: Collection[str]) -> None:
        """Make files durable that are in their place: their names, and all folders above them."""
        folders = {(self.root / path).parent for path in paths}
        self._sync(folders, set().union(*map(self._above, folders)))
        for path in paths:
            self.passed("folders synced", path)

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise `FileNotFoundError` when there is none."""
        return (self.root / path).read_bytes()

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in `folder`; none when it does not exist."""
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def found(self, folder: str) -> list["FoundFile"]:
        """Return all files below `folder`, in whatever depth; those that vanish are left out."""
        found = []
        for at, _, names in os.walk(self.root / folder):
            for name in sorted(names):
                path = Path(at, name)
                try:
                    age_s = time.time() - path.stat().st_mtime
                except FileNotFoundError:
                    continue
                found.append(FoundFile(path.relative_to(self.root).as_posix(), age_s))
        return found

    def delete(self, path: str) -> int:
        """Delete a file and return its size; a missing one is fine, and has 0.

        Nothing is synced: a file that comes back after a power cut harms nobody.
        """
        target = self.root / path
        try:
            size = target.stat().st_size
            self.disk.unlink(target)
        except FileNotFoundError:
            return 0
        self.passed("deleted", path)
        return size

    def passed(self, step: str, path: str) -> None:
        """Do nothing; tests replace this to crash or fail between two steps."""

    def _write(self, temporary: Path, data: bytes) -> None:
        path = f"{TEMPORARY_FOLDER}/{temporary.name}"
        self._make_folders(temporary.parent)
        with self.disk.create(temporary) as file:
            self.passed("temporary opened", path)
            self.disk.write(file, data)
            self.passed("temporary written", path)
            self.disk.make_read_only(file)
            self.disk.sync_file(file)
        self.passed("temporary synced", path)

    def _make_folders(self, folder: Path) -> None:
        for missing in reversed(_missing(folder)):
            self.disk.make_folder(missing)

    def _above(self, folder: Path) -> set[Path]:
        """Return the folders above `folder` whose names may not be durable, or hold such names."""
        above: set[Path] = set()
        while folder != self.root and folder not in self._durable_folders:
            folder = folder.parent
            above.add(folder)
        return above

    def _sync(self, folders: Set[Path], above: Set[Path]) -> None:
        """Sync folders, each once, and remember the folders in `above`, which are durable then.

        They are remembered at the end: another thread may ask meanwhile, and a sync may fail.
        """
        durable: set[Path] = set()
        for folder in sorted(folders | above, reverse=True):
            there = os.scandir(folder) if folder in above else ()
            made = [Path(entry) for entry in there if entry.is_dir()]
            self.disk.sync_folder(folder)
            durable.update(made)
        self._durable_folders |= durable

    def _link(self, temporary: Path, target: Path) -> None:
        try:
            self.disk.link(temporary, target)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StorageError(
                    f"`{self.root}` is on a file system without hard links ({error.strerror}), "
                    "which a store needs to commit at once; put the store on another disk"
                ) from error
            raise


def slug(text: str) -> str:
    """Return `text` as [a-z0-9-]; with a hash of it where that loses something."""
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:_SLUG_LENGTH]
    if plain == text:
        return plain
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain}-{digest}".strip("-")


def _missing(folder: Path) -> list[Path]:
    """Return `folder` and the folders above it, from below, as far as they do not exist."""
    return list(takewhile(lambda f: not f.exists(), (folder, *folder.parents)))
