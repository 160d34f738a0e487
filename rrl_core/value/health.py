"""Health of a value model: does it rank states of one prompt, and is it worth listening to?

Source: the AUROC is Mann and Whitney's U / (n_1 n_0), here by average ranks; Brier's score is the
mean squared error of a probability. What counts as healthy is ours.

    AUROC = (sum of ranks of the successes - n_1 (n_1 + 1) / 2) / (n_1 n_0)

Values must be out of fold (`ValueModel.predict` on what it was fitted to is); a model examined on
what it has learned by heart is always healthy.

Our choice:
1. Within-prompt AUROC decides first: the mean over prompts with successes and failures, each prompt
   equally. Replay compares the states of a prompt, and a model that only knows which prompts are
   hard is blind there, however high its pooled AUROC.
2. Healthy: within-prompt AUROC >= 0.55 over >= 20 mixed prompts and pooled AUROC >= 0.6. With fewer
   mixed prompts nothing is known: insufficient_data.
3. Alarms, which decide nothing: Pearson's correlation of values with the length of the prefix and
   with how common the solution is among the prompt's successes. None where there is no variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_MIXED_PROMPTS = 20
MIN_WITHIN_PROMPT_AUROC = 0.55
MIN_AUROC = 0.6
NUM_BINS = 10
AGE_BUCKETS = (0, 5, 10, 20)  # first age of each, in policy versions; 5 is a half-life of weights

Verdict = Literal["healthy", "unhealthy", "insufficient_data"]


@dataclass(frozen=True)
class Bucket:
    """States taken together; means are None where there are none."""

    num_states: int
    mean_value: float | None
    mean_outcome: float | None


@dataclass(frozen=True)
class AgeBucket(Bucket):
    """States whose outcomes are at least `min_age` versions old, up to the next bucket."""

    min_age: int
    auroc: float | None
    brier: float | None


@dataclass(frozen=True)
class Health:
    """What an examination found; None where a number does not exist."""

    verdict: Verdict
    num_states: int
    num_prompts: int
    num_mixed_prompts: int
    mean_outcome: float | None
    auroc: float | None
    within_prompt_auroc: float | None
    brier: float | None
    length_corr: float | None
    signature_corr: float | None
    calibration: tuple[Bucket, ...]
    by_age: tuple[AgeBucket, ...]


def health(
    values_N: ArrayLike,
    labels_N: ArrayLike,
    prompt_ids: Sequence[str],
    prefix_tokens_N: ArrayLike,
    ages_N: ArrayLike,
    signature_counts: Sequence[int | None],
) -> Health:
    """Examine values against outcomes.

    Args:
        values_N: [N] in [0, 1], out of fold.
        labels_N: [N] 1 = the response succeeded, 0 = it failed.
        prompt_ids: [N].
        prefix_tokens_N: [N] length of the state's prefix.
        ages_N: [N] policy versions since the outcome, 0 or more.
        signature_counts: [N] successes of the prompt that share the response's solution signature;
            None where it has none.

    Raises:
        ValueError: lengths differ, a value is no probability, or a label neither 0 nor 1.
    """
    values, labels = _checked(values_N, labels_N)
    tokens, ages = (np.asarray(column, dtype=np.int64) for column in (prefix_tokens_N, ages_N))
    if (ages < 0).any():
        raise ValueError(f"expected ages of 0 or more policy versions, got {ages.min()}")
    lengths = {len(c) for c in (values, prompt_ids, tokens, ages, signature_counts)}
    if len(lengths) > 1:
        raise ValueError(f"expected columns of equally many states, got {sorted(lengths)}")
    pooled = auroc(values, labels)
    within, num_mixed = within_prompt_auroc(values, labels, prompt_ids)
    is_signed = np.array([count is not None for count in signature_counts], dtype=bool)
    counts = [count for count in signature_counts if count is not None]
    return Health(
        verdict=_verdict(pooled, within, num_mixed),
        num_states=len(values),
        num_prompts=len(set(prompt_ids)),
        num_mixed_prompts=num_mixed,
        mean_outcome=_mean(labels),
        auroc=pooled,
        within_prompt_auroc=within,
        brier=brier(values, labels),
        length_corr=correlation(values, tokens),
        signature_corr=correlation(values[is_signed], counts),
        calibration=calibration(values, labels),
        by_age=_by_age(values, labels, ages),
    )


def auroc(scores_N: ArrayLike, labels_N: ArrayLike) -> float | None:
    """Return the probability that a success scores above a failure, a tie counting one half.

    Args:
        scores_N: [N] finite; only their order matters.
        labels_N: [N] 1 = success, 0 = failure.

    Returns:
        [0, 1], 0.5 = no better than chance; None where either class is missing.
    """
    scores, labels = np.asarray(scores_N, dtype=np.float64), np.asarray(labels_N, dtype=bool)
    num_ok = int(labels.sum())
    num_pairs = num_ok * (len(labels) - num_ok)
    if num_pairs == 0:
        return None
    _, place_N, size_U = np.unique(scores, return_inverse=True, return_counts=True)
    rank_U = np.cumsum(size_U) - (size_U - 1) / 2  # average rank of equal scores, from 1
    wins = float(rank_U[place_N][labels].sum()) - num_ok * (num_ok + 1) / 2
    return wins / num_pairs


def within_prompt_auroc(
    scores_N: ArrayLike, labels_N: ArrayLike, prompt_ids: Sequence[str]
) -> tuple[float | None, int]:
    """Return the mean AUROC over prompts with successes and failures, and their number.

    Args:
        scores_N: [N] finite; a constant added to a prompt's scores changes nothing.
        labels_N: [N] 1 = success, 0 = failure.
        prompt_ids: [N].
    """
    scores, labels = np.asarray(scores_N, dtype=np.float64), np.asarray(labels_N, dtype=bool)
    names, prompt_N = np.unique(np.asarray(prompt_ids, dtype=object), return_inverse=True)
    order = np.argsort(prompt_N, kind="stable")
    ends = np.cumsum(np.bincount(prompt_N, minlength=len(names)))[:-1]
    found = [auroc(scores[rows], labels[rows]) for rows in np.split(order, ends)]
    mixed = [prompt for prompt in found if prompt is not None]
    return _mean(mixed), len(mixed)


def brier(values_N: ArrayLike, labels_N: ArrayLike) -> float | None:
    """Return the mean of (value - label)^2; None without states."""
    values, labels = _checked(values_N, labels_N)
    return _mean((values - labels) ** 2)


def calibration(values_N: ArrayLike, labels_N: ArrayLike) -> tuple[Bucket, ...]:
    """Return ten equal bins of values, [0, 0.1) to [0.9, 1], with what was said and what came."""
    values, labels = _checked(values_N, labels_N)
    bin_N = np.minimum((values * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = ((values[bin_N == i], labels[bin_N == i]) for i in range(NUM_BINS))
    return tuple(Bucket(len(v), _mean(v), _mean(y)) for v, y in bins)


def correlation(values_N: ArrayLike, other_N: ArrayLike) -> float | None:
    """Return Pearson's correlation in [-1, 1]; None where either column has no variance."""
    values, other = (np.asarray(column, dtype=np.float64) for column in (values_N, other_N))
    if len(values) == 0 or np.ptp(values) == 0 or np.ptp(other) == 0:
        return None
    values, other = values - values.mean(), other - other.mean()
    return float(values @ other / np.sqrt((values @ values) * (other @ other)))


