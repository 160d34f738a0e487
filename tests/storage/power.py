"""A disk that loses power: what it may hold afterwards, given what was done to it.

The model, which allows more than most file systems do:

- The content of a file is durable once the file was synced. Before that it may be empty, cut, or
  whole, even when a name of the file is durable.
- A name in a folder, made or taken away, is durable once that folder was synced. Before that each
  change is there or not, whatever became of the others.
- What is below a folder whose own name is lost is lost.

The folder of temporary files is never synced and its names are random, so it would have
uncountably many forms; as nothing lists it but collection, only two count: not there, and whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from storage.files import TEMPORARY_FOLDER, Disk


@dataclass(frozen=True)
class Operation:
    """One change of the disk, or what the caller was told (`acknowledged`, with a commit)."""

    kind: str
    path: str = ""
    target: str = ""
    data: bytes = b""
    number: int = 0

    @property
    def is_sync(self) -> bool:
        return self.kind in ("sync_file", "sync_folder")


Ending: TypeAlias = Callable[[Sequence[Operation]], bool]


class PowerCut(BaseException):
    """The process ends here."""


class LazyDisk(Disk):
    """A disk that forgets to sync, for tests that lose no power."""

    def sync_file(self, file: BinaryIO) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class RecordingDisk(LazyDisk):
    """Does what it is told and notes it with paths relative to `base`, until it `has_ended`."""

    def __init__(self, base: Path, has_ended: Ending = lambda trace: False) -> None:
        self.base, self.has_ended = base, has_ended
        self.trace: list[Operation] = []

    def create(self, path: Path) -> BinaryIO:
        self._check_power()
        file = super().create(path)
        self._note("create", path)
        return file

    def write(self, file: BinaryIO, data: bytes) -> None:
        self._check_power()
        super().write(file, data)
        self._note("write", Path(file.name), data=data)

    def sync_file(self, file: BinaryIO) -> None:
        self._check_power()
        self._note("sync_file", Path(file.name))

    def link(self, source: Path, target: Path) -> None:
        self._check_power()
        super().link(source, target)
        self._note("link", source, target=target.relative_to(self.base).as_posix())

    def unlink(self, path: Path) -> None:
        self._check_power()
        super().unlink(path)
        self._note("unlink", path)

    def make_folder(self, folder: Path) -> None:
        self._check_power()
        super().make_folder(folder)
        self._note("make_folder", folder)

    def sync_folder(self, folder: Path) -> None:
        self._check_power()
        self._note("sync_folder", folder)

    def acknowledge(self, number: int) -> None:
        self.trace.append(Operation("acknowledged", number=number))

    def _note(self, kind: str, path: Path, **rest: Any) -> None:
        self.trace.append(Operation(kind, path.relative_to(self.base).as_posix(), **rest))

    def _check_power(self) -> None:
        if self.has_ended(self.trace):
            raise PowerCut


@dataclass
class _File:
    number: int
    data: bytes = b""
    is_durable: bool = False


@dataclass
class _Folder:
    names: dict[str, "_File | _Folder"] = field(default_factory=dict)  # that are durable
    pending: list[tuple[str, "_File | _Folder | None"]] = field(default_factory=list)

    def now(self) -> dict[str, "_File | _Folder"]:
        return _changed(self.names, self.pending)


Tree: TypeAlias = tuple[int, bytes] | frozenset[Any]  # a file, or (name, tree) of each name


class Volume:
    """A disk while it has power, and all it may hold after that."""

    def __init__(self) -> None:
        self._root = _Folder()
        self._num_files = 0

    def apply(self, operation: Operation) -> None:
        match operation.kind:
            case "create":
                self._num_files += 1
                self._change(operation.path, _File(self._num_files))
            case "write":
                self._file(operation.path).data += operation.data
            case "sync_file":
                self._file(operation.path).is_durable = True
            case "link":
                self._change(operation.target, self._file(operation.path))
            case "unlink":
                self._change(operation.path, None)
            case "make_folder":
                self._change(operation.path, _Folder())
            case "sync_folder":
                folder = self._folder(Path(operation.path))
                folder.names, folder.pending = folder.now(), []
            case _:
                assert operation.kind == "acknowledged"

    def trees(self) -> Iterator[Tree]:
        """Yield every tree the disk may hold, the one with the least first."""
        return _folder_trees(self._root)

    def _folder(self, path: Path) -> _Folder:
        folder = self._root
        for name in path.parts:
            below = folder.now()[name]
            assert isinstance(below, _Folder)
            folder = below
        return folder

    def _file(self, path: str) -> _File:
        file = self._folder(Path(path).parent).now()[Path(path).name]
        assert isinstance(file, _File)
        return file

    def _change(self, path: str, to: "_File | _Folder | None") -> None:
        self._folder(Path(path).parent).pending.append((Path(path).name, to))


def _changed(names: dict[str, Any], changes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return `names` after changes: what a name stands for now, None when it is taken away."""
    changed = dict(names)
    for name, to in changes:
        if to is None:
            changed.pop(name, None)
        else:
            changed[name] = to
    return changed


def _folder_trees(folder: _Folder) -> Iterator[Tree]:
    for chosen in product((False, True), repeat=len(folder.pending)):
        changes = [c for c, is_there in zip(folder.pending, chosen, strict=True) if is_there]
        names = _changed(folder.names, changes)
        forms = [[(name, form) for form in _forms(name, node)] for name, node in names.items()]
        for picked in product(*forms):
            yield frozenset((name, form) for name, form in picked if form is not None)


def _forms(name: str, node: _File | _Folder) -> Iterator[Tree | None]:
    """Yield what may be left of a file or folder whose name is there; None: nothing."""
    if name == TEMPORARY_FOLDER:
        yield None
        yield _whole(node)
    elif isinstance(node, _Folder):
        yield from _folder_trees(node)
    elif node.is_durable:
        yield _whole(node)
    else:
        size = len(node.data)
        yield from ((node.number, node.data[:end]) for end in sorted({0, size // 2, size}))


def _whole(node: _File | _Folder) -> Tree:
    if isinstance(node, _File):
        return node.number, node.data
    return frozenset((name, _whole(below)) for name, below in node.now().items())


def materialise(tree: Tree, folder: Path) -> None:
    """Write a tree into a folder that exists."""
    assert isinstance(tree, frozenset)
    for name, below in tree:
        if isinstance(below, frozenset):
            (folder / name).mkdir()
            materialise(below, folder / name)
        else:
            (folder / name).write_bytes(below[1])


def states(trace: Sequence[Operation]) -> Iterator[tuple[int, int | None, Tree]]:
    """Yield all that may be left of each prefix of a trace, each tree once for what was told.

    Yields:
        length of the prefix, the highest commit acknowledged in it (None: nothing), and the tree.
    """
    volume, told = Volume(), None
    seen: set[tuple[int | None, Tree]] = set()
    for length in range(len(trace) + 1):
        if length:
            volume.apply(trace[length - 1])
            if trace[length - 1].kind == "acknowledged":
                told = max(told or 0, trace[length - 1].number)
        for tree in volume.trees():
            if (told, tree) not in seen:
                seen.add((told, tree))
                yield length, told, tree


def when_told(trace: Sequence[Operation], start: int = 0) -> Iterator[tuple[int, Tree]]:
    """Yield all that may be left after each acknowledgement from `start` on: commit and tree."""
    volume = Volume()
    for number, operation in enumerate(trace):
        volume.apply(operation)
        if operation.kind == "acknowledged" and number >= start:
            yield from ((operation.number, tree) for tree in volume.trees())
