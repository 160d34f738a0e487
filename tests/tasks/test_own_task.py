"""A user's own task: loaded by name, refused with what it lacks, its solutions judged."""

import sys
import textwrap
from pathlib import Path

import pytest

from rrl_core.tasks.own import check_solutions
from rrl_core.tasks.prompts import PromptTask, ask, make_prompt
from rrl_core.tasks.protocol import Score, SolvedTask, TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import FunctionScorer

SOURCE = """
from rrl_core.tasks.prompts import PromptTask, ask, make_prompt
from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.scorers import BUILT_IN, load_reward


def build(size=3, word="count"):
    if size > 99:
        raise TaskError("size: expected 99 at most")
    prompts = [make_prompt("own", "train", ask(f"{word} {n}"), str(n), instruction="")
               for n in range(size)]
    return PromptTask("own", (BUILT_IN["final_number"],), prompts, [])


def nothing():
    return None


class Unnamed:
    name = "unnamed"
    scorers = (lambda prompt, completion: 1.0,)

    def prompts(self, split):
        return []


class Empty(Unnamed):
    scorers = (BUILT_IN["final_number"],)


class Twice(Empty):
    def prompts(self, split):
        return build(1).prompts("train") * 2
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_tasks.py").write_text(textwrap.dedent(SOURCE))
    yield
    sys.modules.pop("my_tasks", None)


def test_a_task_is_built_with_the_parameters_of_the_config():
    task = build_task("my_tasks:build", {"size": 2, "word": "say"})
    assert [p.messages[0]["content"] for p in task.prompts("train")] == ["say 0", "say 1"]
    assert not isinstance(task, SolvedTask)
    assert check_solutions(task) == 0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("my_tasks:", {}, "task: expected `module:function` or one of arithmetic, .*writing"),
        ("no_such_tasks:build", {}, "task `no_such_tasks:build`: importing `no_such_tasks` raised"),
        ("my_tasks:other", {}, "expected a function `other` in a Python file"),
        ("my_tasks:build", {"sise": 2}, "raised TypeError: .*unexpected keyword argument 'sise'"),
        ("my_tasks:build", {"size": 100}, "^size: expected 99 at most$"),
        ("my_tasks:build", {"size": 0}, "expected train prompts; came none"),
        ("my_tasks:nothing", {}, "came NoneType without name, scorers, prompts"),
        ("my_tasks:Unnamed", {}, "`scorers` are not functions with a name and a version"),
        ("my_tasks:Empty", {}, "there are none to train on"),
        ("my_tasks:Twice", {}, "two train prompts have the same `prompt_id`"),
    ],
)
def test_what_is_no_task_is_refused_with_what_it_lacks(name, params, message):
    with pytest.raises(TaskError, match=message):
        build_task(name, params)


def solved(reward) -> PromptTask:
    prompts = [make_prompt("t", "train", ask(f"{n}?"), str(n), instruction="") for n in range(3)]
    scorer = FunctionScorer("reward", "1", reward)
    return PromptTask("t", (scorer,), prompts, [], solution=lambda prompt: f"It is {prompt.answer}")


def test_reference_solutions_are_judged():
    task = solved(lambda prompt, completion: float(completion.endswith(prompt.answer)))
    assert isinstance(task, SolvedTask)
    assert check_solutions(task) == 3


calls = iter(range(100))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda p, c: float(c == p.answer), r"'0\?': the reference solution earned 0.0 \(ok\)"),
        (lambda p, c: Score(None, "unscorable", feedback="why"), r"earned None \(unscorable\) why"),
        (lambda p, c: 1.0, "an empty completion earned 1.0, as much as the solution"),
        (lambda p, c: 1.0 + next(calls), "when asked again"),
    ],
)
def test_a_reward_that_disagrees_with_the_solutions_is_found(reward, message):
    with pytest.raises(TaskError, match=message):
        check_solutions(solved(reward))
