"""Evaluation rows: the mean score of each scorer with its 95 % interval."""

import math
from collections.abc import Sequence
from statistics import fmean

from flows.translate import Row

Z95 = 1.959963984540054


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion (Wilson 1927).

    `successes` may be a sum of scores in [0, 1], for which the interval is conservative.
    """
    if trials == 0:
        raise ValueError("an interval needs at least one trial")
    p = successes / trials
    spread = Z95**2 / trials
    centre = (p + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(p * (1 - p) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean: Wilson for scores in [0, 1], else normal."""
    if all(0 <= s <= 1 for s in scores):
        return wilson_interval(math.fsum(scores), len(scores))
    mean = fmean(scores)
    variance = math.fsum((s - mean) ** 2 for s in scores) / max(1, len(scores) - 1)
    half = Z95 * math.sqrt(variance / len(scores))
    return mean - half, mean + half


def evaluation_rows(rollouts: Sequence[Row], scores: Sequence[Row]) -> list[Row]:
    """Return one `evaluations` row per scorer over the given evaluation rollouts."""
    by_id = {row["event_id"]: row for row in rollouts}
    judged = [row for row in scores if row["target_id"] in by_id]
    scorers = dict.fromkeys((row["scorer"], row["scorer_version"]) for row in judged)
    rows = []
    for name, version in scorers:
        mine = [r for r in judged if (r["scorer"], r["scorer_version"]) == (name, version)]
        values = [r["value"] for r in mine if r["value"] is not None]
        low, high = mean_interval(values) if values else (None, None)
        first = by_id[mine[0]["target_id"]]
        rows.append(
            {
                "iteration": first["iteration"],
                "name": "held_out",
                "scorer": name,
                "scorer_version": version,
                "policy_version": first["policy_version"],
                "num_prompts": len(values),
                "num_unscored": len(mine) - len(values),
                "mean_score": fmean(values) if values else None,
                "ci_low": low,
                "ci_high": high,
                "mean_completion_tokens": fmean(r["num_completion_tokens"] for r in rollouts),
                "temperature": first["temperature"],
            }
        )
    return rows
