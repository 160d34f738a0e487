"""A killed study goes on with the same command and loses nothing; its last run may outlive it."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from flows.study import load_study
from tests.flows.conftest import fingerprint, kill_after, num_commits
from tests.flows.test_resume import committed_rows

STUDY = """
[study]
name = "tiny"
base = "smoke"
seeds = [0]
budget_tokens = 250
baseline = "plain"
set = ["tracking.mlflow=false", "sampler.engine=fake", "evaluation.every=1", "evaluation.prompts=4"]

[arms]
plain = []
wide = ["sampler.group_size=6"]
"""


def start(path: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "flows.cli", "study", str(path / "study.toml"), "--json",
        "--orchestrator", "none", "--store", str(path / "store"), "--output", str(path / "results"),
    ]  # fmt: skip
    with (path / "out").open("wb") as out, (path / "log").open("ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=out, stderr=log, env=environment)


@pytest.mark.slow
def test_a_killed_study_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path):
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        (folder / "study.toml").write_text(STUDY)
    assert start(folders[0]).wait(300) == 0, (folders[0] / "log").read_text()
    whole, last = storage.open(folders[0] / "store"), num_commits(folders[0] / "store") - 2
    commits = random.Random(7).randint(2, last)
    assert kill_after(start(folders[1]), folders[1] / "store", commits, 0.0)
    before = committed_rows(storage.open(folders[1] / "store"))
    assert start(folders[1]).wait(300) == 0, (folders[1] / "log").read_text()
    killed = storage.open(folders[1] / "store")
    after = committed_rows(killed)
    assert {event_id: after.get(event_id) for event_id in before} == before
    for run in load_study(folders[0] / "study.toml").runs():
        assert fingerprint(killed, run.run_id) == fingerprint(whole, run.run_id)
    arms = [json.loads((folder / "out").read_text())["arms"] for folder in folders]
    for of_study in arms:
        for arm in of_study:
            del arm["minutes"]
    assert arms[0] == arms[1]
