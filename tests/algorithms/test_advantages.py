import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.algorithms.advantages import group_advantages

GOLDEN = 1e-4  # of the four decimals the derivations give
FLOAT64 = 1e-9

rewards = st.floats(-10, 10).map(lambda r: round(r, 3))


def test_one_success_among_seven_failures_is_worth_2_4742():
    # mean 1/8; sum of squares (7/8)^2 + 7 (1/8)^2 = 0.875; std = sqrt(0.875 / 7) = 0.353553
    # A = 0.875 / (0.353553 + 1e-4) = 2.4742; the failures: -0.125 / 0.353653 = -0.35345
    advantages = group_advantages([1.0] + [0.0] * 7, ["g"] * 8, "grpo")
    assert advantages[0] == pytest.approx(2.4742, abs=GOLDEN)
    assert advantages[1:] == pytest.approx([-0.35345] * 7, abs=GOLDEN)


def test_dr_grpo_only_centres():
    # mean of 1, 0, 0, 1, 1 is 0.6
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0, 1.0], ["g"] * 5, "dr_grpo")
    assert advantages == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4], abs=FLOAT64)


def test_dapo_normalises_like_grpo():
    assert group_advantages([3.0, 1.0], ["g"] * 2, "dapo") == group_advantages(
        [3.0, 1.0], ["g"] * 2, "grpo"
    )


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(
    "equal",
    [
        [0.3] * 8,
        [0.30000001192092896] * 8,  # float32(0.3); its float32 mean differs in the last bit
        [0.3, 0.3 + 5e-7, 0.3 - 4e-7],  # closer than 1e-6
        [0.7],  # a group of one
    ],
)
def test_equal_rewards_give_exactly_zero(equal, algorithm):
    assert group_advantages(equal, ["g"] * len(equal), algorithm) == [0.0] * len(equal)


def test_a_difference_of_two_millionths_is_one():
    # mean 1e-6, std sqrt(2) 1e-6: +-1e-6 / (1.41421e-6 + 1e-4) = +-0.0098605
    advantages = group_advantages([0.0, 2e-6], ["g"] * 2, "grpo")
    assert advantages == pytest.approx([-0.0098605, 0.0098605], abs=1e-7)


def test_a_missing_reward_leaves_its_group_and_nothing_else():
    with_none = group_advantages([1.0, None, 0.0, 0.5], ["g"] * 4, "grpo")
    without = group_advantages([1.0, 0.0, 0.5], ["g"] * 3, "grpo")
    assert with_none == [without[0], None, without[1], without[2]]


def test_a_group_left_with_one_reward_has_no_advantage():
    assert group_advantages([None, 1.0, None], ["g"] * 3, "grpo") == [None, 0.0, None]


def test_groups_are_told_apart_by_id_not_by_place():
    # a: 1, 0 (rows 0, 3); b: 0, 0, 1 (rows 1, 2, 4): b's mean is 1/3
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0, 1.0], list("abbab"), "dr_grpo")
    assert advantages == pytest.approx([0.5, -1 / 3, -1 / 3, -0.5, 2 / 3], abs=FLOAT64)


@given(st.lists(rewards, min_size=2, max_size=12), st.data())
def test_order_and_a_shift_change_nothing(values, data):
    group_ids = data.draw(
        st.lists(st.sampled_from("abc"), min_size=len(values), max_size=len(values))
    )
    order = data.draw(st.permutations(range(len(values))))
    base = group_advantages(values, group_ids, "grpo")
    moved = group_advantages(
        [values[i] + 2.5 for i in order], [group_ids[i] for i in order], "grpo"
    )
    assert moved == pytest.approx([base[i] for i in order], abs=1e-6)


@given(st.lists(rewards, min_size=2, max_size=12))
def test_advantages_of_a_group_sum_to_zero_and_follow_a_float64_loop(values):
    advantages = group_advantages(values, ["g"] * len(values), "grpo")
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    if max(values) - min(values) >= 1e-6:
        expected = [(v - mean) / (std + 1e-4) for v in values]
        assert advantages == pytest.approx(expected, abs=FLOAT64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad):
    with pytest.raises(ValueError, match=r"row 1 of group 'b'.*give None"):
        group_advantages([0.0, bad], ["a", "b"], "grpo")


def test_rewards_without_group_ids_are_refused():
    with pytest.raises(ValueError, match="2 rewards and 1 ids"):
        group_advantages([0.0, 1.0], ["a"], "grpo")
