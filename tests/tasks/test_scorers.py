"""Scores: what is right, what feedback may tell, and that no scorer costs a batch."""

import hashlib
import math
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.tasks.protocol import Prompt, Score, TaskError
from rrl_core.tasks.scorers import (
    FinalNumber,
    FunctionScorer,
    StrictFormat,
    load_reward,
    make_scorers,
    score_all,
)

BUILT_IN = [FinalNumber(), StrictFormat()]


def prompt_with(answer: str | None) -> Prompt:
    return Prompt("p-1", "test", "train", ({"role": "user", "content": "?"},), answer)


def score_with(function, completion: str = "7") -> Score:
    scorer = FunctionScorer("test", "1", function)
    return score_all(scorer, [prompt_with("7")], [completion])[0]


# completion, value under final_number and strict_format for the reference 7
JUDGED = [
    ("#### 7", 1.0, 1.0),
    ("3 + 4 = 7\n#### 7.0\n", 1.0, 1.0),
    ("so #### 7", 1.0, 0.0),
    ("#### 7 apples", 1.0, 0.0),
    ("\\boxed{7}", 1.0, 0.0),
    ("7", 1.0, 0.0),
    ("#### 8", 0.0, 0.0),
    ("7\n#### 8", 0.0, 0.0),
    ("no idea", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize(("completion", "final_number", "strict_format"), JUDGED)
def test_the_number_or_number_and_format_must_be_right(completion, final_number, strict_format):
    assert FinalNumber()(prompt_with("7"), completion).value == final_number
    assert StrictFormat()(prompt_with("7"), completion).value == strict_format


def test_percent_and_currency_are_stripped_from_both_sides():
    assert FinalNumber()(prompt_with("20%"), "#### 20").value == 1.0
    assert FinalNumber()(prompt_with("20"), "#### 20%").value == 1.0
    assert FinalNumber()(prompt_with("0.2"), "#### 20%").value == 0.0
    assert FinalNumber()(prompt_with("$1,200"), "#### 1.2e3").value == 1.0


def test_components_tell_what_the_completion_has():
    score = FinalNumber()(prompt_with("7"), "it is 8")
    assert score.components == {"has_answer": 1.0, "is_formatted": 0.0}
    score = StrictFormat()(prompt_with("7"), "#### 8")
    assert score.components == {"has_answer": 1.0, "is_formatted": 1.0}
    score = StrictFormat()(prompt_with("7"), "#### 1e80000000")
    assert score.components == {"has_answer": 0.0, "is_formatted": 0.0}


def test_feedback_names_the_first_fault():
    assert FinalNumber()(prompt_with("7"), "none").feedback == "no number found"
    assert FinalNumber()(prompt_with("7"), "8").feedback == "wrong answer"
    assert FinalNumber()(prompt_with("7"), "7").feedback == ""
    # The format is judged first: this feedback does not tell whether the number was right.
    for completion in ("7", "8"):
        feedback = StrictFormat()(prompt_with("7"), completion).feedback
        assert feedback == "the last line is not `#### <number>`"
    assert StrictFormat()(prompt_with("7"), "#### 8").feedback == "wrong answer"


@pytest.mark.parametrize("answer", [None, "", "five", "5 or 6", "nan", "inf", "1e80000000"])
@pytest.mark.parametrize("scorer", BUILT_IN, ids=lambda scorer: scorer.name)
def test_a_reference_that_is_no_number_is_unscorable(scorer, answer):
    for completion in ("5", "nan", "inf", "1e80000000", ""):
        score = scorer(prompt_with(answer), completion)
        assert (score.value, score.status) == (None, "unscorable")


COMPLETIONS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="#0123456789 .,/-+eE^$%=\\{}\nboxed", max_size=40),
    st.builds("{}#### {}".format, st.text(max_size=20), st.integers(-99, 99)),
    st.builds("{}\\boxed{{{}}}".format, st.text(max_size=20), st.integers(-99, 99)),
    st.integers(-99, 99).map(str),
)
UNITS = st.sampled_from([" dollars", "%", " %", " km", " m^2", " m2", " cm", "€", " apples.", "!"])


@given(completion=COMPLETIONS, space=st.text(alphabet=" \t\n\r", max_size=5))
def test_trailing_white_space_never_changes_a_score(completion, space):
    for scorer in BUILT_IN:
        assert scorer(prompt_with("7"), completion + space) == scorer(prompt_with("7"), completion)


@given(completion=COMPLETIONS, unit=UNITS)
def test_a_trailing_unit_never_changes_the_final_number(completion, unit):
    bare = FinalNumber()(prompt_with("7"), completion)
    assert FinalNumber()(prompt_with("7"), completion + unit).value == bare.value


