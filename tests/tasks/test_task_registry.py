"""Tasks by name, and what their parameters may be."""

import subprocess
import sys

import pytest

from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.registry import TASKS, build_task


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(TaskError, match=r"among arithmetic, code, .*jsonl.*; came `chess`"):
        build_task("chess", {})


def test_an_unknown_parameter_is_refused_with_the_known_ones():
    with pytest.raises(TaskError, match=r"parameter `digits`.* parameters are .*max_digits"):
        build_task("arithmetic", {"digits": 2})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("arithmetic", {"num_train": "many"}, "parameter `num_train`: .*; came 'many'"),
        ("arithmetic", {"num_train": 0}, "greater than or equal to 1; came 0"),
        ("arithmetic", {"kind": "algebra"}, "'chain_sum' or 'basic_arithmetic'; came 'algebra'"),
        ("arithmetic", {"operators": ["^"]}, "parameter `operators.0`"),
        ("arithmetic", {"reward": "best"}, "expected `module:function` or one of final_number"),
        ("jsonl", {}, "parameter `path`: Field required"),
        ("jsonl", {"path": "x", "eval_fraction": 1}, "less than 1; came 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, params, message):
    with pytest.raises(TaskError, match=message):
        build_task(name, params)


def test_every_parameter_is_described():
    for kind in TASKS.values():
        assert all(field.description for field in kind.settings.model_fields.values())


def test_tasks_load_no_heavy_library():
    code = "import sys, rrl_core.tasks.registry; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "datasets", "reasoning_gym", "numpy", "polars"}
    assert not heavy & set(run.stdout.split())
