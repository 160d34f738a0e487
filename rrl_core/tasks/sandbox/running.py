"""Runs untrusted Python in a child process, and ends it in time with all that it started.

What the isolation is worth is not believed but probed, once a process: `isolation()` runs code that
looks for the network, the parent's files and processes, and other rights. Where it finds any, the
level is `limits_only`: memory, time, files and processes are limited, but the code can read what
its user can, and reach the network.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.sandbox.lines import Ending, LineReader

Isolation = Literal["namespaces", "limits_only"]

CHILD = Path(__file__).with_name("child.py")
START_LIMIT_S = 20.0  # for the interpreter, before any candidate code
END_LIMIT_S = 1.0
FIRST_UID, NUM_UIDS = 2_000_000_000, 50_000_000  # far above what systems give to users
UIDS_PER_PROCESS = 1000
_uid_numbers = itertools.count()


@dataclass(frozen=True)
class Limits:
    """What a child may use: seconds for all its tests together, memory per process, output."""

    time_limit_s: float = 4.0
    memory_mb: int = 256
    output_kb: int = 512


@dataclass(frozen=True)
class Outcome:
    """What came back, at most one of the `lines` for a test.

    `ending` is "complete" with a line for each test, "ended" where the child stopped before,
    "timeout" and "output" where it went over a limit, and "failed" where it never came to run the
    candidate; `failure` says why.
    """

    lines: tuple[list[Any], ...]
    ending: Ending | Literal["failed"]
    failure: str = ""


Inputs = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]  # encoded arguments of each test


def run_candidate(
    source: str, entry: str, inputs: Inputs, limits: Limits, isolation: Isolation
) -> Outcome:
    """Run `entry` of `source` on each of `inputs`, in one child; never raises for what it does.

    Args:
        source: Python text, untrusted.
        entry: name of the function to call.
        inputs: arguments and named arguments of each call, as `child.encode` gives them.
        limits: what the child may use.
        isolation: as `isolation()` returns it.
    """
    with _folder(isolation) as (folder, uid):
        job = {
            "source": source,
            "entry": entry,
            "inputs": inputs,
            "has_namespaces": isolation == "namespaces",
            "folder": folder,
            "uid": uid,
            "time_limit_s": limits.time_limit_s,
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.memory_mb << 17,
        }
        with _started(job) as output:
            lines = LineReader(output, limits.output_kb << 10)
            ending = lines.read(1, START_LIMIT_S)
            if ending != "complete" or lines.found[0][0] != "ready":
                why = str(lines.found[0][-1]) if lines.found else "it ended before it was ready"
                return Outcome((), "failed", why)
            ending = lines.read(1 + len(inputs), limits.time_limit_s)
    return Outcome(tuple(lines.found[1:]), ending)


@functools.cache
def isolation() -> Isolation:
    """Return how well a child is kept apart here, as found by trying to get out of one.

    Raises:
        TaskError: this system cannot run a child at all.
    """
    if not sys.platform.startswith("linux"):
        raise TaskError(
            f"expected Linux to run untrusted code; came {sys.platform}; run it in a container"
        )
    for level in ("namespaces", "limits_only"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            facts = [str(CHILD), server.getsockname()[1]]
            outcome = run_candidate(_PROBE, "probe", [(facts, {})], Limits(), level)
        is_kept_in = outcome.lines == (["value", []],)
        if is_kept_in or (level == "limits_only" and outcome.ending == "complete"):
            return level
    raise TaskError(
        f"expected to run Python code in a child process; came `{outcome.failure}` "
        f"({outcome.ending}); is this Linux 5.3 or later, and may processes be started?"
    )


_PROBE = """
import os, socket
def sees_parent():
    if os.getppid() == 0:
        raise ProcessLookupError
def probe(file, port):
    def tries(what):
        try:
            what()
        except OSError:
            return False
        return True
    found = {
        "parent's process": sees_parent,
        "parent's file": lambda: open(file).close(),
        "processes": lambda: os.listdir("/proc/1"),
        "network": lambda: socket.create_connection(("127.0.0.1", port), 1).close(),
        "rights": lambda: os.chroot("/tmp"),
        "files": lambda: open("/probe", "w").close(),
    }
    return [name for name, what in found.items() if tries(what)]
"""


@contextlib.contextmanager
def _folder(isolation: Isolation) -> Iterator[tuple[str | None, int | None]]:
    """Give a temporary folder where the child has none of its own, and an unused user for it."""
    uid = _unused_uid()
    if isolation == "namespaces":
        yield None, uid
        return
    folder = tempfile.mkdtemp(prefix="rrl-candidate-")
    try:
        if uid is not None:
            os.chown(folder, uid, uid)
        yield folder, uid
    finally:
        shutil.rmtree(folder, onerror=_remove_anyway)


def _unused_uid() -> int | None:
    """Return a user that nobody has, another one for each child; None without the right to it.

    Root of a container may only be given a few thousand users: then one of the last of them.
    """
    if os.geteuid() != 0:
        return None
    number = os.getpid() * UIDS_PER_PROCESS + next(_uid_numbers) % UIDS_PER_PROCESS
    with open("/proc/self/uid_map") as file:
        ends = [int(first) + int(count) for first, _, count in map(str.split, file)]
    if max(ends) > FIRST_UID + NUM_UIDS:
        return FIRST_UID + number % NUM_UIDS
    return max(ends) - 6000 + number % 5000 if max(ends) > 10_000 else None


def _remove_anyway(function: Any, path: str, error: Any) -> None:
    """Remove what the child forbade its own user to touch."""
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


@contextlib.contextmanager
def _started(job: Mapping[str, Any]) -> Iterator[int]:
    """Start the launcher and give its output; on leaving, all that it started is ended."""
    stdin = os.memfd_create("job")
    control, our_control = os.pipe()
    try:
        with open(stdin, "wb", closefd=False) as stream:
            stream.write(json.dumps(job).encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", str(CHILD), str(control)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            env={"PYTHONHASHSEED": "0"}, pass_fds=(control,), start_new_session=True,
        )  # fmt: skip
    except OSError:
        os.close(our_control)
        raise
    finally:
        os.close(stdin)
        os.close(control)
    assert process.stdout is not None
    try:
        yield process.stdout.fileno()
    finally:
        os.close(our_control)  # the launcher ends the child and itself
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
