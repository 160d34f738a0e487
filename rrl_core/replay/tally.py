"""Running sum of priorities, in bounded memory and to the same bits in every order.

Weights are sorted into bins by their log, 32 to an octave, and summed within a bin as integers:
float sums would differ with the order of the rows, and with them the recorded probabilities. The
sum is right to 1e-12, the entropy to 1e-4 of itself.
"""

import math
from collections import Counter

import numpy as np

from rrl_core.replay.factors import Floats

BINS_PER_OCTAVE = 32
UNIT_BITS = 40  # a weight is counted in 2^-40 of the lower end of its bin


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
        within = np.exp2((places - bins[inverse]) / BINS_PER_OCTAVE)  # in [1, 2^(1/32))
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
        top = max(self._sums)
        total = math.fsum(
            number * 2.0 ** ((place - top) / BINS_PER_OCTAVE)
            for place, number in self._sums.items()
        )
        return math.log(total) + (top / BINS_PER_OCTAVE - UNIT_BITS) * math.log(2)

    def probability(self, log_weight: float, uniform_share: float) -> float:
        """Return the probability of being the first pick: (1 - u) w / sum(w) + u / n."""
        return self._mixture(log_weight - self.log_sum(), uniform_share)

    def entropy(self, uniform_share: float) -> float:
        """Return the entropy of the first pick, in nats; 0 when there is nothing to pick."""
        log_sum = self.log_sum()
        terms = []
        for place, count in self._nums.items():
            mean = math.log(self._sums[place] / count)
            log_weight = mean + (place / BINS_PER_OCTAVE - UNIT_BITS) * math.log(2)
            p = self._mixture(log_weight - log_sum, uniform_share)
            terms.append(-count * p * math.log(p) if p > 0 else 0.0)
        return max(0.0, math.fsum(terms))

    def _mixture(self, log_share: float, uniform_share: float) -> float:
        return (1 - uniform_share) * math.exp(min(0.0, log_share)) + uniform_share / self.num
