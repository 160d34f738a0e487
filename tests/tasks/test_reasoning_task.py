"""The task `reasoning_gym`: problems of any of its generators, judged by the generator's scorer."""

import hashlib
import importlib
import inspect
import re
from dataclasses import replace

import pytest

from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.reasoning import FUNCTION, find_tagged
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.sandbox.killable import Checker
from rrl_core.tasks.scorers import score_all

SMALL = {"kind": "letter_counting", "num_train": 4, "num_eval": 2, "num_children": 1}
# They state no answer of their own, or their scorer does not take it.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
REFUSED = {"composite", "game_of_life_halting"}
FORMULAS = ("simple_integration", "intermediate_integration", "polynomial_multiplication",
            "puzzle24", "countdown")  # fmt: skip
LITERALS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")


@pytest.fixture(scope="module")
def task():
    return build_task("reasoning_gym", {**SMALL, "parameters": {"min_words": 3, "max_words": 6}})


def questions(task, split="train"):
    return [prompt.messages[0]["content"] for prompt in task.prompts(split)]


def scores_of(task, prompt, *answers):
    completions = [f"So <answer>{answer}</answer>" for answer in answers]
    return score_all(task.scorers[0], [prompt] * len(answers), completions)


def test_the_generator_draws_and_scores_by_its_parameters(task):
    assert len(set(questions(task) + questions(task, "eval"))) == 6
    prompt = task.prompts("train")[0]
    assert prompt.difficulty == "words [3, 6]"
    right, spaced, wrong = scores_of(task, prompt, prompt.answer, f" {prompt.answer}\n", "99")
    assert (right.value, spaced.value, wrong.value) == (1.0, 1.0, 0.0)
    (untagged,) = score_all(task.scorers[0], [prompt], [prompt.answer])
    assert (untagged.value, untagged.feedback) == (0.0, "no answer between <answer> and </answer>")
    # Another version of the library might draw another problem.
    other = replace(prompt, meta={**prompt.meta, "question_sha256": "0"})
    (changed,) = scores_of(task, other, prompt.answer)
    assert (changed.value, changed.status) == (None, "scorer_error")
    assert changed.feedback == "the library draws another problem now"
    (foreign,) = scores_of(task, replace(prompt, meta={}), prompt.answer)
    assert (foreign.value, foreign.status) == (None, "unscorable")


def test_the_answer_stands_in_the_last_closed_tags():
    assert find_tagged("<answer>1</answer> <answer> 2\n</answer> <answer>3") == "2"
    assert find_tagged("<answer>1 <answer>2</answer>") == "2"
    assert find_tagged("<answer></answer>") == ""
    for text in ("", "<answer>1", "1</answer>", "</answer><answer>"):
        assert find_tagged(text) is None


def test_numbers_may_be_judged_as_in_other_tasks():
    task = build_task("reasoning_gym", {**SMALL, "reward": "final_number"})
    prompt = task.prompts("train")[0]
    right, wrong = score_all(task.scorers[0], [prompt] * 2, [f"#### {prompt.answer}", "#### -1"])
    assert [scorer.name for scorer in task.scorers] == ["final_number", "strict_format"]
    assert (right.value, wrong.value) == (1.0, 0.0)


def test_seed_and_size_are_the_tasks_own():
    with pytest.raises(TaskError, match="`parameters` may not set seed; use the task's `seed`"):
        build_task("reasoning_gym", {**SMALL, "parameters": {"seed": 3}})


