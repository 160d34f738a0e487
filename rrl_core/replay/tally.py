"""Running sum of priorities, in bounded memory and to the same bits in every order.

Weights are sorted into bins by their log, 8 to an octave, and summed within a bin as integers:
float sums would differ with the order of the rows, and with them the recorded probabilities. The
sum is right to 1e-12, the entropy to 4e-4 nats.
"""

import math
from collections import Counter

import numpy as np

from rrl_core.replay.factors import Floats

BINS_PER_OCTAVE = 8
UNIT_BITS = 40  # a weight is counted in 2^-40 of the lower end of its bin
TINY = 1e-300


class Tally:
    """Number, log-sum and entropy of weights that are given by their logs."""

    def __init__(self) -> None:
        self.num = 0
        self._nums: Counter[int] = Counter()
        self._sums: Counter[int] = Counter()

    def add(self, log_weights: Floats) -> None:
        """Count the weights exp(log_weights), [N], all finite."""
        places = log_weights * (BINS_PER_OCTAVE / math.log(2))
        bins, inverse, nums = np.unique(np.floor(places), return_inverse=True, return_counts=True)
        within = np.exp2((places - bins[inverse]) / BINS_PER_OCTAVE)  # in [1, 2^(1/8))
        sums = np.zeros(len(bins), dtype=np.int64)
        np.add.at(sums, inverse, np.rint(within * 2**UNIT_BITS).astype(np.int64))
        for place, count, total in zip(bins.tolist(), nums.tolist(), sums.tolist(), strict=True):
            self._nums[int(place)] += count
            self._sums[int(place)] += total
        self.num += len(log_weights)

    def log_sum(self) -> float:
        """Return ln of the sum of the weights; -inf when there are none."""
        if not self.num:
            return -math.inf
        bins, _, sums = self._sorted()
        total = float((sums * np.exp2((bins - bins[-1]) / BINS_PER_OCTAVE)).sum())
        return math.log(total) + float(_log_unit(bins)[-1])

    def entropy(self, uniform_share: float) -> float:
        """Return the entropy of the first pick, in nats; 0 when there is nothing to pick."""
        if not self.num:
            return 0.0
        bins, nums, sums = self._sorted()
        log_weights = np.log(sums / nums) + _log_unit(bins)
        p = mixture(log_weights - self.log_sum(), uniform_share, self.num)
        return float(-(nums * p * np.log(np.maximum(p, TINY))).sum())

    def _sorted(self) -> tuple[Floats, Floats, Floats]:
        """Return bins, numbers of weights and their sums, in the order of the bins."""
        bins = sorted(self._nums)
        columns = (bins, [self._nums[b] for b in bins], [self._sums[b] for b in bins])
        first, second, third = (np.array(column, dtype=np.float64) for column in columns)
        return first, second, third


def mixture(log_shares: Floats, uniform_share: float, num: int) -> Floats:
    """Return the probability of being the first pick: (1 - u) w / sum(w) + u / n.

    Args:
        log_shares: ln of w / sum(w).
        uniform_share: u.
        num: n, weights in the sum.
    """
    prioritised: Floats = np.exp(np.minimum(0.0, log_shares))
    return (1 - uniform_share) * prioritised + uniform_share / num


def _log_unit(bins: Floats) -> Floats:
    """Return ln of what the sum of a bin is counted in."""
    return (bins / BINS_PER_OCTAVE - UNIT_BITS) * math.log(2)
