"""The files of a store as DuckDB sees them at the console: a few named ones, to be read.

Invariant: whatever SQL runs on a connection that reads through here, no file is changed or created,
and none but the named ones is read. DuckDB's own way to files is switched off altogether
(`disabled_filesystems`), and this one opens nothing for writing. `allowed_paths` alone would not
do: `COPY ... TO 'an allowed path' (USE_TMP_FILE false)` overwrites the file, mode 0444 or not when
root asks, and a hard link to it as well.
"""

import os
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

PROTOCOL = "rrlstore"
ROOT = f"{PROTOCOL}://store"  # stands for the store's folder in paths that DuckDB is given


class ReadOnlyFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """The files `paths` below `root`, known to DuckDB as `rrlstore://store/PATH`."""

    protocol = PROTOCOL
    cachable = False  # fsspec would keep every instance for ever

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        super().__init__()
        self._files = {f"{ROOT}/{path}": root / path for path in paths}

    def open(self, path: str, mode: str = "rb", **_: Any) -> "_Reader":
        """Open a named file; any mode but `rb` is refused."""
        if mode != "rb":
            raise PermissionError(f"`{path}`: expected to be read only, came mode {mode!r}")
        return _Reader(self._file(path))

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return `path` itself when it is a named file: nothing can be searched for."""
        return [path] if path in self._files else []

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether `path` is a named file that is there."""
        return path in self._files and self._files[path].exists()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name, size in bytes and type of a named file."""
        return {"name": path, "size": self._file(path).stat().st_size, "type": "file"}

    def modified(self, path: str) -> datetime:
        """Return when a named file was written."""
        return datetime.fromtimestamp(self._file(path).stat().st_mtime, UTC)

    def _file(self, path: str) -> Path:
        if path not in self._files:
            raise FileNotFoundError(f"`{path}` is no live segment of this store")
        return self._files[path]


class _Reader:
    """An open file. DuckDB seeks and reads in two calls, so every thread has its own position."""

    _descriptor = -1

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._here = threading.local()

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        start = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self.tell(),
            os.SEEK_END: os.fstat(self._descriptor).st_size,
        }[whence]
        self._here.position = start + position
        return self.tell()

    def tell(self) -> int:
        return getattr(self._here, "position", 0)

    def read(self, size: int) -> bytes:
        data = os.pread(self._descriptor, size, self.tell())
        self.seek(len(data), os.SEEK_CUR)
        return data

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()
