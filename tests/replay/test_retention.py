import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.replay.factors import PriorityRule, hash_ids
from rrl_core.replay.retention import retained
from tests.replay.candidates import candidates, chunks

RULE = PriorityRule(horizon=8.0)


def test_states_with_the_largest_gain_stay():
    rows = candidates(*({"value": value} for value in (0.3, 0.9, 0.1, 0.6)))
    assert retained([rows], 2, RULE) == ["e1", "e3"]


def test_trajectories_count_with_rarity_and_freshness():
    common = {"unit": "trajectory", "value": 1.0, "p_hat": 0.0}
    rows = candidates(
        {**common, "signature_count": 4, "age": 0},  # 1 * 1/4 * 1 = 0.25
        {**common, "signature_count": 2, "age": 8},  # 1 * 1/2 * 1/e = 0.184
        {**common, "signature_count": 1, "age": 8},  # 1 * 1 * 1/e = 0.368
    )
    assert retained([rows], 3, RULE) == ["e2", "e0", "e1"]


def test_what_was_never_judged_comes_first():
    rows = candidates({"value": 1.0}, {"value": math.nan, "is_eligible": False}, {"value": 0.9})
    assert retained([rows], 2, RULE) == ["e1", "e0"]


@given(st.integers(0, 2**32), st.integers(1, 60), st.lists(st.integers(0, 50)))
def test_order_and_chunking_never_matter_and_ties_go_by_the_hash(seed, capacity, cuts):
    random = Random(seed)
    gains = [random.choice([0.0, 0.25, 0.5]) for _ in range(50)]
    rows = candidates(*({"value": gain, "prompt_value": 0.0} for gain in gains))
    hashes = hash_ids(f"e{i}" for i in range(50))
    order = sorted(range(50), key=lambda i: (-gains[i], hashes[i]))
    parts = chunks(rows, cuts, random.sample(range(50), 50))
    assert retained(parts, capacity, RULE) == [f"e{i}" for i in order[:capacity]]


def test_among_equals_no_prompt_is_favoured():
    # 40 prompts with 10 states each, all worth the same: of the first and of the last 20 prompts
    # by id about as many stay: 50 of 100, with a deviation of sqrt(100 / 4 * 300 / 399) = 4.3
    names = [f"p{i // 10:02d}" for i in range(400)]
    rows = candidates(
        *({"entry_id": f"{name}:{i}", "prompt_id": name} for i, name in enumerate(names))
    )
    kept = retained([rows], 100, RULE)
    assert 35 <= sum(entry < "p20" for entry in kept) <= 65


def test_of_nothing_nothing_stays():
    assert retained([], 5, RULE) == []


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="came 0"):
        retained([], 0, RULE)
