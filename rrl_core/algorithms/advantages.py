"""Advantages: how much better a rollout did than the others of its group.

Source: GRPO (arXiv 2402.03300, section 4.1.2) and Dr. GRPO (arXiv 2503.20783, section 3.2).

    grpo:     A_i = (r_i - mean(r)) / (std(r) + 1e-4)      std with n - 1
    dr_grpo:  A_i =  r_i - mean(r)

Differs from the sources in:
1. Equal rewards are recognised by max - min < 1e-6, not left to rounding: eight float32 rewards of
   0.3 divided by an epsilon of 1e-8 would give |A| = 0.7.
2. A group of one has advantage 0: there is nothing to compare it with.
3. A rollout without a reward leaves its group; it has no advantage (None), not one of 0.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from rrl_core.algorithms.objectives import ALGORITHMS

EQUAL_REWARDS = 1e-6  # a smaller range of a group's rewards is rounding
STD_EPSILON = 1e-4


def group_advantages(
    rewards_B: Sequence[float | None], group_ids_B: Sequence[str], algorithm: str
) -> list[float | None]:
    """Compare each reward with the others of its group.

    Computed in float64. Adding a constant to a group's rewards, or another order of rows, changes
    nothing.

    Args:
        rewards_B: [B] finite rewards; None where the scorer gave none.
        group_ids_B: [B] rows with equal ids form a group, wherever they stand; sizes may differ.
        algorithm: a key of `objectives.ALGORITHMS`; says whether the std divides.

    Returns:
        [B] advantages in the order given, positive = better than the group's mean; exactly 0.0
        where the group's rewards are equal or only one is left; None where the reward is None.

    Raises:
        ValueError: lengths differ, or a reward is not finite.
    """
    if len(rewards_B) != len(group_ids_B):
        raise ValueError(
            f"expected one group id per reward, got {len(rewards_B)} rewards and "
            f"{len(group_ids_B)} ids"
        )
    divide_by_std = ALGORITHMS[algorithm].divide_by_std
    members: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row, (reward, group_id) in enumerate(zip(rewards_B, group_ids_B, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise ValueError(
                f"expected a finite reward, got {reward} in row {row} of group {group_id!r}; "
                "give None where the scorer has no judgement"
            )
        members[group_id].append((row, reward))
    advantages_B: list[float | None] = [None] * len(rewards_B)
    for group in members.values():
        rewards_G = torch.tensor([reward for _, reward in group], dtype=torch.float64)
        for (row, _), advantage in zip(group, _compare(rewards_G, divide_by_std), strict=True):
            advantages_B[row] = advantage
    return advantages_B


def has_signal(rewards_G: torch.Tensor) -> bool:
    """Return whether a group's rewards [G] differ by more than rounding."""
    return len(rewards_G) > 1 and bool(rewards_G.max() - rewards_G.min() >= EQUAL_REWARDS)


def _compare(rewards_G: torch.Tensor, divide_by_std: bool) -> list[float]:
    if not has_signal(rewards_G):
        return [0.0] * len(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if divide_by_std:
        centred_G = centred_G / (rewards_G.std(correction=1) + STD_EPSILON)
    advantages: list[float] = centred_G.tolist()
    return advantages
