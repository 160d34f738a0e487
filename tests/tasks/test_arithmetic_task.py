"""The task `arithmetic`: exact answers, distinct problems, disjoint and stable splits."""

import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import pytest

from rrl_core.tasks.prompts import INSTRUCTION
from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import score_all

SMALL = {"num_train": 100, "num_eval": 50}


def expression_of(prompt) -> str:
    return re.fullmatch(rf"What is (.*)\? {re.escape(INSTRUCTION)}", prompt.messages[0]["content"])[
        1
    ]


def both_splits(task):
    return [*task.prompts("train"), *task.prompts("eval")]


def test_a_prompt_is_one_message_with_the_question_and_the_instruction():
    prompt = build_task("arithmetic", SMALL).prompts("eval")[0]
    # The first draw of the default stream.
    content = "What is 7 - 7? Think briefly if you need to. End with a line: #### <number>"
    assert prompt.messages == ({"role": "user", "content": content},)
    assert (prompt.answer, prompt.difficulty) == ("0", "2 terms, 1-digit")


def test_prompt_ids_never_change():
    task = build_task("arithmetic", SMALL)
    # The first 20 digits of what sha256sum says of
    # ["arithmetic", "eval", [{"role": "user", "content": "<the content above>"}], "0"]
    assert task.prompts("eval")[0].prompt_id == "p-dea1637f9f37df611f00"
    assert task.prompts("train")[0].prompt_id == "p-78f077523548c119aba2"  # "What is 5 - 2? ..."


def test_equal_settings_give_equal_prompts_and_other_seeds_others():
    assert both_splits(build_task("arithmetic", SMALL)) == both_splits(
        build_task("arithmetic", SMALL)
    )
    other = build_task("arithmetic", {**SMALL, "seed": 1, "max_digits": 4, "min_digits": 3})
    first = build_task("arithmetic", {**SMALL, "seed": 0, "max_digits": 4, "min_digits": 3})
    shared = set(map(expression_of, both_splits(first))) & set(
        map(expression_of, both_splits(other))
    )
    assert not shared  # 3 numbers of 3-4 digits each: neighbouring seeds share no draws


def test_splits_have_no_problem_in_common_and_no_repeats():
    task = build_task("arithmetic", {"max_digits": 2, "num_train": 600, "num_eval": 200})
    expressions = [expression_of(prompt) for prompt in both_splits(task)]
    assert len(expressions) == len(set(expressions)) == 800
    assert len({prompt.prompt_id for prompt in both_splits(task)}) == 800


def test_more_training_leaves_the_evaluation_as_it_is():
    longer = build_task("arithmetic", {**SMALL, "num_train": 300})
    assert longer.prompts("eval") == build_task("arithmetic", SMALL).prompts("eval")
    assert longer.prompts("train")[:100] == build_task("arithmetic", SMALL).prompts("train")


def chain_value(expression: str) -> int:
    first, *rest = expression.split(" ")
    signs = {"+": 1, "-": -1}
    return int(first) + sum(
        signs[sign] * int(number) for sign, number in zip(rest[::2], rest[1::2], strict=True)
    )


def test_chain_sums_keep_to_their_settings():
    settings = {"min_terms": 2, "max_terms": 3, "max_digits": 2, "max_number": 20, **SMALL}
    for prompt in both_splits(build_task("arithmetic", settings)):
        numbers = [int(number) for number in re.findall("[0-9]+", expression_of(prompt))]
        assert 2 <= len(numbers) <= 3
        assert max(numbers) <= 20
        assert chain_value(expression_of(prompt)) == int(prompt.answer)
        assert abs(int(prompt.answer)) <= 20
        num_digits = max(len(str(number)) for number in numbers)
        assert prompt.difficulty == f"{len(numbers)} terms, {num_digits}-digit"


def test_quotients_are_exact():
    settings = {
        "kind": "basic_arithmetic",
        "operators": ["+", "-", "*", "/"],
        "has_parentheses": True,
        "max_terms": 12,  # some draws of so many terms divide by zero
        "num_train": 4000,
        "num_eval": 0,
    }
    prompts = build_task("arithmetic", settings).prompts("train")
    assert sum("/" in expression_of(prompt) for prompt in prompts) > 100
    for prompt in prompts:
        exact = re.sub("([0-9]+)", r"Fraction(\1)", expression_of(prompt))
        assert eval(exact, {"Fraction": Fraction}) == Fraction(prompt.answer)


def test_products_keep_to_their_operators():
    settings = {"kind": "basic_arithmetic", "operators": ["*"], **SMALL}
    for prompt in both_splits(build_task("arithmetic", settings)):
        assert set(expression_of(prompt)) <= set("0123456789 *")


def test_the_reference_answers_get_full_marks():
    task = build_task("arithmetic", {**SMALL, "max_digits": 2})
    prompts = task.prompts("train")
    completions = [f"#### {prompt.answer}" for prompt in prompts]
    for scorer in task.scorers:
        assert {score.value for score in score_all(scorer, prompts, completions)} == {1.0}


def test_the_instruction_is_a_parameter():
    task = build_task("arithmetic", {**SMALL, "instruction": "Just the number."})
    assert task.prompts("eval")[0].messages[0]["content"] == "What is 7 - 7? Just the number."
    task = build_task("arithmetic", {**SMALL, "instruction": ""})
    assert task.prompts("eval")[0].messages[0]["content"] == "What is 7 - 7?"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # 10 * 10 numbers and 2 operators make 200 problems of two one-digit terms.
        ({"max_terms": 2, "num_train": 200, "num_eval": 1}, "these settings gave 200;"),
        ({"min_terms": 4}, "came min_terms = 4 and max_terms = 3"),
        ({"min_digits": 2}, "came min_digits = 2 and max_digits = 1"),
        ({"operators": ["*"]}, "use kind = 'basic_arithmetic'"),
        ({"has_parentheses": True}, "use kind = 'basic_arithmetic'"),
        ({"kind": "basic_arithmetic", "operators": ["/"]}, "set has_parentheses = True"),
        (
            {
                "kind": "basic_arithmetic",
                "operators": ["*", "/"],
                "has_parentheses": True,
                "max_digits": 6,
            },
            "came 3 * 6; lower one",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, message):
    with pytest.raises(TaskError, match=re.escape(message)):
        build_task("arithmetic", settings)


def test_building_prints_nothing_even_when_the_generator_is_compiled(tmp_path):
    # A library it loads warns when compiled: here from a copy without compiled files.
    source = Path(find_spec("cellpylib").origin).parent
    shutil.copytree(source, tmp_path / "cellpylib", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def errors_of(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stderr

    build = "from rrl_core.tasks.registry import build_task; build_task('arithmetic', {})"
    assert "SyntaxWarning" in errors_of("import cellpylib")
    assert errors_of(build) == ""
