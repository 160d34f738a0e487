"""Gate: which failed attempt of which group is reviewed.

Source: SRRL (arXiv 2607.05541), which has both gates; success is r >= threshold: a strict > with
rewards of 0 and 1 and a threshold of 1 would never fire.

    sample          a group is gated where an attempt failed
    group_all_fail  a group is gated where an attempt failed and none succeeded

Our choice: one attempt of a gated group is reviewed, the failed one of the lowest sample index.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Gate = Literal["sample", "group_all_fail"]

_IS_GATED: Mapping[str, Callable[[list[bool]], bool]] = {
    "sample": lambda is_success: not all(is_success),
    "group_all_fail": lambda is_success: not any(is_success),
}


def gated_attempts(
    rewards: Sequence[float | None],
    group_ids: Sequence[str],
    sample_indices: Sequence[int],
    gate: Gate,
    threshold: float,
) -> list[int]:
    """Return the index of one failed attempt of each gated group, in the groups' order.

    Args:
        rewards: [B]; None where there is no score: neither success nor failure.
        group_ids: [B], in any order; a group without any score is not gated.
        sample_indices: [B], place of each attempt in its group.
        gate: when a group is gated.
        threshold: an attempt succeeds with this reward or more.

    Raises:
        ValueError: an unknown gate, lists of unequal length, or a number that is not finite.
    """
    if gate not in _IS_GATED:
        raise ValueError(f"expected a gate of {sorted(_IS_GATED)}; came {gate!r}")
    if not len(rewards) == len(group_ids) == len(sample_indices):
        raise ValueError(
            f"expected a group and a sample index for each reward; came {len(rewards)} rewards, "
            f"{len(group_ids)} groups and {len(sample_indices)} indices"
        )
    scored: dict[str, list[tuple[int, int, bool]]] = {}
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        if not (math.isfinite(reward) and math.isfinite(threshold)):
            raise ValueError(
                f"expected finite rewards (None without a score) and threshold; came {reward} and "
                f"{threshold}"
            )
        place = (sample_indices[index], index, reward >= threshold)
        scored.setdefault(group_ids[index], []).append(place)
    return [
        min((sample, index) for sample, index, is_success in places if not is_success)[1]
        for places in scored.values()
        if _IS_GATED[gate]([is_success for *_, is_success in places])
    ]
