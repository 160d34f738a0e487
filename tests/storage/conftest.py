"""A store of one's own for each test."""

from pathlib import Path

import pytest

import storage
from tests.storage.rows import OPENED


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)


@pytest.fixture
def writer(store: storage.Store) -> storage.StreamWriter:
    return store.open_stream("r1", OPENED)
