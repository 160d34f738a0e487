"""The parts of a large import, made by a process of its own.

To read, decode and group lines takes the interpreter as long as to hash and commit their rows: a
child does the one while this process does the other, on two cores.

1. What comes is what `made_parts` yields here, error or not.
2. The child only reads; it is one part ahead and waits, so memory does not grow with the files.
3. It ends with this process, however that ends. Ctrl-C comes to this process alone.
"""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from flows.import_parts import Looked, MadePart, Reading, made_parts
from storage.errors import StorageError

MIN_BYTES = 4 * 2**20  # less is imported before a child would have started
_COLLECTED = 50_000  # objects: at Python's 700 a quarter of the time goes into looking at old lines
_PROTOCOL = 5  # copies Arrow's buffers once; `Connection.send` has an older one
_MAIN = ("-m", "flows.import_child")


def is_child_worth_it(files: Sequence[Path]) -> bool:
    """Tell whether a child makes it quicker: for large files, where there is a second core."""
    size = sum(path.stat().st_size for path in files)
    return size >= MIN_BYTES and len(os.sched_getaffinity(0)) > 1


def parts_of_child(
    reading: Reading, files: Sequence[Path]
) -> Generator[MadePart | Looked, None, None]:
    """Yield what `made_parts` does, from a child; here `reading` stays where it is.

    Raises:
        StorageError: the child was ended by somebody else.
        Exception: what was raised in the child.
    """
    here, there = Pipe()
    child = subprocess.Popen(
        [sys.executable, "-P", *_MAIN, str(there.fileno())],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        pass_fds=[there.fileno()],
        start_new_session=True,
    )
    there.close()
    try:
        with suppress(ConnectionError):  # it ended already: receiving says so
            here.send((reading, files))
        while (came := _received(here, child)) is not None:
            if isinstance(came, Exception):
                raise came
            yield came
    finally:
        here.close()
        child.kill()
        child.wait()


def _received(
    connection: Connection, child: "subprocess.Popen[bytes]"
) -> MadePart | Looked | Exception | None:
    """Return what the child sends next."""
    try:
        came: MadePart | Looked | Exception | None = connection.recv()
    except (EOFError, OSError) as error:
        raise StorageError(
            f"the process that reads the files ended with {child.wait()}; import again: it goes on "
            "where this ended"
        ) from error
    return came


def main() -> None:
    """Send the parts of the files that come first, then None; or what was raised."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    reading, files = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    gc.freeze()
    gc.set_threshold(_COLLECTED)
    try:
        for made in made_parts(reading, files):
            connection.send_bytes(pickle.dumps(made, _PROTOCOL))
        connection.send(None)
    except ConnectionError:
        return  # nobody waits for more
    except Exception as error:
        error.add_note(f"In the process that reads the files:\n{traceback.format_exc()}")
        with suppress(ConnectionError):
            connection.send(error)


def _end_with(connection: Connection) -> None:
    """End this process when the other end is closed."""
    connection.poll(None)  # nothing more is sent
    os._exit(1)


if __name__ == "__main__":
    main()
