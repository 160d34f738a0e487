"""Ctrl-C at a real terminal: the whole process group hears it, the run stops whole and resumes."""

import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest

import storage
from tests.flows.conftest import RUN_ID, fingerprint, num_commits

INTERRUPTED = 130
DEADLINE_S = 240
COMMITS = 9  # of the 31 of a smoke run


def run_at_terminal(
    arguments: list[str], store_path: Path, interrupt_at: int | None
) -> tuple[int, str]:
    """Run `rrl` at a terminal of its own and press Ctrl-C once the store has so many commits."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "flows.cli", *arguments])
    shown, deadline = b"", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if interrupt_at is not None and num_commits(store_path) >= interrupt_at:
            os.write(terminal, b"\x03")
            interrupt_at = None
        if select.select([terminal], [], [], 0.01)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("orchestrator", ["prefect", "none"])
def test_ctrl_c_stops_between_batches_and_the_run_goes_on(
    orchestrator: str, tmp_path: Path, uninterrupted: storage.Store
):
    path = tmp_path / "store"
    common = ["--orchestrator", orchestrator, "--store", str(path)]
    first = ["train", "smoke", "--run-id", RUN_ID, "--set", "tracking.mlflow=false", *common]
    code, shown = run_at_terminal(first, path, interrupt_at=COMMITS)
    assert code == INTERRUPTED, shown
    assert "stopping after this batch" in shown
    assert re.search(rf"rrl train --resume {RUN_ID} --store \S+", shown)
    assert "Traceback" not in shown
    assert storage.open(path).read("runs", run_id=RUN_ID)[-1]["what"] == "interrupted"

    code, shown = run_at_terminal(["train", "--resume", RUN_ID, *common], path, interrupt_at=None)
    assert code == 0, shown
    assert fingerprint(storage.open(path)) == fingerprint(uninterrupted)
