"""Dynamic sampling: the part of DAPO that acts between the rewards and the loss.

Source: DAPO (arXiv 2503.14476, section 3.2). Its loss (token mean, clip 0.2/0.28) is
`objectives.ALGORITHMS["dapo"]`; its overlong shaping is in `rrl_core.tasks.shaping`.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from rrl_core.algorithms.advantages import has_signal


def informative_rows(rewards_B: Sequence[float | None], group_ids_B: Sequence[str]) -> list[bool]:
    """Tell which rows dynamic sampling keeps: those of groups whose rewards differ.

    Args:
        rewards_B: [B] finite rewards; None where the scorer gave none.
        group_ids_B: [B] rows with equal ids form a group.

    Returns:
        [B] True = keep. Rows without a reward, and whole groups of equal rewards, are not kept.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for reward, group_id in zip(rewards_B, group_ids_B, strict=True):
        if reward is not None:
            rewards[group_id].append(reward)
    kept = {
        group_id
        for group_id, group in rewards.items()
        if has_signal(torch.tensor(group, dtype=torch.float64))
    }
    return [
        reward is not None and group_id in kept
        for reward, group_id in zip(rewards_B, group_ids_B, strict=True)
    ]
