"""Advantages of reviews and second attempts, and what is distilled."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.review.credit import is_distilled, review_advantages

EXACT = 1e-12


def test_advantages_by_hand():
    # mean(1, 0, 0) = 1/3
    assert review_advantages([1.0, 0.0, 0.0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=EXACT)
    # The one without a score leaves the mean: mean(1, 0) = 1/2.
    assert review_advantages([1.0, None, 0.0]) == [0.5, None, -0.5]


@pytest.mark.parametrize("rewards", [[0.3] * 8, [1.0, 1.0], [0.0], [0.7, None], [0.1 + 0.2, 0.3]])
def test_equal_outcomes_and_a_single_one_give_exactly_zero(rewards):
    assert review_advantages(rewards) == [None if r is None else 0.0 for r in rewards]


def test_without_scores_there_are_no_advantages():
    assert review_advantages([]) == []
    assert review_advantages([None, None]) == [None, None]
    with pytest.raises(ValueError, match="finite"):
        review_advantages([1.0, math.nan])


@given(st.lists(st.floats(-5, 5) | st.none(), max_size=6), st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift):
    advantages = review_advantages(rewards)
    shifted = review_advantages([None if r is None else r + shift for r in rewards])
    scored = [a for a in advantages if a is not None]
    assert sum(scored) == pytest.approx(0.0, abs=1e-5)
    assert [a for a in shifted if a is not None] == pytest.approx(scored, abs=1e-5)


def test_a_success_is_distilled_unless_the_prompt_is_solved():
    assert is_distilled(1.0, 1.0, p_hat=0.2)  # at the threshold
    assert is_distilled(0.999, 0.999, p_hat=0.7499)
    assert not is_distilled(0.99, 0.999, p_hat=0.2)
    assert not is_distilled(None, 0.999, p_hat=0.2)
    assert not is_distilled(1.0, 0.999, p_hat=0.75)  # solved
    assert is_distilled(1.0, 0.999, p_hat=0.75, solved=0.8)
