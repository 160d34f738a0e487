"""The task `code`: our own problems, files of the known shapes, and what a completion earns."""

import json
import re

import pytest

from rrl_core.tasks.code import OWN_PROBLEMS
from rrl_core.tasks.code_tests import Test, Tests, find_source, read_assertions
from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.sandbox import running
from rrl_core.tasks.sandbox.values import Tolerance
from rrl_core.tasks.scorers import score_all

MBPP = {
    "task_id": 2,
    "text": "Double a number.",
    "code": "def half(x):\n    return x / 2\ndef double(x, times=1):\n    return x * 2",
    "test_setup_code": "LIMIT = 9",
    "test_list": [
        "assert double(2) == 4",
        "assert double(-1.5) == -3.0",
        "assert double('a') == 'aa'",
    ],
}
HUMAN_EVAL = {
    "task_id": "Own/0",
    "prompt": (
        'from typing import List\n\ndef longest(words: List[str]) -> str:\n    """Longest."""\n'
    ),
    "entry_point": "longest",
    "canonical_solution": "    return max(words, key=len)\n",
    "test": (
        "METADATA = {'author': 'x'}\n\n"
        "def check(candidate):\n    'All.'\n    assert True, 'yes'\n"
        "    assert candidate(['a', 'bb']) == 'bb', 'first'\n"
        "    assert candidate(['ccc']) == 'ccc'\n"
    ),
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only_prompt(path, **params):
    (prompt,) = build_task("code", {"path": path, "eval_fraction": 0, **params}).prompts("train")
    return prompt


def score(path, completion, **params):
    task = build_task("code", {"path": path, "eval_fraction": 0, **params})
    return score_all(task.scorers[0], task.prompts("train"), [completion])[0]


def own_rows():
    return [json.loads(line) for line in OWN_PROBLEMS.read_text().split("\n") if line]


def test_our_own_problems_are_enough_of_each_difficulty_and_all_scorable():
    task = build_task("code", {})
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    assert len(prompts) == len(own_rows()) >= 24
    for difficulty in ("easy", "medium", "hard"):
        assert sum(prompt.difficulty == difficulty for prompt in prompts) >= 8
    assert all(len(Tests.from_answer(prompt.answer).tests) >= 6 for prompt in prompts)
    assert task.prompts("train")
    assert task.prompts("eval")


def test_every_reference_solution_of_our_own_passes_and_a_stub_does_not():
    task = build_task("code", {"eval_fraction": 0})
    solutions = [f"Here:\n```python\n{row['code']}\n```" for row in own_rows()]
    scores = score_all(task.scorers[0], task.prompts("train"), solutions)
    assert [score.feedback for score in scores] == [""] * len(solutions)
    assert {score.value for score in scores} == {1.0}
    stubs = [
        f"def {prompt.meta['entry']}(*args):\n    return 'nothing'"
        for prompt in task.prompts("train")[::4]
    ]
    scores = score_all(task.scorers[0], task.prompts("train")[::4], stubs)
    assert {score.value for score in scores} == {0.0}


def test_a_mbpp_problem_asks_with_its_signature_and_first_assertion(tmp_path):
    prompt = only_prompt(write(tmp_path / "m.jsonl", MBPP), instruction="Go.", num_examples=1)
    assert prompt.messages[0]["content"] == (
        "Double a number.\nWrite the function `double(x, times=1)`.\n"
        "Example: assert double(2) == 4 Go."
    )
    tests = Tests.from_answer(prompt.answer)
    assert (tests.entry, tests.header) == ("double", "LIMIT = 9")
    assert tests.tests == (Test((2,), 4), Test((-1.5,), -3.0), Test(("a",), "aa"))


def test_a_human_eval_problem_is_completed_by_a_body_or_by_the_whole_function(tmp_path):
    path = write(tmp_path / "h.jsonl", HUMAN_EVAL)
    assert len(Tests.from_answer(only_prompt(path).answer).tests) == 2
    assert score(path, HUMAN_EVAL["canonical_solution"]).value == 1.0
    whole = HUMAN_EVAL["prompt"] + HUMAN_EVAL["canonical_solution"]
    assert score(path, f"```python\n{whole}```").value == 1.0
    # List is imported by the header.
    assert score(path, "def longest(w: List[str]):\n    return max(w, key=len)").value == 1.0
    assert score(path, "    return words[0]\n").value == 0.0


def test_reward_is_all_tests_or_with_partial_the_share(tmp_path):
    path = write(tmp_path / "m.jsonl", MBPP)
    two_of_three = "def double(x):\n    return x * 2 if x != 'a' else x"
    all_or_nothing, share = score(path, two_of_three), score(path, two_of_three, partial=True)
    assert (all_or_nothing.value, share.value) == (0.0, 2 / 3)
    assert all_or_nothing.components == share.components
    assert share.components == {"passed_share": 2 / 3, "num_tests": 3.0, "is_isolated": 1.0}
    assert share.feedback == "test 3 of 3: wrong value"


@pytest.mark.parametrize(
    ("completion", "feedback"),
    [
        ("def double(x):\n    return [][x]", "test 1 of 3: raised IndexError"),
        ("def double(x) return", "test 1 of 3: the program raised SyntaxError"),
        ("def other(x):\n    return x", "test 1 of 3: the program raised AttributeError"),
        ("", "test 1 of 3: the program raised AttributeError"),
        ("def double(x):\n    return object()", "test 1 of 3: raised TypeError"),
        ("raise type('x y', (Exception,), {})", "test 1 of 3: the program raised an exception"),
        ("import os\nos._exit(0)", "test 1 of 3: the program ended, or broke what it sends"),
        ("#" * 100_001, "test 1 of 3: the program ended, or broke what it sends"),
    ],
)
def test_feedback_is_diagnostic_and_shows_no_value(tmp_path, completion, feedback):
    judged = score(write(tmp_path / "m.jsonl", MBPP), completion)
    assert (judged.value, judged.status, judged.feedback) == (0.0, "ok", feedback)


def test_a_problem_that_cannot_be_taken_apart_is_unscorable_not_wrong(tmp_path):
    loop = {**MBPP, "test_list": ["for i in range(3): assert double(i) == 2 * i"]}
    path = write(tmp_path / "m.jsonl", MBPP, loop)
    task = build_task("code", {"path": path, "eval_fraction": 0})
    completions = ["def double(x):\n    return x * 2"] * 2
    scores = score_all(task.scorers[0], task.prompts("train"), completions)
    assert [(score.value, score.status) for score in scores] == [(1.0, "ok"), (None, "unscorable")]
    with pytest.raises(TaskError, match="came none that can be taken apart; the first: `for i in"):
        build_task("code", {"path": write(tmp_path / "n.jsonl", loop)})


CLAIMS = {
    "f(1, [2]) == 3": Test((1, [2]), 3),
    "f() == -1": Test((), -1),
    "f(a=1) == None": Test((), None, {"a": 1}),
    "f(1) is True": Test((1,), True),
    "f(1)": Test((1,), True),
    "not f(1)": Test((1,), False),
    "f(set([1, 2])) == {1, 2}": Test(({1, 2},), {1, 2}),
    "f((1,)) == tuple([1])": Test(((1,),), (1,)),
    "f(b'x') == {'a': [(1, 2)]}, 'why'": Test((b"x",), {"a": [(1, 2)]}),
    "f(2) == float('inf')": Test((2,), float("inf")),
    "abs(f(1) - 0.5) < 1e-6": Test((1,), 0.5, {}, Tolerance(1e-6)),
    "math.isclose(f(1), 0.5, rel_tol=0.01)": Test((1,), 0.5, {}, Tolerance(0.0, 0.01)),
}


@pytest.mark.parametrize(("claim", "test"), CLAIMS.items())
def test_an_assertion_is_taken_apart_and_comes_back_from_the_answer(claim, test):
    assert read_assertions(f"assert {claim}") == ("f", (test,))
    tests = Tests("f", (test,), "import math")
    assert Tests.from_answer(tests.to_answer()) == tests


@pytest.mark.parametrize(
    "source",
    [
        "",
        "assert True",
        "assert f(1) != 2",
        "assert f(1) < 2",
        "assert f(g(1)) == 2",
        "assert f(x) == 2",
        "assert f(1) == g(2)",
        "assert sorted(f(1)) == [2]",
        "assert a.f(1) == 2",
        "assert f(**{'a': 1}) == 2",
        "assert f(*[1]) == 2",
        "assert f(1) == 1 == 1",
        "assert abs(f(1) - 1) > 3",
        "assert math.isclose(f(1), 1, eps=2)",
        "assert f(1) == open('x')",
        "assert f(1) == ...",
        "assert f(1) == 1\nassert g(1) == 1",
        "import os",
        "x = 1",
        "assert f(1) ==",
        "def check(candidate):\n    for i in [1]:\n        assert candidate(i) == i",
        "assert f({[]}) == 1",
        "assert f(" + "(" * 5000,
        "assert f(" + "-" * 50_000 + "1) == 1",
    ],
)
def test_any_other_statement_makes_the_problem_unscorable(source):
    with pytest.raises(ValueError, match=r"assertion|statements|expected calls"):
        read_assertions(source)


@pytest.mark.parametrize(
    "answer",
    ["", "7", "[]", "{}", '{"entry": "f", "header": "", "tests": []}',
     '{"entry": "f", "header": "", "tests": [1]}'],
)  # fmt: skip
def test_an_answer_that_holds_no_tests_is_refused(answer):
    with pytest.raises(ValueError, match=r"no test|no tests|Expecting"):
        Tests.from_answer(answer)


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python title='a'\nx = 1\n```", "x = 1\n"),
        ("", ""),
    ],
)
def test_the_source_is_the_last_block_of_python(completion, source):
    assert find_source(completion) == source


def test_hostile_fences_are_read_in_linear_time():
    for unit in ("`", "```", "```\n", " ", "```python\n", "\n", "a"):
        find_source((unit * 200_000)[:200_000])  # quadratic reading runs into the time limit


def test_code_is_refused_under_limits_only_unless_allowed(monkeypatch):
    monkeypatch.setattr("rrl_core.tasks.code_tests.isolation", lambda: "limits_only")
    with pytest.raises(TaskError, match="set `allow_limits_only = true` in a container"):
        build_task("code", {})
    task = build_task("code", {"allow_limits_only": True, "eval_fraction": 0})
    completion = own_rows()[0]["code"]
    (judged,) = score_all(task.scorers[0], task.prompts("train")[:1], [completion])
    assert judged.value == 1.0
    assert judged.components["is_isolated"] == 0.0


def test_a_system_without_children_is_refused_by_name(monkeypatch):
    running.isolation.cache_clear()
    monkeypatch.setattr(running.sys, "platform", "plan9")
    with pytest.raises(TaskError, match="expected Linux to run untrusted code; came plan9"):
        build_task("code", {})
    monkeypatch.undo()
    running.isolation.cache_clear()


@pytest.mark.parametrize(
    "row", [{"text": "x"}, {**MBPP, "code": "x = 1"}, {**MBPP, "test_list": 3},
            {**MBPP, "code": "def ("}, {**HUMAN_EVAL, "test": 3}, {"entry_point": "f"}]
)  # fmt: skip
def test_a_row_of_another_shape_is_refused_with_its_place(tmp_path, row):
    path = write(tmp_path / "m.jsonl", row)
    with pytest.raises(TaskError, match=re.escape(f"{path}:1: expected `text` or `prompt`")):
        build_task("code", {"path": path})
