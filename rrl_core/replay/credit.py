"""Credit for what is given or old: the prefix of a state, a trajectory without a fresh group.

Our choice throughout: the paper masks the prefix. Masking alone gives the token that began the idea
no gradient, so the policy still never enters the state from the prompt.

    A_pre = max(0, mean R of the continuations - m_x) / 0.3    only while p_hat(x) <= 0.25
    A_off = (r - p_hat(x)) / 0.3

m_x is the mean reward of the prompt's last 16 on-policy attempts. 0.3 stands for the standard
deviation of a group, which one success does not have; it is per unit of reward range. Only the
positive part counts: a prefix is never pushed down for continuations that fail today.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rrl_core.replay.factors import Floats

SPREAD = 0.3
RARELY_SOLVED = 0.25
RECENT_ATTEMPTS = 16


def recent_mean_reward(rewards: Sequence[float | None]) -> float | None:
    """Return m_x: the mean of the last 16 rewards there are; None if there are none.

    Args:
        rewards: of the prompt's on-policy attempts, oldest first; None where there is no score.
    """
    recent = [reward for reward in rewards if reward is not None][-RECENT_ATTEMPTS:]
    return math.fsum(recent) / len(recent) if recent else None


def prefix_advantage(
    continuation_mean: ArrayLike,
    prompt_mean: ArrayLike,
    p_hat: ArrayLike,
    reward_range: float = 1.0,
) -> Floats:
    """Return the advantage of a state's given tokens, 0 or more.

    Args:
        continuation_mean: mean reward of the state's continuations of this iteration.
        prompt_mean: m_x, of the same shape.
        p_hat: recent success rate of the prompt, of the same shape.
        reward_range: largest minus smallest possible reward, above 0.

    Raises:
        ValueError: the range is not above 0.
    """
    _check_range(reward_range)
    better = np.maximum(0.0, np.subtract(continuation_mean, prompt_mean))
    return np.where(np.asarray(p_hat) <= RARELY_SOLVED, better / (SPREAD * reward_range), 0.0)


def offline_advantage(reward: ArrayLike, p_hat: ArrayLike, reward_range: float = 1.0) -> Floats:
    """Return the advantage of a rollout that has no fresh group beside it.

    Args:
        reward: of the rollout.
        p_hat: recent success rate of its prompt, of the same shape.
        reward_range: largest minus smallest possible reward, above 0.

    Raises:
        ValueError: the range is not above 0.
    """
    _check_range(reward_range)
    return np.asarray(np.subtract(reward, p_hat) / (SPREAD * reward_range), dtype=np.float64)


def _check_range(reward_range: float) -> None:
    if not reward_range > 0:
        raise ValueError(f"expected a reward range above 0; came {reward_range}")
