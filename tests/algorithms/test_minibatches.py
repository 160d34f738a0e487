import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.algorithms.minibatches import plan_steps

groups = st.lists(st.sampled_from("abcdefg"), max_size=30)


def test_one_step_learns_from_everything_in_order():
    assert plan_steps(list("abab"), 1, 1, seed=7) == [[0, 1, 2, 3]]


@given(groups, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**40))
def test_every_epoch_holds_every_row_once_and_never_cuts_a_group(
    group_ids, num_steps, epochs, seed
):
    plan = plan_steps(group_ids, num_steps, epochs, seed)
    steps_an_epoch = min(num_steps, len(set(group_ids)))
    assert len(plan) == steps_an_epoch * epochs
    for epoch in range(epochs):
        steps = plan[epoch * steps_an_epoch : (epoch + 1) * steps_an_epoch]
        assert sorted(row for step in steps for row in step) == list(range(len(group_ids)))
        groups_of = [{group_ids[row] for row in step} for step in steps]
        assert sum(map(len, groups_of)) == len(set(group_ids))
        counts = [len(g) for g in groups_of]
        assert not counts or max(counts) - min(counts) <= 1


def test_the_plan_depends_on_the_seed_and_the_epoch_and_on_nothing_else():
    group_ids = [str(i) for i in range(20)]
    first = plan_steps(group_ids, 4, 2, seed=1)
    assert first == plan_steps(group_ids, 4, 2, seed=1)
    assert first != plan_steps(group_ids, 4, 2, seed=2)
    assert first[:4] != first[4:]


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="got 0 and 1"):
        plan_steps(["a"], 0, 1, seed=0)
