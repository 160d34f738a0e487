"""A store of one's own for each test."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import storage
from tests.storage.rows import OPENED


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one, for tests that write thousands of files."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)


@pytest.fixture
def writer(store: storage.Store) -> storage.StreamWriter:
    return store.open_stream("r1", OPENED)
