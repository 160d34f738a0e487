"""The order of work on disk, and what a full disk leaves behind."""

import errno
import os
import stat
from pathlib import Path

import pytest

import storage
from storage.files import Files, slug
from tests.storage.rows import OPENED, prompt, rollout


def trace_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record every fsync (with the path of its descriptor) and every link."""
    calls: list[tuple[str, str]] = []
    real_sync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def link(source: Path, target: Path) -> None:
        calls.append(("link", str(target)))
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    return calls


def test_a_file_is_synced_then_linked_then_its_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = Files(tmp_path)
    calls = trace_calls(monkeypatch)
    files.publish("a/b/c.txt", b"data")
    temporary = calls.pop(0)
    assert temporary[0] == "sync"
    assert Path(temporary[1]).parent == tmp_path / "_tmp"
    assert calls == [
        ("link", str(tmp_path / "a/b/c.txt")),
        ("sync", str(tmp_path / "a/b")),
        ("sync", str(tmp_path / "a")),
        ("sync", str(tmp_path)),
    ]
    calls.clear()
    files.publish("a/b/d.txt", b"data")  # the folders above are durable by now
    assert [call for call in calls if "_tmp" not in call[1]] == [
        ("link", str(tmp_path / "a/b/d.txt")),
        ("sync", str(tmp_path / "a/b")),
    ]


def test_a_new_store_is_durable_up_to_the_folder_that_existed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = trace_calls(monkeypatch)
    storage.open(tmp_path / "x" / "store", create=True)
    synced = {path for _, path in calls}
    assert {str(tmp_path), str(tmp_path / "x"), str(tmp_path / "x/store")} <= synced


def test_everything_an_append_names_is_durable_before_its_commit_is_linked(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    artifact = store.artifacts.put(b"weights", "adapter")
    writer = store.open_stream("r1", OPENED)
    calls = trace_calls(monkeypatch)
    writer.append({"rollouts": [rollout()], "prompts": [prompt("p")]}, "b")
    assert store.artifacts.has(artifact)
    links = [number for number, (kind, _) in enumerate(calls) if kind == "link"]
    folders = [str(Path(calls[number][1]).parent) for number in links]
    assert [Path(folder).parts[-2:] for folder in folders] == [
        ("rollouts", "r1"),
        ("prompts", "r1"),
        ("store", "_log"),
    ]
    for number, folder in zip(links, folders, strict=True):
        following = next((n for n in links if n > number), len(calls))
        assert ("sync", folder) in calls[number:following]


def test_a_taken_name_is_left_alone(tmp_path: Path):
    files = Files(tmp_path)
    files.publish("a", b"first")
    with pytest.raises(FileExistsError):
        files.publish("a", b"second")
    assert files.read("a") == b"first"
    assert files.names("_tmp") == []


def test_files_are_read_only(tmp_path: Path):
    Files(tmp_path).publish("a", b"data")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o444


@pytest.mark.parametrize("step", ["temporary opened", "temporary written"])
@pytest.mark.parametrize("at_file", [0, 1, 2])
def test_a_full_disk_leaves_nothing_visible_and_the_store_usable(
    store: storage.Store,
    writer: storage.StreamWriter,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    at_file: int,
):
    writer.append({"rollouts": [rollout("p0")]}, "b")
    batch = {"rollouts": [rollout("p1")], "prompts": [prompt("p1")]}
    seen = []

    def fill(passed: str, path: str) -> None:
        if passed == step:
            seen.append(path)
            if len(seen) == at_file + 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    head = store.head()
    with monkeypatch.context() as patched:
        patched.setattr(store.files, "passed", fill)
        with pytest.raises(storage.DiskFullError, match=r"`/.*/store/.*bytes free.*run again"):
            writer.append(batch, "b")
    assert store.files.names("_tmp") == []
    assert store.head() == head
    assert len(store.read("rollouts")) == 1
    assert not storage.verify(store, deep=True)
    assert writer.append(batch, "b").commit == head.number + 1
    assert storage.open(store.path).open_stream("r1", OPENED).append(batch, "b").commit == 3
    assert not storage.verify(store, deep=True)


def test_a_disk_that_is_full_for_a_checkpoint_keeps_the_commit(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import storage.log

    def fill(step: str, path: str) -> None:
        if step == "temporary opened" and store.head().number == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.log, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(store.files, "passed", fill)
    assert store.open_stream("r1", OPENED).epoch == 1
    assert store.head().number == 1
    assert "was not written" in caplog.text
    assert store.log.checkpoints() == []


def test_a_disk_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(storage.StorageError, match="hard links"):
        Files(tmp_path).publish("a", b"data")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("run-1", "run-1"), ("b0", "b0"), ("a" * 40, "a" * 40)],
)
def test_a_plain_name_is_its_own_slug(text: str, expected: str):
    assert slug(text) == expected


def test_names_that_look_alike_have_different_slugs():
    names = [
        "Run 1",
        "run 1",
        "run_1",
        "RUN-1",
        "run-1",
        "a" * 41,
        "a" * 42,
        "",
        "-",
        "é",
        "\ud800",
    ]
    slugs = [slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert all(set(s) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for s in slugs)
    assert max(map(len, slugs)) <= 49
