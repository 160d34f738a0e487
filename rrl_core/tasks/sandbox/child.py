"""Runs one candidate function on inputs, in a child process that gives up what it can first.

Started as a script by `rrl_core.tasks.sandbox.running`, with the standard library alone. The job
(JSON on standard input) holds source and inputs, never an expected output: whatever the candidate
reads or forges, all it can send is one value per test, and the parent compares those.

    launcher            no candidate code; ends when the child has, or when the control pipe closes
      '- child          process 1 of its own namespaces; drops its rights; runs the candidate

Lines sent, each a JSON list: ["ready", null], then ["broken", exception] if the source could not be
run, else for each test, in order, ["value", encoded] or ["raised", exception].

Values travel as JSON: None, booleans, text, finite floats, lists and integers below 2**63 as they
are; anything else as an object with one key, its kind (`encode`).
"""

import ctypes
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

NEW_NAMESPACES = 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x04000000
NEW_USER = 0x10000000  # above: mounts, network, pids, ipc, host name
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAPABILITY_VERSION = 0x20080522
MAX_PROCESSES = 8
MAX_FILES = 64
SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null",
                "/dev/urandom")  # fmt: skip
HUGE = 1 << 63

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Start the child in what isolation the job asks for, and end it when asked to."""
    control = int(sys.argv[1])
    with open(0, "rb", closefd=False) as stream:
        job = json.loads(stream.read())
    try:
        if job["has_namespaces"]:
            _unshare()
        else:
            _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        child = os.fork()
        if child == 0:
            os.close(control)
            _confine(job)
            _run(job, _only_result_open())
            os._exit(0)
    except Exception as error:  # before any candidate code: the parent is told and gives no verdict
        _send(1, ["failed", f"{type(error).__name__}: {error}"])
        os._exit(1)
    os.close(1)
    _watch(child, control)


def encode(value: object) -> object:
    """Return `value` as what JSON can say.

    Of a subclass only the content of its built-in base is read, by the base's own methods.

    Raises:
        TypeError: the value is of no kind that is compared.
    """
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -HUGE < number < HUGE else {"int": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"float": str(real)}
    if isinstance(value, complex):
        return {"complex": complex.__repr__(value)}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    if isinstance(value, set):
        return {"set": [encode(item) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"frozenset": [encode(item) for item in frozenset.__iter__(value)]}
    raise TypeError(f"a {type(value).__name__} cannot be compared")


def decode(encoded: object) -> object:
    """Return the value that `encode` was given.

    Raises:
        ValueError: this is nothing that `encode` returns.
    """
    if isinstance(encoded, list):
        return [decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    [(kind, content)] = encoded.items()
    if kind not in _DECODERS:
        raise ValueError(f"no value is of kind {kind!r}")
    return _DECODERS[kind](content)


_DECODERS: dict[str, Callable[[Any], object]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "tuple": lambda items: tuple(map(decode, items)),
    "dict": lambda items: {decode(key): decode(item) for key, item in items},
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
}


def _unshare() -> None:
    """Enter new namespaces; without root's rights in a user namespace that maps this user only."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", NEW_NAMESPACES | (NEW_USER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                           ("gid_map", f"{gid} {gid} 1")):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _confine(job: dict[str, Any]) -> None:
    """Give up files, user, rights and resources; nothing of it can be taken back."""
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["has_namespaces"]:
        _enter_bare_root(job["memory_bytes"])
    else:
        os.chdir(job["folder"])
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[job["uid"]] * 3)
        os.setresuid(*[job["uid"]] * 3)
    elif job["has_namespaces"]:
        header, none = struct.pack("II", CAPABILITY_VERSION, 0), bytes(24)
        _call("capset", header, none)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the user: changing it resets
    seconds = math.ceil(job["time_limit_s"]) + 1  # for what might escape: the parent's clock rules
    limits = (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, job["memory_bytes"]),
    )
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))
    os.environ.clear()
    os.umask(0o077)


def _enter_bare_root(size_bytes: int) -> None:
    """Make a file tree of libraries, read-only, and an empty /tmp in memory the only one there is.

    It is put together on /proc: a folder that is always there and holds none of the libraries.
    """
    root = "/proc"
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    shown: list[str] = []
    for path in (*SYSTEM_PATHS, *map(os.path.realpath, sys.path), *sys.path):
        if os.path.exists(path) and not any(path.startswith(above + "/") for above in shown):
            _show(path, root)
            shown += [] if os.path.islink(path) else [path]
    for path in _hidden():
        if os.path.isdir(root + path):
            _mount("tmpfs", root + path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.mkdir(root + "/tmp")
    flags = MS_NOSUID | MS_NODEV
    _mount("tmpfs", root + "/tmp", "tmpfs", flags, f"mode=1777,size={size_bytes // 8},nr_inodes=4k")
    _mount("none", root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp")


def _hidden() -> Iterator[str]:
    """Yield the folders that may stand below what is shown but are nobody's business.

    Of this package, because problems with their expected values may lie there.
    """
    for folder in (*map(os.path.realpath, sys.path), "/usr/lib/python3"):
        yield from (f"{folder}/site-packages", f"{folder}/dist-packages")
    yield os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def _show(path: str, root: str) -> None:
    """Make `path` visible below `root`, read-only."""
    target = root + path
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, MS_BIND | MS_REC)
    # What the original mount forbids must stay forbidden; the lowest four flags have equal values.
    kept = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    dev = 0 if path.startswith("/dev/") else MS_NODEV
    _mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept | dev)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(),
          ctypes.c_ulong(flags), options.encode())  # fmt: skip


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _only_result_open() -> int:
    """Close every file but the result pipe, and return it; the standard ones lead nowhere."""
    result = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.closerange(3, result)
    os.closerange(result + 1, 4096)
    return result


def _run(job: dict[str, Any], result: int) -> None:
    _send(result, ["ready", None])
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    try:
        exec(compile(job["source"], "<candidate>", "exec"), module.__dict__)
        function = getattr(module, job["entry"])
    except BaseException as error:
        _send(result, ["broken", type(error).__name__])
        return
    for inputs, named in job["inputs"]:
        try:
            returned = function(*map(decode, inputs), **{k: decode(v) for k, v in named.items()})
            line = ["value", encode(returned)]
            _send(result, line)
        except BaseException as error:
            _send(result, ["raised", type(error).__name__])


def _send(result: int, line: list[object]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(result, data) :]


def _watch(child: int, control: int) -> None:
    """Wait for the child's end or the closing of the control pipe; end everything there is."""
    select.select([control, os.pidfd_open(child)], [], [])
    os.kill(child, signal.SIGKILL)  # not waited for yet: the pid is still its own
    os.waitpid(child, 0)
    while True:  # under limits only: its orphans, which are this subreaper's children now
        for orphan in _children():
            os.kill(orphan, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> Iterator[int]:
    own = os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.exists("/proc") else ()):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == own:
            yield int(name)


if __name__ == "__main__":
    main()
