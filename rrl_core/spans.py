"""Which tokens of a response were sampled: in an episode of several turns others stand between.

They are stored as bounds [start, end, start, end, ...] of the stretches that were sampled, in
order; None: every token was.
"""

from collections.abc import Sequence


def sampled_spans(bounds: Sequence[int] | None, num_tokens: int) -> list[tuple[int, int]]:
    """Return (start, end) of each stretch of sampled tokens among the first `num_tokens`."""
    if bounds is None:
        return [(0, num_tokens)] if num_tokens else []
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return [(start, min(end, num_tokens)) for start, end in pairs if start < num_tokens]


def sampled_mask(bounds: Sequence[int] | None, num_tokens: int) -> tuple[bool, ...] | None:
    """Return of each of the first `num_tokens` whether it was sampled; None: each was."""
    if bounds is None:
        return None
    mask = [False] * num_tokens
    for start, end in sampled_spans(bounds, num_tokens):
        mask[start:end] = [True] * (end - start)
    return tuple(mask)
