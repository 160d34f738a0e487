"""What a folder must be able to do before a store is made in it."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

import storage.probe
from storage.files import Disk
from storage.probe import Check, probe


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize("below", [".", "not/there"])
def test_a_good_folder_passes_and_nothing_is_left_behind(tmp_path: Path, below: str):
    checks = probe(tmp_path / below)
    assert [c.name for c in checks] == [
        "files", "hard links", "taken names", "file sync", "folder sync", "free space", "locks",
    ]  # fmt: skip
    assert all(c.is_ok for c in checks if c.name != "free space"), checks
    assert " ms" in by_name(checks)["file sync"].detail
    assert " ms" in by_name(checks)["folder sync"].detail
    assert os.listdir(tmp_path) == []


class BadDisk(Disk):
    """Cannot do one thing."""

    def __init__(self, cannot: str) -> None:
        self._cannot = cannot

    def _try(self, what: str) -> None:
        if what == self._cannot:
            raise OSError(errno.EPERM, "Operation not permitted")

    def create(self, path: Path) -> BinaryIO:
        self._try("files")
        return super().create(path)

    def link(self, source: Path, target: Path) -> None:
        self._try("hard links")
        if self._cannot == "taken names":
            target.unlink(missing_ok=True)  # as `rename` would
        super().link(source, target)

    def sync_file(self, file: BinaryIO) -> None:
        self._try("file sync")

    def sync_folder(self, folder: Path) -> None:
        self._try("folder sync")


@pytest.mark.parametrize(
    "cannot", ["files", "hard links", "taken names", "file sync", "folder sync"]
)
def test_what_a_disk_cannot_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cannot: str
):
    monkeypatch.setattr(storage.probe, "Disk", lambda: BadDisk(cannot))
    failed = {c.name for c in probe(tmp_path) if c.is_needed and not c.is_ok}
    assert cannot in failed
    assert os.listdir(tmp_path) == []


def test_a_full_disk_and_missing_locks_are_only_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(storage.probe, "MIN_FREE_BYTES", 2**70)
    monkeypatch.setattr("fcntl.flock", refuse)
    wrong = [c for c in probe(tmp_path) if not c.is_ok]
    assert {c.name for c in wrong} == {"free space", "locks"}
    assert not any(c.is_needed for c in wrong)


def test_a_file_is_no_place_for_a_store(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert not by_name(probe(tmp_path / "file" / "store"))["files"].is_ok
