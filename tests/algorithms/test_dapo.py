from rrl_core.algorithms.dapo import informative_rows


def test_dynamic_sampling_keeps_groups_whose_rewards_differ():
    rewards = [1.0, 0.0, 0.0, 0.25, 1.0, None, 0.5, 0.5]
    group_ids = ["mixed", "all_wrong", "all_wrong", "mixed", "right", "right", "same", "same"]
    assert informative_rows(rewards, group_ids) == [True, False, False, True] + [False] * 4


def test_a_missing_reward_is_not_kept_in_a_kept_group():
    assert informative_rows([1.0, None, 0.0], ["g"] * 3) == [True, False, True]
