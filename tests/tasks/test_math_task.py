"""The task `math`: problems with answers in LaTeX, and their comparison as mathematics."""

import json
import multiprocessing
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from rrl_core.tasks.math_problems import OWN_PROBLEMS
from rrl_core.tasks.math_verifying import MathVerify
from rrl_core.tasks.protocol import Prompt, TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import score_all

LIMIT_S = 2.0
ROW = {
    "problem": "Halve 3.",
    "level": "Level 2",
    "type": "Algebra",
    "solution": "It is \\boxed{\\frac{3}{2}}.",
}
HANG = "\\boxed{9^{9^{9^{9}}}}"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_with(answer):
    return Prompt("p-1", "math", "train", ({"role": "user", "content": "?"},), answer)


@pytest.fixture(scope="module")
def scorer():
    return MathVerify(LIMIT_S, num_children=1)


def test_a_line_becomes_a_prompt(tmp_path):
    rows = [
        ROW,
        {"problem": "1 + 1?", "answer": 2, "level": 5, "subject": "Sums"},
        {"problem": "2 + 1?", "answer": "3", "solution": "\\boxed{4}"},
        {"problem": "3 + 1?", "solution": "It is 4."},
        {"problem": "4 + 1?", "solution": "\\boxed{\\boxed{5}} or \\boxed{6"},
    ]
    path = write(tmp_path / "m.jsonl", *rows)
    params = {"path": path, "eval_fraction": 0, "instruction": "Go."}
    prompts = build_task("math", params).prompts("train")
    assert prompts[0].messages[0]["content"] == "Halve 3. Go."
    assert [p.answer for p in prompts] == ["\\frac{3}{2}", "2", "3", None, "5"]
    assert [p.difficulty for p in prompts] == ["level 2", "level 5", "", "", ""]
    assert [p.meta for p in prompts[:3]] == [{"type": "Algebra"}, {"type": "Sums"}, {}]


def test_our_own_problems_have_all_levels_and_distinct_splits():
    task = build_task("math", {})
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    assert len(prompts) >= 20
    assert {p.difficulty for p in prompts} == {f"level {number}" for number in range(1, 6)}
    assert all(p.answer for p in prompts)
    assert [scorer.name for scorer in task.scorers] == ["math_verify", "final_number"]


def test_the_first_problems_can_be_taken_alone_and_other_rewards_used(tmp_path):
    task = build_task("math", {"num_train": 3, "num_eval": 1, "reward": "final_number"})
    assert (len(task.prompts("train")), len(task.prompts("eval"))) == (3, 1)
    assert task.scorers[0].name == "final_number"
    path = write(tmp_path / "m.jsonl", ROW)
    other = write(tmp_path / "e.jsonl", {**ROW, "problem": "Halve three."})
    task = build_task("math", {"path": path, "eval_path": other})
    assert [len(task.prompts(split)) for split in ("train", "eval")] == [1, 1]


@pytest.mark.parametrize(
    "row", [{"problem": 3, "answer": "1"}, {"problem": "x"}, {"problem": "x", "answer": [1]},
            {"problem": "x", "answer": True}, {"answer": "1"}]
)  # fmt: skip
def test_a_row_of_another_shape_is_refused(tmp_path, row):
    with pytest.raises(TaskError, match=r"m\.jsonl:1: expected `problem` and `solution` or"):
        build_task("math", {"path": write(tmp_path / "m.jsonl", row)})


def test_a_file_without_answers_is_refused(tmp_path):
    path = write(tmp_path / "m.jsonl", {**ROW, "solution": "It is 1.5"})
    with pytest.raises(TaskError, match=r"expected answers, or solutions with \\boxed"):
        build_task("math", {"path": path})


def test_the_hub_is_used_by_name(monkeypatch):
    rows = {"train": [ROW], "test": [{**ROW, "problem": "Halve three."}]}
    hub = types.SimpleNamespace(load_dataset=lambda hub_id, split: rows[split])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = build_task("math", {"hub_id": "someone/math"})
    assert task.prompts("eval")[0].messages[0]["content"].startswith("Halve three.")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match="install `datasets` and connect, or set `path`"):
        build_task("math", {"hub_id": "someone/math"})


