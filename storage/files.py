"""The one place where a store touches the disk.

Invariant: a file under its final name is whole, durable and never written again. It is written and
synced under a temporary name outside every folder that is ever listed, then linked (which fails if
the name is taken), then its folder and all folders above it that are not yet known to be durable
are synced. So a crash at any point leaves the whole file or none.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from storage.errors import DiskFullError, StorageError

TEMPORARY_FOLDER = "_tmp"
_SLUG_LENGTH = 40
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class FoundFile:
    """A file below the root, and the seconds since it was written by the clock of this machine."""

    path: str
    age_s: float


class Files:
    """Immutable files below `root`, addressed by relative paths with `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durable_folders: set[Path] = set()

    def publish(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, durably and all at once.

        Raises:
            FileExistsError: the name is taken; the file there is left alone.
            DiskFullError: nothing became visible.
        """
        target = self.root / path
        temporary = self.root / TEMPORARY_FOLDER / secrets.token_hex(16)
        try:
            self._write(temporary, data)
            target.parent.mkdir(parents=True, exist_ok=True)
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
            temporary.unlink(missing_ok=True)
        self.passed("linked", path)
        self.sync_folders(target.parent)
        self.passed("folders synced", path)

    def create_root(self) -> None:
        """Create the root, and make it durable with the folders above it that were missing."""
        missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)

    def make_folder(self, path: str) -> None:
        """Create a folder below the root and make it durable."""
        (self.root / path).mkdir(parents=True, exist_ok=True)
        self.sync_folders(self.root / path)

    def sync_folders(self, folder: Path) -> None:
        """Sync `folder`, and those above it that this process has not yet synced."""
        _sync(folder)
        while folder != self.root and folder not in self._durable_folders:
            self._durable_folders.add(folder)
            folder = folder.parent
            _sync(folder)

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
            target.unlink()
        except FileNotFoundError:
            return 0
        self.passed("deleted", path)
        return size

    def passed(self, step: str, path: str) -> None:
        """Do nothing; tests replace this to crash or fail between two steps of `publish`."""

    def _write(self, temporary: Path, data: bytes) -> None:
        path = f"{TEMPORARY_FOLDER}/{temporary.name}"
        temporary.parent.mkdir(exist_ok=True)
        with temporary.open("xb") as file:
            self.passed("temporary opened", path)
            file.write(data)
            file.flush()
            self.passed("temporary written", path)
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o444)
        self.passed("temporary synced", path)

    def _link(self, temporary: Path, target: Path) -> None:
        try:
            os.link(temporary, target)
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


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
