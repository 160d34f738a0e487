import pytest

from rrl_core.algorithms.dapo import informative_rows, overlong_penalty


def test_dynamic_sampling_keeps_groups_whose_rewards_differ():
    rewards = [1.0, 0.0, 0.0, 0.25, 1.0, None, 0.5, 0.5]
    group_ids = ["mixed", "all_wrong", "all_wrong", "mixed", "right", "right", "same", "same"]
    assert informative_rows(rewards, group_ids) == [True, False, False, True] + [False] * 4


def test_a_missing_reward_is_not_kept_in_a_kept_group():
    assert informative_rows([1.0, None, 0.0], ["g"] * 3) == [True, False, True]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [
        (0, 0.0),
        (80, 0.0),  # the buffer of 20 begins above 100 - 20
        (81, -0.05),  # 1 of 20 into it
        (90, -0.5),
        (100, -1.0),
        (101, -1.0),
        (500, -1.0),
    ],
)
def test_the_overlong_penalty_grows_through_the_buffer(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20) == pytest.approx(penalty)


@pytest.mark.parametrize("buffer_tokens", [0, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer_tokens):
    with pytest.raises(ValueError, match=f"got {buffer_tokens} and 100"):
        overlong_penalty(5, max_tokens=100, buffer_tokens=buffer_tokens)