def test_without_the_library_the_message_names_it_and_another_reward(monkeypatch):
    import importlib.metadata

    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with pytest.raises(TaskError, match=r"pip install 'math-verify.*reward = \"final_number\""):
        build_task("math", {})
    assert build_task("math", {"reward": "final_number"}).prompts("train")


# reference, answer, value; None: unscorable
COMPARED = [
    ("\\frac{12}{5}", "2.4", 1), ("\\frac{12}{5}", "12/5", 1), ("\\frac{12}{5}", "5/12", 0),
    ("2\\sqrt{5}", "\\sqrt{20}", 1), ("x^2-2x-15", "(x-5)(x+3)", 1), ("x^2", "x^3", 0),
    ("2, 3", "3, 2", 1), ("2, 3", "2", 0), ("y = 2x + 1", "2x+1", 1), ("\\{1,3\\}", "\\{3,1\\}", 1),
    ("(-3, 3)", "[-3, 3]", 0), ("80^\\circ", "80", 1), ("9\\pi", "9 \\pi", 1), ("9\\pi", "28", 0),
    ("5", "", 0), ("5", "\\frac{", 0), ("5", "5 or 6", 0), ("5", "x", 0), ("5", "x=x", 0),
    ("5", "5=5", 1), ("5", "5=6", 0), ("5", "\\emptyset", 0), ("5", "\\infty", 0),
    ("5", "1" * 2000, 0), ("", "5", None), ("\\frac{", "5", None), ("???", "5", None),
]  # fmt: skip


def test_answers_are_compared_as_mathematics_the_reference_first(scorer):
    prompts = [prompt_with(reference) for reference, _, _ in COMPARED]
    completions = [f"So \\boxed{{{answer}}}" for _, answer, _ in COMPARED]
    scores = score_all(scorer, prompts, completions)
    assert [score.value for score in scores] == [value for _, _, value in COMPARED]
    assert {s.status for s in scores if s.value is None} == {"unscorable"}


def test_the_answer_is_found_as_everywhere(scorer):
    prompt = prompt_with("\\frac{1}{2}")
    completions = [
        "#### $\\frac{2}{4}$",
        "\\boxed{9}\n#### 0.5",
        "It is 1/2",
        "\u22121/2",
        "none",
        "",
    ]
    scores = score_all(scorer, [prompt] * len(completions), completions)
    assert [score.value for score in scores] == [1, 1, 1, 0, 0, 0]
    assert scores[-1].feedback == "no answer found"


@pytest.mark.slow
def test_a_comparison_without_end_is_a_timeout_and_costs_no_other(scorer):
    completions = ["\\boxed{1}", HANG, "\\boxed{1}"]
    scores = score_all(scorer, [prompt_with("1")] * 3, completions)
    assert [(s.value, s.status) for s in scores] == [(1, "ok"), (None, "timeout"), (1, "ok")]


@pytest.mark.slow
def test_every_reference_solution_of_our_own_is_right():
    task = build_task("math", {"eval_fraction": 0})
    rows = [json.loads(line) for line in OWN_PROBLEMS.read_text().split("\n") if line]
    solutions = [row["solution"] for row in rows]
    scores = score_all(task.scorers[0], task.prompts("train"), solutions)
    assert [score.value for score in scores] == [1.0] * len(rows)
    others = solutions[1:] + solutions[:1]
    wrong = score_all(task.scorers[0], task.prompts("train"), others)
    assert sum(score.value for score in wrong) == 0.0


def _scores(completions):
    scorer = MathVerify(LIMIT_S, num_children=1)
    return [(s.value, s.status) for s in score_all(scorer, [prompt_with("7")] * 3, completions)]


@pytest.mark.slow
def test_threads_and_processes_score_as_the_main_thread_does():
    completions = ["\\boxed{7}", HANG, "\\boxed{\\frac{14}{2}}"]
    expected = [(1.0, "ok"), (None, "timeout"), (1.0, "ok")]
    assert _scores(completions) == expected
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_scores, completions).result(60) == expected
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as processes:
            assert processes.apply_async(_scores, (completions,)).get(120) == expected
