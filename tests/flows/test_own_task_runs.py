"""The task that docs/tasks.md shows, and the reward it shapes, as a user runs them."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import storage
from flows.cli import app
from flows.config import load_config
from flows.judged import configured_task
from tests.flows.conftest import RUN_ID, run_here
from tests.tasks.test_tasks_doc import block

TINY = """
[model]
name = "tiny"
[sampler]
engine = "transformers"
prompts = 3
group_size = 3
max_tokens = 8
context_tokens = 256
[run]
iterations = 1
[evaluation]
prompts = 2
[tracking]
mlflow = false
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_task.py").write_text(block("python", "def build("))
    (tmp_path / "own.toml").write_text(block("toml", "my_task") + TINY)
    yield tmp_path
    sys.modules.pop("my_task", None)


def test_the_shown_task_trains_for_an_iteration(folder: Path):
    store = run_here(folder / "rrl-data", load_config(folder / "own.toml"))
    scores = store.read("scores", run_id=RUN_ID, iteration=1)
    assert {row["scorer"] for row in scores} == {"my_task:reward"}
    assert {row["status"] for row in scores} == {"ok"}
    assert len(store.read("learned_samples", run_id=RUN_ID)) == 9
    assert all("has_length" in json.loads(row["components_json"]) for row in scores)
    assert not storage.verify(store)


def test_a_dry_run_judges_the_reference_solutions(folder: Path):
    command = ["train", "own.toml", "--dry-run", "--store", str(folder / "none")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    source = (folder / "my_task.py").read_text()
    (folder / "my_task.py").write_text(source.replace("prompt.answer,", 'prompt.answer + "!",'))
    sys.modules.pop("my_task")
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert "the reference solution earned 0.0" in str(result.exception)


def test_the_shown_shaping_is_a_configuration(folder: Path):
    (folder / "shaped.toml").write_text("[task]\nnum_train = 3\n" + block("toml", "[reward]"))
    config = load_config(folder / "shaped.toml")
    reward, outcome, *_ = configured_task(config).scorers
    assert (reward.name, outcome.name) == ("shaped:final_number", "final_number")
    assert set(config.reward.model_dump()) == set(config.reward.model_fields_set)
