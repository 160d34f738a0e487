"""Credit of a review and its second attempt, and which second attempts are distilled.

Source: SRRL (arXiv 2607.05541). The R reviews of one failed attempt are a group:

    A_j = r2_j - mean(r2)      of review j and of second attempt j; no standard deviation

Second attempts that succeed are targets for the prompt alone, but not (our choice) where the prompt
is solved already.
"""

import math
from collections.abc import Sequence

MIN_SPREAD = 1e-6  # outcomes closer than this are equal, as for groups of attempts
SOLVED = 0.75


def review_advantages(second_rewards: Sequence[float | None]) -> list[float | None]:
    """Return the advantage of each review and second attempt of a group, [R].

    Args:
        second_rewards: [R], of the second attempts; None where there is no score.

    Returns:
        None where there is no score; exactly 0 where all scores are equal or there is one.

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [reward for reward in second_rewards if reward is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"expected finite rewards, None without a score; came {second_rewards}")
    mean = math.fsum(scored) / len(scored) if scored else 0.0
    is_equal = not scored or max(scored) - min(scored) < MIN_SPREAD
    return [
        None if reward is None else 0.0 if is_equal else reward - mean for reward in second_rewards
    ]


def is_distilled(
    reward: float | None, threshold: float, p_hat: float, solved: float = SOLVED
) -> bool:
    """Return whether a second attempt is a target.

    Args:
        reward: its own; None without a score.
        threshold: it succeeded with this reward or more.
        p_hat: recent success rate of the prompt.
        solved: success rate from which a prompt counts as solved.
    """
    return reward is not None and reward >= threshold and p_hat < solved
