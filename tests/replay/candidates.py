"""Candidates for tests: rows that differ only in what a test is about."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rrl_core.replay.factors import Candidates, make_candidates

STATE = {
    "unit": "state", "difficulty": "easy", "value": 0.5, "prompt_value": 0.25, "p_hat": 0.1,
    "is_ever_solved": False, "state_ok": 0, "state_tries": 0, "age": 3, "signature": "",
    "signature_count": 1, "is_eligible": True,
}  # fmt: skip


def candidates(*rows: dict[str, Any]) -> Candidates:
    """Rows with the fields given; `entry_id` and `prompt_id` default to the row's number."""
    full = [
        {**STATE, "entry_id": f"e{i}", "prompt_id": f"p{i}", **row} for i, row in enumerate(rows)
    ]
    names = {**STATE, "entry_id": "", "prompt_id": ""}
    return make_candidates({name: [row[name] for row in full] for name in names})


def chunks(rows: Candidates, cuts: Iterable[int], order: Sequence[int]) -> list[Candidates]:
    """The rows in another order, cut into chunks at the places given."""
    shuffled = rows.take(np.array(order, dtype=np.intp))
    edges = [0, *sorted(cuts), len(rows)]
    return [shuffled.take(np.arange(start, stop)) for start, stop in itertools.pairwise(edges)]
