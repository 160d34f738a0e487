"""Feedback of answer scorers never depends on the gold beyond right or wrong (non-interference)."""

import json
from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rrl_core.tasks.protocol import Prompt
from rrl_core.tasks.registry import SCORERS, build_scorer, build_task
from rrl_core.tasks.scorers import BUILT_IN, score_all
from rrl_core.tasks.shaping import ShapedReward, Shaping
from rrl_core.tasks.transcript import last_turn_scorers
from rrl_core.tasks.writing_constraints import Constraints

CHECKED = {*BUILT_IN, "math_verify", "reasoning_gym"}  # below
DIAGNOSTIC = {"code_tests", "code_tests_share"}  # tells which test failed, and how: docs/tasks.md
WRAPPED = [
    *last_turn_scorers(tuple(BUILT_IN.values())),
    ShapedReward(BUILT_IN["final_number"], Shaping(format="answer_line", format_weight=0.5)),
]

NUMBERS = st.one_of(
    st.integers(-30, 30).map(str),
    st.decimals(-30, 30, places=2).map(str),
    st.builds("{}/{}".format, st.integers(1, 9), st.integers(1, 9)),
)
GOLDS = st.one_of(
    NUMBERS,
    st.builds("${}".format, NUMBERS),
    st.builds("{} apples".format, NUMBERS),
    st.builds("2 + 2 = 4, so\n#### {}".format, NUMBERS),
    st.builds("\\boxed{{{}}}".format, NUMBERS),
)
COMPLETIONS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="#0123456789 .,/-+eE^$%=\\{}\nboxed", max_size=30),
    st.builds("{}\n#### {}".format, st.text(max_size=15), NUMBERS),
    st.builds("so #### {} apples".format, NUMBERS),
    st.builds("it is \\boxed{{{}}}".format, NUMBERS),
    NUMBERS,
)


def score(scorer, gold: str, completion: str):
    messages = ({"role": "user", "content": "?"},)
    return scorer(Prompt("p-1", "test", "train", messages, gold), completion)


@settings(max_examples=100)
@given(completion=COMPLETIONS, gold=GOLDS, other=GOLDS)
def test_another_gold_under_which_a_completion_is_wrong_changes_no_feedback(
    completion, gold, other
):
    for scorer in (*BUILT_IN.values(), *WRAPPED):
        first, second = score(scorer, gold, completion), score(scorer, other, completion)
        if (
            first.value is not None
            and second.value is not None
            and max(first.value, second.value) < 1
        ):
            assert first.feedback == second.feedback


@given(number=st.integers(-30, 30), other=st.integers(-30, 30))
def test_feedback_says_nothing_of_the_gold(number, other):
    assume(number != other)
    for scorer in (*BUILT_IN.values(), *WRAPPED):
        assert str(number) not in score(scorer, str(number), f"#### {other}").feedback


def test_no_shipped_scorer_is_left_out():
    assert set(SCORERS) == CHECKED | DIAGNOSTIC


# As reference and as answer: numbers, expressions, sets, intervals, text, and what is none.
LATEX = [
    "7", "-0.75", "\\frac{3}{4}", "x+1", "x=3", "y \\le 3", "(1,2)", "\\{1,2\\}", "[0,1)",
    "\\text{even}", "5\\%", "\\sqrt{", "\\infty", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "",
]  # fmt: skip


def test_the_feedback_of_math_verify_is_the_same_under_every_gold_that_makes_it_wrong():
    scorer = build_scorer("math_verify", {"num_children": 1})
    completions = [*(f"so \\boxed{{{answer}}}" for answer in LATEX), "#### 7 apples", "none"]
    told = [Counter() for _ in completions]
    for gold in (answer for answer in LATEX if answer):
        prompt = Prompt("p-1", "test", "train", ({"role": "user", "content": "?"},), gold)
        scores = score_all(scorer, [prompt] * len(completions), completions)
        for known, scored in zip(told, scores, strict=True):
            if scored.value is not None and scored.value < 1:
                known[scored.feedback] += 1
    assert [len(known) for known in told] == [1] * len(completions)
    assert min(known.total() for known in told) > 5


def test_the_feedback_of_a_generators_scorer_is_the_same_for_every_problem_it_is_wrong_for():
    kind = {"kind": "letter_counting", "num_train": 6, "num_eval": 1, "num_children": 1}
    task = build_task("reasoning_gym", kind)  # it gives partial credit
    prompts = task.prompts("train")
    answers = [*(p.answer for p in prompts), "-1", "none", "", "__import__('os')"]
    partial = set()
    for completion in (*(f"<answer>{answer}</answer>" for answer in answers), "7", "<answer>"):
        scores = score_all(task.scorers[0], prompts, [completion] * len(prompts))
        wrong = {s.feedback for s in scores if s.value is not None and s.value < 1}
        assert len(wrong) == 1, completion
        partial |= {s.value for s in scores}
    assert len(partial) > 2


def test_constraints_are_judged_without_the_gold():
    messages = ({"role": "user", "content": "Write."},)
    meta = {"constraints": json.dumps({"words": [3, 9], "title": True})}
    scores = [
        Constraints()(Prompt("p-1", "test", "train", messages, gold, meta=meta), "One line only.")
        for gold in ("7", "One line only.", None)
    ]
    assert scores[0].feedback
    assert scores == [scores[0]] * 3