@pytest.mark.slow
def test_prompts_are_the_same_everywhere_and_more_training_leaves_the_evaluation(task):
    same = {**SMALL, "kind": "codeio"}  # draws from the common random source and from sets
    first, second = (build_task("reasoning_gym", same) for _ in range(2))
    assert first.prompts("train") == second.prompts("train")
    longer = build_task("reasoning_gym", {**same, "num_train": 6})
    assert questions(longer, "eval") == questions(first, "eval")
    assert questions(longer)[:4] == questions(first)
    other = build_task("reasoning_gym", {**same, "seed": 1})
    assert not set(questions(other)) & set(questions(first))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "chess"}, "expected `kind` among ab, acre, "),
        ({"parameters": {"words": 3}}, "came TypeError: .*'words'; correct `parameters`"),
        ({"parameters": {"min_words": 9, "max_words": 3}}, "correct `parameters`"),
        ({"kind": "composite"}, "correct `parameters`"),
        (
            {"kind": "game_of_life_halting"},
            r"that of `game_of_life_halting` gives full marks for `\?`",
        ),
        (
            {"kind": "coin_flip", "parameters": {"min_trials": 3, "max_trials": 3}},
            "gave [0-9]+; ask",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, message):
    with pytest.raises(TaskError, match=message):
        build_task("reasoning_gym", {**SMALL, "num_train": 2000, **changes})


@pytest.mark.slow
def test_a_scorer_that_raises_costs_one_score():
    task = build_task("reasoning_gym", {**SMALL, "kind": "prime_factorization"})
    prompt = task.prompts("train")[0]
    broken, right = scores_of(task, prompt, "hello", prompt.answer)
    assert (broken.value, broken.status) == (None, "scorer_error")
    assert broken.feedback == "its scorer: ValueError"
    assert right.value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMULAS + LITERALS)
def test_no_answer_is_run_as_a_program_and_right_ones_still_count(kind, tmp_path):
    task = build_task("reasoning_gym", {**SMALL, "kind": kind, "num_train": 8, "time_limit_s": 4})
    trace = tmp_path / "trace"
    hostile = [
        f"__import__('pathlib').Path('{trace}').touch()",
        f"open('{trace}', 'w')",
        f"[open('{trace}', 'w')]",
        f"(lambda: open('{trace}', 'w'))()",
        f"().__class__.__base__.__subclasses__() or open('{trace}', 'w')",
        f"S(\"open('{trace}', 'w')\")",
        f"exec(chr(111) + '{trace}')",
    ]
    prompts = task.prompts("train")
    assert all(score.value < 0.5 for score in scores_of(task, prompts[0], *hostile))
    assert not trace.exists()
    for prompt in prompts:
        (score,) = scores_of(task, prompt, prompt.answer)
        assert score.value == 1.0


@pytest.mark.slow
def test_every_scorer_that_evaluates_is_known():
    from reasoning_gym.factory import DATASETS

    evaluating = re.compile(r"\b(?:eval|exec|parse_expr|sympify|literal_eval|compile)\(")
    found = set()
    for kind, (dataset, _) in DATASETS.items():
        source = inspect.getsource(dataset.score_answer)
        called = [getattr(dataset, name, None) for name in re.findall(r"self\.(\w+)\(", source)]
        sources = [source, *(inspect.getsource(method) for method in called if method is not None)]
        if any(evaluating.search(text) for text in sources):
            found.add(kind)
    # number_sorting evaluates its own reference alone.
    assert found == {*FORMULAS, *LITERALS, "number_sorting"}
    module = importlib.import_module("reasoning_gym.algorithmic.number_sorting")
    assert "eval(answer" not in inspect.getsource(module)


@pytest.mark.slow
def test_every_generator_draws_and_takes_its_own_answer():
    checker = Checker(FUNCTION, 60.0, num_children=1)
    kinds = checker.ask(["kinds"]).value
    assert len(kinds) > 100
    parameters, failed = {"seed": 7, "size": 10}, {}
    for kind in sorted(set(kinds) - REFUSED):
        drawn = checker.ask(["draw", kind, parameters, 0, 1])
        [[question, answer, _, _]] = drawn.value
        digest = hashlib.sha256(question.encode()).hexdigest()
        score = checker.ask(["score", kind, parameters, 0, digest, answer or "?"])
        expected = score.value < 1.0 if kind in WITHOUT_ANSWER else score.value == 1.0
        failed |= {} if expected else {kind: score}
    checker.end()
    assert not failed
