"""The examples of docs/tasks.md work as written."""

import doctest
import re
import sys
import tomllib
from pathlib import Path

import pytest

from rrl_core.tasks.own import check_solutions
from rrl_core.tasks.protocol import environment_of
from rrl_core.tasks.registry import TASKS, build_task
from rrl_core.tasks.replies import reply_all

DOC = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")


def block(language: str, containing: str = "") -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL)
    return next(text for text in blocks if containing in text)


def test_the_problems_the_config_and_the_reward_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "problems.jsonl").write_text(block("jsonl"))
    (tmp_path / "my_reward.py").write_text(block("python"))

    params = tomllib.loads(block("toml"))["task"]
    task = build_task(params.pop("name"), params)
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    assert {prompt.answer for prompt in prompts} == {"7", "12", "11"}
    assert all(prompt.messages[0]["content"].endswith("#### <number>") for prompt in prompts)

    example = doctest.DocTestParser().get_doctest(block("pycon"), {}, "tasks.md", None, None)
    report: list[str] = []
    results = doctest.DocTestRunner().run(example, out=report.append)
    assert results.attempted == 5
    assert results.failed == 0, "".join(report)
    del sys.modules["my_reward"]


@pytest.mark.slow
def test_the_reasoning_example_works():
    params = tomllib.loads(block("toml", "reasoning_gym"))["task"]
    task = build_task(params.pop("name"), {**params, "num_train": 5, "num_eval": 2})
    assert len(task.prompts("train")) == 5


def test_the_environment_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "numbers.jsonl").write_text('{"prompt": "Guess.", "answer": 7}\n')
    (tmp_path / "my_game.py").write_text(block("python", "higher_or_lower"))

    params = tomllib.loads(block("toml", "my_game"))["task"]
    task = build_task(params.pop("name"), {**params, "eval_fraction": 0})
    environment = environment_of(task)
    assert (environment.max_turns, environment.turn_tokens) == (6, 8)
    [prompt] = task.prompts("train")
    said = []
    for guess in ("what?", "4", "9", " 7\n"):
        turn = {"role": "assistant", "content": guess}
        [reply] = reply_all(environment, [prompt], [(turn,)])
        assert reply.status == "ok"
        said += [message["content"] for message in reply.messages]
    assert said == ["Say a number.", "Higher.", "Lower."]
    assert task.scorers[0](prompt, "4\nuser\nHigher.\nassistant\n7").value == 1
    del sys.modules["my_game"]


def test_every_task_and_main_parameter_exists():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", DOC, re.MULTILINE)
    assert [name for name, _ in rows] == list(TASKS)
    for name, parameters in rows:
        named = set(re.findall(r"`(\w+)`", parameters))
        assert named <= set(TASKS[name].settings.model_fields)


def test_the_own_task_works_and_takes_forty_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = block("python", "def build(")
    assert len(source.splitlines()) <= 45
    (tmp_path / "my_task.py").write_text(source)
    params = tomllib.loads(block("toml", "my_task"))["task"]
    task = build_task(params.pop("name"), params)
    assert [len(task.prompts(split)) for split in ("train", "eval")] == [10, 2]
    assert check_solutions(task) == 12
    prompt = task.prompts("train")[0]
    judged = [task.scorers[0](prompt, text) for text in ("radec", "radce", "cedar?", "")]
    assert [score.value for score in judged] == [1.0, 0.6, 0.0, 0.0]
    assert [score.feedback for score in judged][:2] == ["", "mixed up"]
    del sys.modules["my_task"]
