"""Large imports read in a process of its own: the same stream, and no process left behind."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storage
from flows import import_child, importing
from flows.import_child import is_child_worth_it, parts_of_child
from flows.import_parts import Looked, Reading, made_parts
from storage.importers.formats import ImporterError
from storage.importers.known import KnownFiles
from storage.importers.rows import Declared
from tests.flows.conftest import num_commits
from tests.flows.test_importing import verl_folder, wait_until
from tests.importers.imported import ask, import_here, verl_line, write_lines
from tests.importers.test_golden import LINES, episode

CHUNK = 4_096  # lines of a part
IDENTITIES = [
    f"select event_id, content_sha256 from {table} order by _commit, _row"
    for table in ("prompts", "rollouts", "rollout_tokens", "scores", "failures", "imports")
]


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Let every file be worth a child; those that were started, which must have ended by then."""
    monkeypatch.setattr(import_child, "MIN_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    popen, started = subprocess.Popen, []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = popen(*arguments, **options)
        if arguments[0][-2:-1] == ["flows.import_child"]:
            started.append(child)
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    yield started
    assert started
    assert all(child.returncode is not None for child in started)


def events_of(store: storage.Store) -> list[Any]:
    """Identity and content of all events, in the order they are in."""
    return [ask(store, query) for query in IDENTITIES]


def reading() -> Reading:
    return Reading("verl", "r", Declared("verl", "t", "train", None, None), KnownFiles([]), 0)


def test_a_child_is_worth_it_for_large_files_where_there_are_two_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = [tmp_path / "1", tmp_path / "2"]
    for path, size in zip(files, (import_child.MIN_BYTES - 1, 1), strict=True):
        path.write_bytes(b"\n" * size)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert is_child_worth_it(files)
    assert not is_child_worth_it(files[:1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert not is_child_worth_it(files)


@pytest.mark.parametrize(
    ("format_", "name", "lines", "num_slices"),
    [
        ("verl", "7.jsonl", [*LINES, *map(verl_line, range(CHUNK))], 3),
        ("verifiers", "results.jsonl", [episode(n) for n in range(50)], 2),
    ],
)
def test_the_stream_of_a_child_is_the_one_of_this_process(
    format_: str, name: str, lines: list[Any], num_slices: int, store: storage.Store,
    tmp_path: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    folder = tmp_path / "dump"
    folder.mkdir()
    write_lines(folder / name, lines)
    write_lines(folder / f"8{name}", lines[:20])
    theirs = import_here(store, format_, folder, name="mine", temperature=0.5)
    monkeypatch.setattr(import_child, "MIN_BYTES", 10**9)
    here = storage.open(tmp_path / "here", create=True)
    ours = import_here(here, format_, folder, name="mine", temperature=0.5)
    assert len(children) == 1
    assert events_of(store) == events_of(here)
    assert len(store.read("imports")) == num_slices
    assert vars(theirs) | {"elapsed_s": 0} == vars(ours) | {"elapsed_s": 0}
    assert not storage.verify(store, deep=True)


def test_what_a_folder_has_more_of_is_read_by_a_child_too(
    store: storage.Store, tmp_path: Path, children: list[Any]
):
    folder = verl_folder(tmp_path / "dump", 16)
    import_here(store, "verl", folder)
    with (folder / "1.jsonl").open("a") as file:
        file.write(json.dumps(verl_line(99, step=1)) + "\n")
    verl_folder(folder, 30, start=16)
    done = import_here(store, "verl", folder)
    assert (done.num_lines, done.num_lines_before) == (15, 16)
    head = store.head()
    assert import_here(store, "verl", folder).ended == "nothing to do"
    assert store.head() == head
    assert len(children) == 3


@pytest.mark.usefixtures("children")
def test_lines_that_are_none_are_named_and_nothing_is_written(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "1.jsonl", ["{", "{"])
    with pytest.raises(ImporterError, match=r"2 of 2 lines .* \(lines 1, 2\)"):
        import_here(store, "verl", path)
    assert store.head().number == 0


@pytest.mark.usefixtures("children")
def test_an_error_in_the_child_is_the_error(tmp_path: Path):
    unreadable = Path("/proc/self/mem")
    for parts in (made_parts(reading(), [unreadable]), parts_of_child(reading(), [unreadable])):
        with pytest.raises(ImporterError, match="cannot be read: Input/output error"):
            list(parts)
    with pytest.raises(FileNotFoundError) as error:
        list(parts_of_child(reading(), [tmp_path / "gone"]))
    assert "in made_parts" in error.value.__notes__[0]


@pytest.mark.usefixtures("children")
def test_a_child_that_somebody_ends_is_an_error(tmp_path: Path, children: list[Any]):
    path = write_lines(tmp_path / "1.jsonl", map(verl_line, range(2 * CHUNK)))
    parts = parts_of_child(reading(), [path])
    assert next(parts) == Looked()
    children[0].kill()
    with pytest.raises(storage.StorageError, match="ended with -9; import again"):
        list(parts)


def test_ctrl_c_ends_it_after_the_part_at_work(
    store: storage.Store, tmp_path: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch
):
    path = write_lines(tmp_path / "1.jsonl", map(verl_line, range(2 * CHUNK)))
    submit = importing._submit

    def interrupt(*arguments: Any) -> None:
        submit(*arguments)
        for pid in (children[0].pid, os.getpid()):  # the child leaves it to this process
            os.kill(pid, signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(importing, "_submit", interrupt)
        done = import_here(store, "verl", path)
    assert (done.ended, done.num_lines) == ("interrupted", CHUNK)
    assert import_here(store, "verl", path).num_lines == CHUNK
    assert ask(store, "select count(*), count(distinct sample_index) from rollouts") == [
        (2 * CHUNK, 4)
    ]


def test_a_child_loads_no_model_library_and_no_database():
    code = (
        "import sys, flows.import_child; print([name for name in "
        "('torch', 'duckdb', 'transformers', 'prefect', 'polars', 'rich') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def import_with_child(store_path: Path, path: Path) -> None:
    import_child.MIN_BYTES = 0
    os.sched_getaffinity = lambda _: {0, 1}  # type: ignore[assignment]
    import_here(storage.open(store_path), "verl", path)


def children_of(pid: int) -> list[int]:
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(number) for path in paths for number in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_an_import_killed_at_random_instants_loses_nothing_and_leaves_no_child(
    store: storage.Store, tmp_path: Path
):
    """Two kills -9, then the end; the stream is the one of an import in one process."""
    path = write_lines(tmp_path / "1.jsonl", map(verl_line, range(6 * CHUNK)))
    processes = multiprocessing.get_context("forkserver")
    instant, left = random.Random(7), []
    whole = storage.open(tmp_path / "whole", create=True)
    import_here(whole, "verl", path)
    for _ in range(2):
        before = num_commits(store.path)
        process = processes.Process(target=import_with_child, args=(store.path, path))
        process.start()
        wait_until(lambda b=before: num_commits(store.path) > b + 1)
        assert process.pid is not None
        left += children_of(process.pid)
        time.sleep(instant.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert len(left) == 2
    wait_until(lambda: not any(map(is_alive, left)))
    last = processes.Process(target=import_with_child, args=(store.path, path))
    last.start()
    last.join()
    reader = storage.open(store.path)
    assert events_of(reader) == events_of(whole)
    assert not storage.verify(reader, deep=True)
