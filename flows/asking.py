"""One query in a process of its own, which hard limits can end.

DuckDB's own limits are soft: it notices an interrupt only between vectors, and not at all while it
plans (a constant regular expression went on for minutes, and Python with it), and counts no memory
of single values. So the kernel bounds address space and processor time of the process that asks and
forbids it to write any file, and this one waits for it, ends it when time is up, and stays free to
hear Ctrl-C. Nothing is lost by ending it: a query changes nothing.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from storage import errors

if TYPE_CHECKING:
    from storage import Store

GRACE_S = 5.0  # for start and text, beyond the time limit of the query
MAX_MORE_BYTES = 4 * 2**30  # of address space: DuckDB's limit, and as much again for Python
_THREAD_BYTES = (
    160 * 2**20
)  # of address space that a thread's stack and heap reserve, mostly unused
# Not `-c`: where no file is the main one DuckDB takes the process for a person's, and draws the
# progress of slow queries into the answer.
_MAIN = ("-m", "flows.asking")


@dataclass(frozen=True)
class Question:
    """What is asked of a store; `format_` is table, csv, json or parquet."""

    store: str
    query: str
    as_of: int | None
    allow_damaged: bool
    format_: str
    time_limit_s: float


@dataclass(frozen=True)
class Answer:
    """An answer in its format, and the damaged segments it had to do without."""

    data: bytes
    damaged: dict[str, str]


def ask(question: Question) -> Answer:
    """Return the answer to a question.

    Raises:
        StorageError: what the other process met, or that it was ended.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", *_MAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        start_new_session=True,  # Ctrl-C comes to this process alone
    )
    seconds = question.time_limit_s + GRACE_S
    try:
        said, _ = child.communicate(json.dumps(asdict(question)).encode(), timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise errors.QueryError(
            f"the query was ended after {seconds:g} s; ask for less, or give it more with "
            "`--time-limit`"
        ) from error
    finally:
        child.kill()
        child.wait()
    head, _, data = said.partition(b"\n")
    if child.returncode != 0 or not head:
        raise errors.QueryError(
            f"expected an answer, but the process of the query ended with {child.returncode}: it "
            "needed more memory or time than it may have; ask for less"
        )
    found = json.loads(head)
    if "error" in found:
        raise getattr(errors, found["error"])(found["message"])
    return Answer(data, found["damaged"])


def main() -> NoReturn:
    """Answer the question on stdin to stdout: a line of JSON, then the data."""
    question = Question(**json.load(sys.stdin))
    limit_process(question.time_limit_s + GRACE_S)
    data = b""
    try:
        data, damaged = _answer(question)
        head: dict[str, Any] = {"damaged": damaged}
    except errors.StorageError as error:
        head = {"error": type(error).__name__, "message": str(error)}
    except MemoryError:
        message = "the answer needs too much memory; ask for fewer columns or rows"
        head = {"error": "QueryError", "message": message}
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + data)
    sys.stdout.flush()
    os._exit(0)  # what DuckDB still does is of no use


def limit_process(seconds: float, max_more_bytes: int = MAX_MORE_BYTES) -> None:
    """Take from this process what a query does not need, for good.

    Args:
        seconds: of processor time, on all cores.
        max_more_bytes: address space beyond what is taken already and what threads reserve.
    """
    num_cores = os.cpu_count() or 1
    for kind, most in (
        (resource.RLIMIT_AS, _address_space_bytes() + max_more_bytes + num_cores * _THREAD_BYTES),
        (resource.RLIMIT_CPU, int(seconds + 1) * num_cores),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def _address_space_bytes() -> int:
    """Return how much address space the process has; 0 where the kernel does not say."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return num_pages * resource.getpagesize()


def _answer(question: Question) -> tuple[bytes, dict[str, str]]:
    import storage

    store = storage.open(question.store)
    how: dict[str, Any] = {
        "as_of": question.as_of,
        "allow_damaged": question.allow_damaged,
        "time_limit_s": question.time_limit_s,
    }
    if question.format_ == "parquet":
        return _parquet(store, question.query, how)
    result = storage.console.run_query(store, question.query, **how)
    text = storage.console.as_text(store, result, question.format_)
    return text.encode(errors="backslashreplace"), result.damaged


def _parquet(store: "Store", query: str, how: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    from storage import console
    from storage.answers import parquet_bytes

    rows, damaged = console.run_to_arrow(store, query, **how)
    return parquet_bytes(rows), damaged


if __name__ == "__main__":
    main()
