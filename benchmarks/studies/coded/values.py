"""The value of states by counting: how often what states the same rule for a class succeeded.

    V(s)  success rate of the class's answers that begin with the prefix's first token
    V(x)  success rate of the class's own attempts

As in the product, an outcome of a continuation weighs 4 and what is judged was never seen: the
outcomes of its own problem are left out of both. A weight halves in a quarter of the run, not in 5
policy versions: a version is 32 samples here, and a rare class comes up every third.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.studies.coded.world import CLASSES, VOCABULARY, Floats
from rrl_core.value.counts import success_rate
from rrl_core.value.model import example_weight

Key = tuple[int, ...]
"""A problem: number of its class, and its digits."""
Place = tuple[int, int]
"""Where a judgement looks: its column of the table, and the number of its problem's own counts."""

PROMPT = len(VOCABULARY)
"""Stands for a first token where a problem is judged without an answer."""


class CountedValues:
    """Outcomes by class and first token.

    Weights grow with time and are scaled when they are read: so all others are halved at once.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._all_2K = np.zeros((2, len(CLASSES) * (PROMPT + 1)))  # successes, tries
        self._own_2X: tuple[list[float], list[float]] = ([], [])
        self._number: dict[tuple[Key, int], int] = {}

    def place(self, problem: Key, token: int) -> Place:
        """Return where answers to the problem that begin with a token are counted."""
        number = self._number.setdefault((problem, token), len(self._number))
        if number == len(self._own_2X[0]):
            for counts in self._own_2X:
                counts.append(0.0)
        return problem[0] * (PROMPT + 1) + token, number

    def add(self, place: Place, is_ok: bool, iteration: int, is_continuation: bool) -> None:
        """Count an outcome of an iteration's policy."""
        weight = example_weight(0, is_continuation) * 2.0 ** (iteration / self._half_life)
        for row, amount in enumerate((weight * is_ok, weight)):
            self._all_2K[row, place[0]] += amount
            self._own_2X[row][place[1]] += amount

    def judge(self, places: Sequence[Place], iteration: int) -> Floats:
        """Return the value at each place [N], by what was counted for other problems."""
        column_N, number_N = np.array(places, dtype=np.int64).reshape(-1, 2).T
        scale = 0.5 ** (iteration / self._half_life)
        own_2N = np.array(self._own_2X)[:, number_N]
        ok_N, tries_N = scale * np.maximum(0.0, self._all_2K[:, column_N] - own_2N)
        ok_N = np.minimum(ok_N, tries_N)
        return success_rate(ok_N, tries_N)
