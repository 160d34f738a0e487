"""A store of one's own for each test."""

from pathlib import Path

import pytest

import storage


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)
