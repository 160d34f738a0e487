"""Lift over pairs, with an interval only where it holds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.review.lift import Lift, paired_lift

EXACT = 1e-9


def test_lift_and_interval_by_hand():
    # 36 pairs: 18 differ by 1, 18 by 0. Mean 1/2, sum of squares 36 / 4 = 9, sd = sqrt(9 / 35),
    # standard error sd / 6 = 0.084515.
    lift = paired_lift([(1.0, 0.0)] * 18 + [(0.0, 0.0)] * 18)
    half = 1.96 * math.sqrt(9 / 35) / 6
    assert (lift.num, lift.treated, lift.control, lift.lift) == (36, 0.5, 0.0, 0.5)
    assert lift.low == pytest.approx(0.5 - half, abs=EXACT)
    assert lift.high == pytest.approx(0.5 + half, abs=EXACT)


def test_below_thirty_pairs_there_is_no_interval():
    assert paired_lift([(1.0, 0.0), (1.0, 1.0)]) == Lift(2, 1.0, 0.5, 0.5, None, None)
    assert paired_lift([(1.0, 0.0)] * 29).low is None
    assert paired_lift([(1.0, 0.0)] * 30).low == 1.0
    assert paired_lift([]) == Lift(0, None, None, None, None, None)


def test_an_outcome_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        paired_lift([(1.0, math.nan)])


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])),
        min_size=30,
        max_size=50,
    )
)
def test_swapping_the_sides_turns_the_interval_around(pairs):
    one, other = paired_lift(pairs), paired_lift([(c, t) for t, c in pairs])
    assert (one.low, one.lift, one.high) == pytest.approx((-other.high, -other.lift, -other.low))
    assert one.low <= one.lift <= one.high
