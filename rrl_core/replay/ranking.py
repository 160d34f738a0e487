"""The best few candidates of a stream that is never held whole."""

import numpy as np

from rrl_core.replay.factors import Candidates, Floats, concatenate


class Best:
    """The `size` candidates with the largest keys, whatever their order and chunking.

    Equal keys are ranked by the hash of the entry id: ids begin with the prompt's, so in their order
    whole prompts would be left out. Memory is that of `size` rows and one chunk.
    """  # noqa: E501

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"expected room for 1 candidate or more; came {size}")
        self._size = size
        self.rows: Candidates | None = None
        """The best, best first; None before the first is added."""
        self.keys: Floats = np.empty(0)
        """Their keys."""
        self.has_dropped = False
        """True when there is more than `rows` holds."""

    def add(self, candidates: Candidates, keys: Floats) -> None:
        """Rank further candidates, by keys [N] without NaN, among those held."""
        if self.rows is not None:
            candidates = concatenate([self.rows, candidates])
            keys = np.concatenate([self.keys, keys])
        order = np.arange(len(keys))
        if len(keys) > self._size:
            self.has_dropped = True
            order = order[keys >= np.partition(keys, -self._size)[-self._size]]
        ids, hashes = candidates.entry_id, candidates.entry_hash
        # ids decide between hashes that collide
        best = sorted(order.tolist(), key=lambda row: (-keys[row], hashes[row], ids[row]))
        rows = np.array(best[: self._size], dtype=np.intp)
        self.rows, self.keys = candidates.take(rows), keys[rows]