@given(completion=COMPLETIONS, first=st.integers(-99, 99), second=st.integers(-99, 99))
def test_a_wrong_answer_learns_nothing_of_the_reference(completion, first, second):
    for scorer in BUILT_IN:
        scores = [scorer(prompt_with(str(answer)), completion) for answer in (first, second)]
        if all(score.value == 0.0 for score in scores):
            assert scores[0] == scores[1]


@given(completion=st.text(alphabet=st.characters(exclude_categories=[]), max_size=60))
def test_any_text_is_scored_even_with_lone_surrogates(completion):
    for scorer in BUILT_IN:
        assert scorer(prompt_with("7"), completion).value in (0.0, 1.0)


def test_a_scorer_that_raises_costs_one_score():
    def raise_on_b(prompt, completion):
        if completion == "b":
            raise ZeroDivisionError("the reference is 7")
        return 0.5

    scorer = FunctionScorer("test", "1", raise_on_b)
    scores = score_all(scorer, [prompt_with("7")] * 3, ["a", "b", "c"])
    assert [score.value for score in scores] == [0.5, None, 0.5]
    assert scores[1].status == "scorer_error"
    assert scores[1].feedback == "the scorer raised ZeroDivisionError"


def test_a_scorer_that_exits_costs_one_score_but_ctrl_c_stops():
    assert score_with(lambda prompt, completion: sys.exit(0)).status == "scorer_error"

    def interrupt(prompt, completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_with(interrupt)


@pytest.mark.parametrize(
    "result",
    [
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        None,
        "1.0",
        Score(math.nan),
        Score(None),
        Score(1.0, "timeout"),
        Score(1.0, "fine"),
        Score(1.0, components={"part": math.inf}),
        Score(1.0, components={"part": "much"}),
    ],
    ids=repr,
)
def test_what_is_no_score_is_a_scorer_error(result):
    score = score_with(lambda prompt, completion: result)
    assert (score.value, score.status, score.components) == (None, "scorer_error", {})
    assert score.feedback


@pytest.mark.parametrize("result", [True, 1, 1.0, np.float32(1.0), Score(1)])
def test_any_real_number_is_a_reward(result):
    score = score_with(lambda prompt, completion: result)
    assert score == Score(1.0)
    assert type(score.value) is float


def test_a_score_of_your_own_is_kept():
    own = Score(None, "timeout", {"tests": 0.5}, "too slow")
    assert score_with(lambda prompt, completion: own) == own


def test_prompts_and_completions_must_be_as_many():
    with pytest.raises(TaskError, match="came 1 prompts and 2 completions"):
        score_all(FinalNumber(), [prompt_with("7")], ["a", "b"])


def test_the_reward_comes_first():
    assert [scorer.name for scorer in make_scorers("final_number")] == [
        "final_number",
        "strict_format",
    ]
    assert [scorer.name for scorer in make_scorers("strict_format")] == [
        "strict_format",
        "final_number",
    ]


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    """Write `name`.py into a fresh working folder and forget it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = dict(sys.modules)
    yield lambda name, text: (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def test_a_reward_is_loaded_from_the_working_folder(reward_file):
    source = "def short(prompt, completion):\n    return 1 / (1 + len(completion))\n"
    reward_file("reward_a", source)
    (scorer,) = make_scorers("reward_a:short")
    assert scorer.name == "reward_a:short"
    assert scorer.version == hashlib.sha256(source.encode()).hexdigest()[:12]
    assert scorer(prompt_with(None), "abc").value == 0.25


def test_an_edited_reward_is_another_version(reward_file):
    reward_file("reward_b", "def f(prompt, completion):\n    return 0.0\n")
    before = load_reward("reward_b:f").version
    reward_file("reward_b", "def f(prompt, completion):\n    return 1.0\n")
    del sys.modules["reward_b"]
    assert load_reward("reward_b:f").version != before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("final_numbr", "expected `module:function` or one of final_number, strict_format"),
        (":f", "came `:f`"),
        ("reward_c:", "came `reward_c:`"),
        ("no_such_module_here:f", "raised ModuleNotFoundError"),
        ("reward_c:missing", "expected a function `missing`"),
        ("reward_c:NUMBER", "expected a function `NUMBER`"),
        ("reward_d:f", "raised ZeroDivisionError: division by zero"),
        ("math:sqrt", "expected a function `sqrt` in a Python file"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(reward_file, spec, message):
    reward_file("reward_c", "NUMBER = 1\n")
    reward_file("reward_d", "1 / 0\n")
    with pytest.raises(TaskError, match="reward") as caught:
        load_reward(spec)
    assert message in str(caught.value)
