"""Two processes on one run: one goes on, the other stops superseded; nothing is doubled."""

import signal
from pathlib import Path

import pytest

import storage
from tests.flows.conftest import RUN_ID, fingerprint, num_commits, start_child

EXIT_SUPERSEDED = 4


@pytest.mark.slow
def test_the_second_writer_continues_and_the_first_stops(
    tmp_path: Path, uninterrupted: storage.Store
):
    path = tmp_path / "store"
    first_log, second_log = tmp_path / "first.txt", tmp_path / "second.txt"
    first = start_child(
        path, first_log, "smoke", "--run-id", RUN_ID, "--set", "tracking.mlflow=false"
    )
    while num_commits(path) < 3:
        assert first.poll() is None, first_log.read_text()
    first.send_signal(signal.SIGSTOP)  # until the second has opened the run
    commits = num_commits(path)
    second = start_child(path, second_log, "--resume", RUN_ID)
    while num_commits(path) == commits:
        assert second.poll() is None, second_log.read_text()
    first.send_signal(signal.SIGCONT)
    assert first.wait(240) == EXIT_SUPERSEDED, first_log.read_text()
    assert second.wait(240) == 0, second_log.read_text()

    store = storage.open(path)
    assert fingerprint(store) == fingerprint(uninterrupted)
    assert not storage.verify(store, deep=True)
