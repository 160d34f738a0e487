"""What the forgetting study claims, with 8 runs an arm, and its command."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.studies.forgetting.arms import ARMS, TUNING, named
from benchmarks.studies.forgetting.training import train

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(8)


@cache
def reward(name):
    (arm,) = named([name])
    return train(arm, SEEDS).reward


def gap(first, second):
    return (reward(first) - reward(second)).mean()


def test_replayed_states_with_credit_find_what_grpo_forgets():
    assert gap("rrl-state direct", "grpo") > 0.3


@pytest.mark.slow
def test_the_judgement_decides_which_states_help():
    assert gap("rrl-state direct", "direct, uniform picks") > 0.2


@pytest.mark.slow
def test_judgements_must_be_renewed():
    assert gap("rrl-state direct", "direct, stale scores") > 0.2


def test_retrying_prompts_is_no_better_than_going_on():
    assert abs(gap("rrl-prompt", "grpo")) < 0.1


@pytest.mark.slow
def test_where_nothing_is_forgotten_there_is_nothing_to_gain():
    assert reward("s = 0: grpo").mean() > 0.95
    assert abs(gap("s = 0: rrl-state direct", "s = 0: grpo")) < 0.02


def test_arms_have_names_of_their_own():
    for arms in (ARMS, TUNING):
        assert len({arm.name for arm in arms}) == len(arms)
    with pytest.raises(ValueError, match="'gold'"):
        named(["gold"])


def run(*options):
    command = [sys.executable, "-m", "benchmarks.studies.forgetting", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_command_prints_and_writes_the_table(tmp_path):
    out = tmp_path / "table.md"
    done = run("--seeds", "1", "--arms", "grpo", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["grpo"]
    assert row["num_sequences"] == 400 * 16 * 8
    assert f"| grpo | {row['reward']:.3f} | - |" in out.read_text()  # one seed: no interval
    refused = run("--arms", "gold")
    assert refused.returncode == 2
    assert "expected arms of" in refused.stderr
