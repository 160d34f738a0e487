import pytest

from rrl_core.replay.outcomes import compare, is_success


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        (0.0, 1.0, "rescued"),
        (1.0, 1.0, "retained"),
        (1.0, 0.0, "regressed"),
        (0.0, 0.0, "still_failed"),
        (0.5, 0.9, "still_failed"),  # partial credit is no success
    ],
)
def test_old_and_new_success_decide_the_outcome(old, new, outcome):
    assert compare(old, new) == outcome


def test_a_reward_just_below_one_is_a_success():
    assert [is_success(r) for r in (0.998, 0.999, 1.0)] == [False, True, True]