def _verdict(pooled: float | None, within: float | None, num_mixed: int) -> Verdict:
    if num_mixed < MIN_MIXED_PROMPTS or pooled is None or within is None:
        return "insufficient_data"
    is_healthy = within >= MIN_WITHIN_PROMPT_AUROC and pooled >= MIN_AUROC
    return "healthy" if is_healthy else "unhealthy"


def _by_age(
    values: NDArray[np.float64], labels: NDArray[np.float64], ages: NDArray[np.int64]
) -> tuple[AgeBucket, ...]:
    bucket_N = np.searchsorted(AGE_BUCKETS, ages, side="right") - 1
    buckets = []
    for index, min_age in enumerate(AGE_BUCKETS):
        v, y = values[bucket_N == index], labels[bucket_N == index]
        buckets.append(AgeBucket(len(v), _mean(v), _mean(y), min_age, auroc(v, y), brier(v, y)))
    return tuple(buckets)


def _mean(numbers: Any) -> float | None:
    return float(np.mean(numbers)) if len(numbers) else None


def _checked(
    values_N: ArrayLike, labels_N: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both columns as float64."""
    values, labels = (np.asarray(column, dtype=np.float64) for column in (values_N, labels_N))
    if values.shape != labels.shape:
        raise ValueError(
            f"expected equally many values and labels, got {values.shape} and {labels.shape}"
        )
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("expected values in [0, 1], got others")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("expected labels of 0 or 1, got others; leave unscored states out")
    return values, labels
