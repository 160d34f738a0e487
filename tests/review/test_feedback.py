"""Feedback of answer scorers never depends on the gold beyond right or wrong (non-interference)."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rrl_core.tasks.protocol import Prompt
from rrl_core.tasks.scorers import BUILT_IN

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
    assert BUILT_IN
    for scorer in BUILT_IN.values():
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
    for scorer in BUILT_IN.values():
        assert str(number) not in score(scorer, str(number), f"#### {other}").feedback
