"""The order of work on disk, and what a full disk leaves behind."""

import ast
import errno
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

import storage
import storage.files
from storage.files import Disk, Files, slug
from tests.storage.rows import OPENED, prompt, rollout


class TracingDisk(Disk):
    """Notes every sync and link; fails the sync of `fails` as often as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path]] = []
        self.fails: dict[Path, int] = {}

    def sync_file(self, file: BinaryIO) -> None:
        self.calls.append(("sync", Path(file.name)))
        super().sync_file(file)

    def sync_folder(self, folder: Path) -> None:
        self.calls.append(("sync", folder))
        if self.fails.get(folder, 0):
            self.fails[folder] -= 1
            raise OSError(errno.EIO, "Input/output error")
        super().sync_folder(folder)

    def link(self, source: Path, target: Path) -> None:
        self.calls.append(("link", target))
        super().link(source, target)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> TracingDisk:
    """The disk of all stores that the test opens."""
    tracing = TracingDisk()
    monkeypatch.setattr(storage.files, "Disk", lambda: tracing)
    return tracing


def test_a_temporary_file_that_is_collected_is_written_again(
    tmp_path: Path, disk: TracingDisk, monkeypatch: pytest.MonkeyPatch
):
    real, collected = disk.link, []

    def link(source: Path, target: Path) -> None:
        if not collected:
            source.unlink()
            collected.append(source)
        real(source, target)

    monkeypatch.setattr(disk, "link", link)
    files = Files(tmp_path)
    files.publish("a/b.txt", b"data")
    assert collected
    assert files.read("a/b.txt") == b"data"


def test_a_file_is_synced_then_linked_then_its_folders_are_synced(
    tmp_path: Path, disk: TracingDisk
):
    files = Files(tmp_path)
    files.publish("a/b/c.txt", b"data")
    temporary = disk.calls.pop(0)
    assert temporary[0] == "sync"
    assert temporary[1].parent == tmp_path / "_tmp"
    assert disk.calls == [
        ("link", tmp_path / "a/b/c.txt"),
        ("sync", tmp_path / "a/b"),
        ("sync", tmp_path / "a"),
        ("sync", tmp_path),
    ]
    disk.calls.clear()
    files.publish("a/b/d.txt", b"data")  # the folders above are durable by now
    assert [call for call in disk.calls if "_tmp" not in call[1].parts] == [
        ("link", tmp_path / "a/b/d.txt"),
        ("sync", tmp_path / "a/b"),
    ]


def test_a_sync_that_failed_is_done_again(tmp_path: Path, disk: TracingDisk):
    files = Files(tmp_path)
    disk.fails = {tmp_path: 1}
    with pytest.raises(OSError, match="Input/output"):
        files.publish("a/b/c.txt", b"data")
    disk.calls.clear()
    files.publish("a/b/d.txt", b"data")
    assert {("sync", tmp_path / "a"), ("sync", tmp_path)} <= set(disk.calls)


def test_a_commit_is_not_relied_on_before_its_folder_was_synced(tmp_path: Path, disk: TracingDisk):
    store = storage.open(tmp_path / "store", create=True)
    writer = store.open_stream("r1", OPENED)
    disk.fails = {store.path / "_log": 2}
    batch = {"prompts": [prompt("p")]}
    for _ in range(2):  # the second time the rows are there, and the sync fails again
        with pytest.raises(OSError, match="Input/output"):
            writer.append(batch, "b")
    disk.calls.clear()
    assert writer.append(batch, "b").commit == 2
    assert disk.calls == [("sync", store.path / "_log")]
    disk.calls.clear()
    assert writer.append(batch, "b").commit == 2
    assert disk.calls == []


def test_a_commit_that_was_linked_although_the_disk_says_taken_is_synced(
    tmp_path: Path, disk: TracingDisk, monkeypatch: pytest.MonkeyPatch
):
    """A file server may do what it is told and lose its answer; asked again, the name is taken."""
    store = storage.open(tmp_path / "store", create=True)
    writer = store.open_stream("r1", OPENED)
    link = disk.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        if target.parent.name == "_log":
            link(source, target)

    monkeypatch.setattr(disk, "link", link_twice)
    disk.calls.clear()
    assert writer.append({"prompts": [prompt("p")]}, "b").commit == 2
    assert disk.calls[-1] == ("sync", store.path / "_log")
    assert store.head().number == 2


def test_a_folder_above_that_cannot_be_read_is_no_obstacle(
    tmp_path: Path, disk: TracingDisk, monkeypatch: pytest.MonkeyPatch
):
    sync = disk.sync_folder

    def refuse(folder: Path) -> None:
        if folder == tmp_path.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        sync(folder)

    monkeypatch.setattr(disk, "sync_folder", refuse)
    assert storage.open(tmp_path / "store", create=True).head().number == 0


def test_a_new_store_is_durable_up_to_the_folder_that_existed(tmp_path: Path, disk: TracingDisk):
    storage.open(tmp_path / "x" / "store", create=True)
    synced = {path for _, path in disk.calls}
    assert {tmp_path, tmp_path / "x", tmp_path / "x/store"} <= synced


def test_everything_an_append_names_is_durable_before_its_commit_is_linked(
    tmp_path: Path, disk: TracingDisk
):
    store = storage.open(tmp_path / "store", create=True)
    writer = store.open_stream("r1", OPENED)
    disk.calls.clear()
    writer.append({"rollouts": [rollout()], "prompts": [prompt("p")]}, "b")
    links = [number for number, (kind, _) in enumerate(disk.calls) if kind == "link"]
    folders = [disk.calls[number][1].parent for number in links]
    assert [folder.parts[-2:] for folder in folders] == [
        ("rollouts", "r1"),
        ("prompts", "r1"),
        ("store", "_log"),
    ]
    *_, commit = links
    for number, folder in zip(links, folders, strict=True):
        assert ("sync", folder) in disk.calls[number : commit if number < commit else None]


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
    def link(self: Disk, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Disk, "link", link)
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


CHANGES = {
    "chmod", "copy", "copy2", "copyfile", "copytree", "fchmod", "fdatasync", "fsync", "ftruncate",
    "hardlink_to", "link", "makedirs", "mkdir", "move", "rename", "renames", "rmdir", "rmtree",
    "symlink", "symlink_to", "touch", "truncate", "unlink", "write_bytes", "write_text",
}  # fmt: skip
NO_DATA = "liveness.py"  # its lock files are empty: only the lock counts, which ends with a process


def changes_of_the_disk(source: str) -> list[str]:
    """Return what a module calls that changes a disk, except through a `Disk`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        words = [*node.args, *(k.value for k in node.keywords)]
        modes = [w.value for w in words if isinstance(w, ast.Constant)]
        writes = any(isinstance(m, str) and set(m) & set("wax+") for m in modes)
        if owner.split(".")[-1] == "disk":
            continue
        if (
            name in CHANGES
            or (name in ("open", "fdopen") and (owner == "os" or writes))
            or (name in ("remove", "replace") and owner == "os")
        ):
            found.append(f"{owner}.{name}".strip("."))
    return found


def test_what_changes_a_disk_is_recognised():
    source = """
path.open("xb"); open(path, mode="w"); os.open(path, flags); path.write_text("x"); os.replace(a, b)
path.open("rb"); open(path); "text".replace("a", "b"); files.disk.unlink(path); rows.remove(x)
"""
    assert changes_of_the_disk(source) == [
        "path.open", "open", "os.open", "path.write_text", "os.replace"
    ]  # fmt: skip


def test_only_one_module_changes_the_disk():
    folder = Path(storage.__file__).parent
    found = {p.name: changes_of_the_disk(p.read_text()) for p in folder.rglob("*.py")}
    assert found.pop("files.py")
    assert found.pop(NO_DATA) == ["path.parent.mkdir", "path.open"]
    assert found.pop("export.py")  # its folder is outside of every store
    assert found.pop("export_rollouts.py")  # so is its output
    assert found.pop("jsonl.py") == ["self._all.copy"]  # of a hash
    assert found.pop("readonly.py") == ["os.open"]  # for reading
    assert {name: calls for name, calls in found.items() if calls} == {}
