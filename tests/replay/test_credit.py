import pytest

from rrl_core.replay.credit import offline_advantage, prefix_advantage, recent_mean_reward

EXACT = 1e-12


def test_the_prefix_gets_what_its_continuations_do_better_than_the_prompt():
    # (5/8 - 1/8) / 0.3
    assert prefix_advantage(0.625, 0.125, 0.1) == pytest.approx(5 / 3, abs=EXACT)


def test_the_prefix_is_never_pushed_down():
    assert prefix_advantage(0.0, 0.4, 0.1) == 0.0


def test_only_prefixes_of_rarely_solved_prompts_get_credit():
    credit = prefix_advantage([1.0, 1.0], [0.4, 0.4], [0.25, 0.2501])
    assert credit == pytest.approx([2.0, 0.0], abs=EXACT)


def test_credit_is_per_unit_of_reward_range():
    assert prefix_advantage(1.0, 0.0, 0.1, reward_range=2.0) == pytest.approx(5 / 3, abs=EXACT)
    assert offline_advantage(1.0, 0.0, reward_range=2.0) == pytest.approx(5 / 3, abs=EXACT)


def test_offline_a_rollout_is_compared_with_the_success_rate():
    # (1 - 0.1) / 0.3 and (0 - 0.1) / 0.3
    assert offline_advantage([1.0, 0.0], [0.1, 0.1]) == pytest.approx([3.0, -1 / 3], abs=EXACT)


def test_the_prompt_counts_by_its_last_sixteen_scored_attempts():
    rewards = [0.0] * 5 + [1.0] * 4 + [None] * 3 + [0.0] * 12
    assert recent_mean_reward(rewards) == 0.25  # 4 of 16
    assert recent_mean_reward([1.0, None, 0.0]) == 0.5
    assert recent_mean_reward([None]) is None


@pytest.mark.parametrize("reward_range", [0.0, -1.0, float("nan")])
def test_a_range_that_is_none_is_refused(reward_range):
    with pytest.raises(ValueError, match="reward range above 0"):
        prefix_advantage(1.0, 0.0, 0.1, reward_range=reward_range)
    with pytest.raises(ValueError, match="reward range above 0"):
        offline_advantage(1.0, 0.0, reward_range=reward_range)
