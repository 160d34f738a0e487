"""How an iteration's samples are split over its optimizer steps."""

from collections import defaultdict
from collections.abc import Sequence

from rrl_core.seeds import derive_seed


def plan_steps(group_ids: Sequence[str], num_steps: int, epochs: int, seed: int) -> list[list[int]]:
    """Split whole groups over optimizer steps; a pure function of its arguments.

    Args:
        group_ids: [B] group of each sample.
        num_steps: steps an epoch, at most: never more than there are groups.
        epochs: passes over the samples; each splits the groups anew.
        seed: decides which groups meet; of no effect with one step.

    Returns:
        For every step the rows it learns from, ascending. An epoch's steps hold every row once and
        their numbers of groups differ by at most one.
    """
    if num_steps < 1 or epochs < 1:
        raise ValueError(f"expected at least one step and epoch, got {num_steps} and {epochs}")
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for row, group_id in enumerate(group_ids):
        rows_of[group_id].append(row)
    num_steps = min(num_steps, len(rows_of))
    plan = []
    for epoch in range(epochs):
        shuffled = sorted(rows_of, key=lambda group_id: derive_seed(seed, "step", epoch, group_id))
        plan += [
            sorted(row for group_id in shuffled[step::num_steps] for row in rows_of[group_id])
            for step in range(num_steps)
        ]
    return plan
