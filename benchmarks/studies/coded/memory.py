"""What reviews are shown of earlier ones: the last two verified reviews of the problem's class.

They are retrieved by `rrl_core.review.memory`, by recency among the reviews of the class, never
those of the problem itself.
"""

from collections import deque

import numpy as np

from benchmarks.studies.coded.world import (
    CLASSES,
    MEMORIES,
    REVIEW_TOKENS,
    Ints,
    Problems,
    blank_ids,
    decode,
    encode,
)
from rrl_core.review.memory import MemoryEntry, MemoryRule, Query, retrieve

RULE = MemoryRule("recency", max_entries=MEMORIES, max_tokens=MEMORIES * REVIEW_TOKENS)
KEPT = 16  # a class: more than an iteration's reviews of one problem, which it is not shown


class Memory:
    """The last verified reviews of each class."""

    def __init__(self) -> None:
        self._kept_C = [deque[MemoryEntry](maxlen=KEPT) for _ in CLASSES]
        self._num_added = 0

    def add(self, problems: Problems, reviews_B4: Ints) -> None:
        """Remember reviews that led to a success, oldest first."""
        texts = map(decode, problems.ids())
        for number, text, review in zip(problems.class_B, texts, reviews_B4, strict=True):
            self._num_added += 1
            self._kept_C[number].append(
                MemoryEntry(str(self._num_added), text, text, decode(review), REVIEW_TOKENS)
            )

    def slots(self, problems: Problems) -> Ints:
        """Return what reviews of these problems are shown, [B, 8]: newest last, blanks first."""
        ids_X6, of_row_B = np.unique(problems.ids(), axis=0, return_inverse=True)
        return np.stack([self._shown(decode(ids)) for ids in ids_X6])[of_row_B]

    def _shown(self, problem: str) -> Ints:
        kept = self._kept_C[CLASSES.index(problem[0])]
        # No gold: four characters of a form cannot state an answer of five digits.
        (found,) = retrieve(kept, [Query(problem, problem, gold=None)], RULE)
        newest_last = [encode(kept[each.entry].text) for each in reversed(found)]
        missing = blank_ids(1, (MEMORIES - len(found)) * REVIEW_TOKENS)[0]
        return np.concatenate([missing, *newest_last])
