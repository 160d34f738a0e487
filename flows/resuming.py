"""Going on with a dead run in a process of its own: an engine wants a process for itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flows.cli import EXIT_INTERRUPTED, EXIT_SUPERSEDED

_SHOWN_BYTES = 2_000  # of what a failed child said
_FINE = (0, EXIT_SUPERSEDED, EXIT_INTERRUPTED)  # superseded: another process resumed it


def resume_run(store_path: Path, run_id: str) -> str | None:
    """Train a stored run to its end; return None, or what its process said when it failed.

    The child writes to a file, which outlives this process: a broken pipe would end the training.
    When this process is asked to stop, so is the child, which then finishes its batch.
    """
    command = [
        sys.executable, "-m", "flows.cli", "train", "--resume", run_id, "--store", str(store_path),
    ]  # fmt: skip
    # Variables with two underscores tell a process that it is a flow run; the child is none.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT__")}
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
        ) as child,
    ):
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            raise
        if code in _FINE:
            return None
        said.seek(max(0, said.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        text = said.read().decode(errors="replace").strip()
    return f"exit code {code}: {text}"
