"""Control arms: which gated prompts also get an answer without the review, to compare with.

Our choice throughout (the paper has no controls):

    retry          the prompt as it is
    no_memory      a review made without memory; only where memory was shown
    blank          a review that says nothing
    raw_feedback   the scorer's feedback in the review's place
    random_review  the review of another prompt

20 % of gated prompts get one arm until every usable arm has 100 answers, then 5 %. The arm is drawn
among those with the fewest answers. Controls are recorded, never learned from.
"""

from collections.abc import Collection, Mapping

import numpy as np

ARMS = ("retry", "no_memory", "blank", "raw_feedback", "random_review")
ENOUGH = 100
SHARE, LATER_SHARE = 0.20, 0.05


def choose_arm(counts: Mapping[str, int], seed: int, usable: Collection[str]) -> str | None:
    """Return the arm that a gated prompt gets; None for most prompts.

    Args:
        counts: answers of each arm so far; 0 for an arm that is not named.
        seed: of this prompt's draw, 0 or more: the same seed and counts give the same arm.
        usable: arms that the prompt can get; none gives None.

    Raises:
        ValueError: an arm is named that there is not.
    """
    if unknown := sorted({*counts, *usable} - set(ARMS)):
        raise ValueError(f"expected arms of {ARMS}; came {unknown}")
    if not usable:
        return None
    fewest = min(counts.get(arm, 0) for arm in usable)
    draw = np.random.default_rng(seed)
    if draw.random() >= (SHARE if fewest < ENOUGH else LATER_SHARE):
        return None
    rarest = [arm for arm in ARMS if arm in usable and counts.get(arm, 0) == fewest]
    return rarest[draw.integers(len(rarest))]
