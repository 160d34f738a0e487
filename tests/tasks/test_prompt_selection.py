"""Which train prompts an iteration uses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.selection import select_prompts


@given(st.data())
def test_no_prompt_repeats_within_an_epoch(data):
    num_prompts = data.draw(st.integers(1, 40))
    per_iteration = data.draw(st.integers(1, num_prompts))
    seed_root = data.draw(st.integers(0, 2**63 - 1))
    length = num_prompts // per_iteration
    for epoch in range(3):
        picked = [
            index
            for place in range(length)
            for index in select_prompts(
                num_prompts, 1 + epoch * length + place, per_iteration, seed_root
            )
        ]
        assert len(picked) == length * per_iteration
        assert len(set(picked)) == len(picked)
        assert set(picked) <= set(range(num_prompts))


def test_an_epoch_of_whole_iterations_uses_every_prompt():
    picked = [index for i in range(1, 6) for index in select_prompts(20, i, 4, seed_root=0)]
    assert sorted(picked) == list(range(20))


def test_epochs_and_seeds_differ_in_order():
    first, second = (select_prompts(100, iteration, 100, 0) for iteration in (1, 2))
    assert first != second
    assert first != select_prompts(100, 1, 100, 1)
    assert first != list(range(100))


def test_the_order_is_frozen():
    # Recorded once: a resumed run must pick what the stopped one would have picked.
    assert select_prompts(10, 1, 4, seed_root=7) == [5, 3, 1, 7]
    assert select_prompts(10, 2, 4, seed_root=7) == [6, 0, 9, 8]  # 2 and 4 are left out
    assert select_prompts(10, 3, 4, seed_root=7) == [7, 6, 5, 9]  # the next epoch


def test_a_far_iteration_is_cheap():
    assert len(select_prompts(10_000, 10**12, 16, seed_root=0)) == 16


@pytest.mark.parametrize(
    ("num_prompts", "iteration", "per_iteration"), [(3, 1, 4), (0, 1, 0), (9, 0, 3)]
)
def test_numbers_out_of_range_are_refused(num_prompts, iteration, per_iteration):
    with pytest.raises(TaskError, match="expected iteration >= 1"):
        select_prompts(num_prompts, iteration, per_iteration, seed_root=0)
