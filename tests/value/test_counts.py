import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.value.counts import posterior_value, success_rate

EXACT = 1e-12
tries = st.integers(0, 1000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def test_success_rate_by_hand():
    assert success_rate(0, 0) == 0.25  # 0.5 / 2
    assert success_rate(0, 16) == pytest.approx(0.5 / 18, abs=EXACT)
    assert success_rate(16, 16) == pytest.approx(16.5 / 18, abs=EXACT)
    assert success_rate(4, 16) == 0.25  # 4.5 / 18: rarely solved, just


def test_posterior_value_by_hand():
    assert posterior_value(0, 0, 0.7) == 0.7  # no outcomes: the model's own
    assert posterior_value(3, 8, 0.9) == pytest.approx(4.8 / 10, abs=EXACT)
    assert posterior_value(8, 8, 0.1) == pytest.approx(8.2 / 10, abs=EXACT)


@given(tries, st.floats(0, 1))
def test_a_posterior_lies_between_the_model_and_what_was_counted(counted, value):
    num_ok, num_tries = counted
    posterior = posterior_value(num_ok, num_tries, value)
    rate = num_ok / num_tries if num_tries else value
    assert min(rate, value) - EXACT <= posterior <= max(rate, value) + EXACT


@given(tries)
def test_success_rate_is_the_posterior_of_a_model_that_says_one_quarter(counted):
    assert success_rate(*counted) == pytest.approx(posterior_value(*counted, 0.25), abs=EXACT)


@pytest.mark.parametrize("counted", [(-1, 3), (4, 3), (0, -1), (float("nan"), 3)])
def test_impossible_counts_are_refused(counted):
    with pytest.raises(ValueError, match="successes between 0 and the number of tries"):
        success_rate(*counted)
    with pytest.raises(ValueError, match="successes between 0 and the number of tries"):
        posterior_value(*counted, 0.5)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_value_that_is_no_probability_is_refused(value):
    with pytest.raises(ValueError, match=r"value in \[0, 1\]"):
        posterior_value(1, 2, value)
