"""Retention: which entries stay within the capacity; states are judged again at every refit.

Kept are those with the largest base * rarity * freshness. Our choices: what was never judged comes
first, since nothing is known against it; ties are decided by a hash of the entry id, which favours
no prompt.
"""

from collections.abc import Iterable

import numpy as np

from rrl_core.replay.factors import Candidates, PriorityRule, base, log_freshness, rarity
from rrl_core.replay.ranking import Best


def retained(chunks: Iterable[Candidates], capacity: int, rule: PriorityRule) -> list[str]:
    """Return the entry ids that stay, best first.

    Memory is that of `capacity` rows and one chunk; order and chunking do not matter.

    Args:
        chunks: the candidates, eligible or not; NaN values mean never judged.
        capacity: most entries that stay, 1 or more.
        rule: what the base rests on, and how trajectories fade.
    """
    best = Best(capacity)
    for chunk in chunks:
        worth = base(chunk, rule) * rarity(chunk) * np.exp(log_freshness(chunk, rule))
        best.add(chunk, np.where(np.isnan(worth), np.inf, worth))
    return [] if best.rows is None else best.rows.entry_id.tolist()
