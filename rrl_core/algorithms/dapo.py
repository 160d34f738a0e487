"""The two parts of DAPO that act before the loss: dynamic sampling and overlong shaping.

Source: DAPO (arXiv 2503.14476, sections 3.2 and 3.4). Its loss (token mean, clip 0.2/0.28) is
`objectives.ALGORITHMS["dapo"]`.
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


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the reward term that makes a completion near the length limit less welcome.

        0                                             num_tokens <= max_tokens - buffer_tokens
        (max_tokens - buffer_tokens - num_tokens) / buffer_tokens           within the buffer
        -1                                            num_tokens > max_tokens

    Args:
        num_tokens: length of the completion.
        max_tokens: the limit.
        buffer_tokens: width of the zone below the limit in which the penalty grows, 1..max_tokens.

    Returns:
        A number in [-1, 0], to be added to the reward.

    Raises:
        ValueError: the buffer is empty or wider than the limit.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"expected 1 <= buffer_tokens <= max_tokens, got {buffer_tokens} and {max_tokens}"
        )
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)
