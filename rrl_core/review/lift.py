"""Lift: by how much a treated answer is better than its control, over pairs of one prompt.

    lift = mean_i (treated_i - control_i)
    95 % interval = lift +- 1.96 * sd / sqrt(n)      sd with n - 1

The normal interval of the mean of paired differences, as in the view `review_lifts`. None is given
below 30 pairs, where it does not hold for outcomes of 0 and 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_PAIRS = 30
Z95 = 1.96


@dataclass(frozen=True)
class Lift:
    """Means over pairs, and the interval of their difference."""

    num: int
    """Pairs."""
    treated: float | None
    """Mean outcome; None without pairs."""
    control: float | None
    """Mean outcome; None without pairs."""
    lift: float | None
    """Treated minus control; None without pairs."""
    low: float | None
    """Lower end of the 95 % interval; None below 30 pairs."""
    high: float | None
    """Upper end; None below 30 pairs."""


def paired_lift(pairs: Sequence[tuple[float, float]]) -> Lift:
    """Return the lift over pairs (treated, control) of outcomes.

    Raises:
        ValueError: an outcome is not finite.
    """
    num = len(pairs)
    if not all(math.isfinite(outcome) for pair in pairs for outcome in pair):
        raise ValueError("expected finite outcomes; leave out the pairs without a score")
    if not num:
        return Lift(0, None, None, None, None, None)
    treated = math.fsum(first for first, _ in pairs) / num
    control = math.fsum(second for _, second in pairs) / num
    lift = math.fsum(first - second for first, second in pairs) / num
    if num < MIN_PAIRS:
        return Lift(num, treated, control, lift, None, None)
    variance = math.fsum((first - second - lift) ** 2 for first, second in pairs) / (num - 1)
    half = Z95 * math.sqrt(variance / num)
    return Lift(num, treated, control, lift, lift - half, lift + half)
