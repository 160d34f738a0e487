"""Intervals of means over few runs: percentile bootstrap (Efron and Tibshirani 1993)."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
LEAST = 3  # values: an interval of two says nothing


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean; equal values give equal bits. None below three."""
    if len(values) < LEAST:
        return None
    given = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(given), size=(RESAMPLES, len(given)))
    low, high = np.percentile(given[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def paired_interval(
    values: Sequence[float], others: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Return the mean difference values - others of pairs, and its interval.

    Raises:
        ValueError: there are not as many of one as of the other.
    """
    differences = [a - b for a, b in zip(values, others, strict=True)]
    return float(np.mean(differences)), bootstrap_interval(differences)
