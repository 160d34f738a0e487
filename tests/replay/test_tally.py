import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.replay.tally import Tally, mixture

SUM_TOLERANCE = 1e-11
ENTROPY_TOLERANCE = 4e-4
LOGS = st.lists(st.floats(-1000, 1000), min_size=1, max_size=40)


def tally_of(*parts):
    tally = Tally()
    for part in parts:
        tally.add(np.array(part, dtype=np.float64))
    return tally


@given(LOGS)
def test_the_log_sum_is_that_of_a_float64_loop(logs):
    top = max(logs)
    expected = top + math.log(math.fsum(math.exp(log - top) for log in logs))
    assert tally_of(logs).log_sum() == pytest.approx(expected, abs=SUM_TOLERANCE, rel=SUM_TOLERANCE)


@given(LOGS, st.randoms(use_true_random=False), st.integers(0, 40))
def test_order_and_chunking_do_not_change_a_bit(logs, random, cut):
    shuffled = random.sample(logs, len(logs))
    whole, parts = tally_of(logs), tally_of(shuffled[:cut], shuffled[cut:])
    assert whole.log_sum() == parts.log_sum()
    assert whole.entropy(0.1) == parts.entropy(0.1)


def test_the_probability_mixes_in_the_uniform_share():
    tally = tally_of([math.log(3), math.log(1)])
    # 0.9 * 3/4 + 0.1/2
    log_share = math.log(3) - tally.log_sum()
    assert mixture(log_share, 0.1, tally.num) == pytest.approx(0.725, abs=SUM_TOLERANCE)


@given(LOGS, st.sampled_from([0.0, 0.1, 1.0]))
def test_the_entropy_is_that_of_the_mixture(logs, uniform_share):
    tally = tally_of(logs)
    probabilities = mixture(np.array(logs) - tally.log_sum(), uniform_share, tally.num)
    expected = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    assert tally.entropy(uniform_share) == pytest.approx(expected, abs=ENTROPY_TOLERANCE)


def test_nothing_sums_to_nothing():
    assert tally_of([]).log_sum() == -math.inf
    assert tally_of([]).entropy(0.1) == 0.0
