"""Leak guard: strata of reviews, and which entries are blocked."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.review.leak import holds_gold, leak_stratum
from tests.review.leak_cases import CASES

LIMIT_S = 1.0
SIZE = 200_000


@pytest.mark.parametrize("name", CASES)
def test_what_a_review_gives_away(name):
    problem, gold, review, stratum = CASES[name]
    assert leak_stratum(review, gold, problem) == stratum


def test_a_letter_in_passing_is_no_gold():
    assert leak_stratum("Wrong: b is a letter", "B", "Is it A or B?") == "none"


@pytest.mark.parametrize(
    ("entry", "gold", "is_held"),
    [
        ("Instead: #### 7", "7", True),
        ("Instead: \\boxed{7.0}", "7", True),
        ("Wrong: 3 + 4 = 7\nInstead: add", "7", True),
        ("Wrong: 3 + 4 = 7 apples.\nInstead: add", "7", True),
        ("Instead: the answer is 7.", "7", True),
        ("Instead: \\boxed{Paris}", "paris", True),
        # the number is there, but as no answer
        ("Instead: take 7 steps", "7", False),
        ("Wrong: 3 + 7 = 10\nInstead: add", "7", False),
        ("Wrong: 3 + 4 = 7 is what you were to find, and you did not", "7", False),
        ("Instead: #### 8", "7", False),
        ("Instead: #### 7", None, False),
        ("Instead: #### 7", "", False),
        ("Instead: visit Paris", "Paris", False),
    ],
)
def test_entries_in_which_the_gold_stands_as_an_answer_are_blocked(entry, gold, is_held):
    assert holds_gold(entry, gold) == is_held


GOLDS = st.integers(-50, 50).map(str)
REVIEWS = st.one_of(
    st.text(max_size=40), st.text(alphabet="#0123456789 .,/-+=\\{}\nboxed answer is:", max_size=40)
)


@settings(max_examples=80)
@given(REVIEWS, GOLDS | st.text(max_size=6) | st.none(), st.text(max_size=20))
def test_what_blocks_an_entry_is_of_stratum_gold(review, gold, problem):
    stratum = leak_stratum(review, gold, problem)
    if holds_gold(review, gold):
        assert stratum == "gold"
    if gold is None:
        assert stratum != "gold"


@settings(max_examples=40)
@given(REVIEWS, GOLDS, st.sampled_from(["{}#### {}", "{}\n\\boxed{{{}}}", "{}\nx = {}"]))
def test_a_gold_stated_at_the_end_is_always_seen(review, gold, form):
    text = form.format(review, gold)
    assert holds_gold(text, gold)
    assert leak_stratum(text, gold) == "gold"


@pytest.mark.parametrize(
    "unit",
    ["#### ", "\\boxed{", "\\boxed{1}", "answer is ", "answer is: 12 ", "= 1\n", "=", "{", "1,",
     "answer", "1e999 ", "9", " ", "\n", "solution    "],
)  # fmt: skip
def test_hostile_texts_are_judged_in_time(unit):
    text = unit * (SIZE // len(unit))
    for gold in ("7", "paris"):
        started = time.process_time()
        leak_stratum(text, gold, text[:1000])
        assert time.process_time() - started < LIMIT_S
