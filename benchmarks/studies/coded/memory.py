"""What reviews are shown of earlier ones: the last two verified reviews of the problem's class."""

from collections import deque

import numpy as np

from benchmarks.studies.coded.world import CLASSES, MEMORIES, REVIEW_TOKENS, Ints, blank_ids


class Memory:
    """The last verified reviews of each class."""

    def __init__(self) -> None:
        self._kept_C = [deque[Ints](maxlen=MEMORIES) for _ in CLASSES]

    def add(self, class_B: Ints, reviews_B4: Ints) -> None:
        """Remember reviews that led to a success, oldest first."""
        for number, review in zip(class_B, reviews_B4, strict=True):
            self._kept_C[number].append(review)

    def slots(self, class_B: Ints) -> Ints:
        """Return what a review of these classes is shown, [B, 8]: the newest last, blanks first."""
        slots_B8 = blank_ids(len(class_B), MEMORIES * REVIEW_TOKENS)
        for row, number in enumerate(class_B):
            kept = self._kept_C[number]
            if kept:
                slots_B8[row, -REVIEW_TOKENS * len(kept) :] = np.concatenate(kept)
        return slots_B8
