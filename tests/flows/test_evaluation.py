"""Intervals of evaluations, against numbers derived by hand."""

import pytest

from flows.evaluation import evaluation_rows, mean_interval, wilson_interval

TOLERANCE = 1e-6


def test_wilson_interval_of_eight_in_ten():
    # p = .8, n = 10, z = 1.959964: centre (.8 + .19207) / 1.384146 = .716740,
    # half z * sqrt(.8 * .2 / 10 + .0096036) / 1.384146 = .226578
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.490162, abs=1e-5)
    assert high == pytest.approx(0.943318, abs=1e-5)


def test_wilson_interval_stays_inside_zero_and_one():
    assert wilson_interval(0, 5)[0] == 0.0
    assert wilson_interval(5, 5)[1] == 1.0


def test_interval_without_trials_is_refused():
    with pytest.raises(ValueError, match="at least one trial"):
        wilson_interval(0, 0)


def test_scores_outside_the_unit_interval_get_a_normal_interval():
    # mean 1, variance ((-2)**2 + 0 + 2**2) / 2 = 4, half = 1.959964 * sqrt(4 / 3) = 2.263171
    low, high = mean_interval([-1.0, 1.0, 3.0])
    assert (low, high) == (pytest.approx(-1.263171, abs=1e-5), pytest.approx(3.263171, abs=1e-5))


def test_unscored_rollouts_are_counted_and_leave_the_mean():
    rollouts = [
        {"event_id": f"ro-{i}", "iteration": 4, "policy_version": 4, "temperature": 0.0,
         "num_completion_tokens": 10 * i}
        for i in range(3)
    ]  # fmt: skip
    scores = [
        {"target_id": f"ro-{i}", "scorer": "s", "scorer_version": "1", "value": value}
        for i, value in enumerate([1.0, 0.0, None])
    ]
    (row,) = evaluation_rows(rollouts, scores)
    assert (row["num_prompts"], row["num_unscored"], row["mean_score"]) == (2, 1, 0.5)
    assert row["mean_completion_tokens"] == pytest.approx(10.0, abs=TOLERANCE)
