from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.replay.factors import UNITS
from rrl_core.replay.schedule import Situation, anneal, curriculum_weights, plan_replay

MIDDLE = Situation(
    iteration=20,
    planned_iterations=100,
    num_groups=16,
    has_value_model=True,
    is_judged=True,
    best_pass_at_1=0.5,
    num_eligible={"state": 100, "trajectory": 100, "prompt": 100},
)
EXACT = 1e-12


def groups(units, share, situation):
    plan = plan_replay(units, share, situation)
    return tuple(plan.num_groups[unit] for unit in UNITS), plan.waiting_reason


def test_a_quarter_of_sixteen_groups_is_four():
    assert groups({"state"}, 0.25, MIDDLE) == ((4, 0, 0), None)


def test_the_units_share_evenly_and_the_odd_group_goes_round():
    assert groups({"state", "prompt"}, 0.25, MIDDLE) == ((2, 0, 2), None)
    odd = [groups(set(UNITS), 0.25, replace(MIDDLE, iteration=i))[0] for i in (20, 21, 22)]
    assert sorted(odd) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]


def test_what_one_unit_lacks_the_others_take():
    situation = replace(MIDDLE, num_eligible={"state": 1, "trajectory": 0, "prompt": 100})
    assert groups(set(UNITS), 0.25, situation) == ((1, 0, 3), None)


def test_fewer_eligible_than_the_share_says_so():
    situation = replace(MIDDLE, num_eligible={"state": 1})
    assert groups({"state"}, 0.25, situation) == ((1, 0, 0), "fewer eligible than the share")
    assert groups({"prompt"}, 0.25, situation) == ((0, 0, 0), "nothing eligible")


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_nothing_is_replayed_when_it_is_off(share):
    units = set() if share else {"state"}
    assert groups(units, share, MIDDLE) == ((0, 0, 0), "off")


def test_nothing_is_replayed_in_the_first_iteration():
    situation = replace(MIDDLE, iteration=1)
    assert groups(set(UNITS), 0.25, situation) == ((0, 0, 0), "first iteration")


def test_states_and_prompts_wait_for_the_first_verdict():
    waiting = replace(MIDDLE, is_judged=False)
    assert groups({"state", "prompt"}, 0.25, waiting) == ((0, 0, 0), "before the first refit")
    # trajectories need no verdict: they take the whole share
    assert groups({"state", "trajectory"}, 0.25, waiting) == ((0, 4, 0), None)


def test_without_a_value_model_states_and_prompts_start_at_iteration_two():
    situation = replace(MIDDLE, iteration=2, has_value_model=False, is_judged=False)
    assert groups({"state", "prompt"}, 0.25, situation) == ((2, 0, 2), None)


@pytest.mark.parametrize(
    ("iteration", "best_pass_at_1", "has_started"),
    [(9, 0.35, False), (9, None, False), (9, 0.36, True), (10, 0.0, True), (10, None, True)],
)
def test_trajectories_start_by_success_or_by_iteration(iteration, best_pass_at_1, has_started):
    situation = replace(MIDDLE, iteration=iteration, best_pass_at_1=best_pass_at_1)
    expected = ((0, 4, 0), None) if has_started else ((0, 0, 0), _BEFORE_TRAJECTORIES)
    assert groups({"trajectory"}, 0.25, situation) == expected


_BEFORE_TRAJECTORIES = "before pass@1 0.35 or iteration 10"


def test_the_share_falls_linearly_to_zero_over_the_last_fifth():
    factors = [anneal(i, 100) for i in (1, 80, 85, 90, 99, 100)]
    assert factors == pytest.approx([1, 1, 0.75, 0.5, 0.05, 0], abs=EXACT)
    assert [anneal(i, 1) for i in (1, 2)] == [0, 0]
    # 16 groups at 0.25: 4 until iteration 80, then 4 * 0.5
    assert groups({"state"}, 0.25, replace(MIDDLE, iteration=80)) == ((4, 0, 0), None)
    assert groups({"state"}, 0.25, replace(MIDDLE, iteration=90)) == ((2, 0, 0), "annealed")
    assert groups({"state"}, 0.25, replace(MIDDLE, iteration=100)) == ((0, 0, 0), "annealed")


def test_a_share_below_one_group_says_so():
    assert groups({"state"}, 0.1, replace(MIDDLE, num_groups=4)) == (
        (0, 0, 0),
        "share below one group",
    )


@given(
    st.sets(st.sampled_from(UNITS)),
    st.floats(0, 0.5),
    st.integers(1, 40),
    st.integers(0, 30),
    st.dictionaries(st.sampled_from(UNITS), st.integers(0, 5)),
)
def test_a_plan_never_exceeds_the_half_or_the_eligible(units, share, iteration, num, eligible):
    situation = replace(
        MIDDLE, iteration=iteration, planned_iterations=40, num_groups=num, num_eligible=eligible
    )
    plan = plan_replay(units, share, situation)
    total = sum(plan.num_groups.values())
    assert total <= num / 2
    assert abs(total - plan.share * num) <= 0.5 or total < plan.share * num
    assert all(plan.num_groups[unit] <= eligible.get(unit, 0) for unit in UNITS)
    assert all(unit in units for unit in UNITS if plan.num_groups[unit])
    assert total > 0 or plan.waiting_reason is not None


def substitutes(units, share, situation):
    return plan_replay(units, share, situation).most_substitutes


def test_substitutes_and_what_is_replayed_take_half_of_the_groups_at_most():
    # 16 groups: half are 8, of which a share of 0.25 takes 4
    assert substitutes({"state", "trajectory"}, 0.25, MIDDLE) == 4
    assert substitutes({"trajectory"}, 0.5, MIDDLE) == 0
    assert substitutes({"trajectory"}, 0.0, MIDDLE) == 8
    # nothing is eligible for the share, so all of the half is left
    assert substitutes({"trajectory"}, 0.25, replace(MIDDLE, num_eligible={})) == 8


def test_substitutes_begin_with_trajectories_and_are_annealed_with_the_share():
    assert substitutes({"state", "prompt"}, 0.25, MIDDLE) == 0
    early = replace(MIDDLE, iteration=9, best_pass_at_1=0.35)
    assert substitutes({"trajectory"}, 0.25, early) == 0
    # at iteration 90 of 100 both are halved: 4 groups, 2 of them by the share
    assert substitutes({"trajectory"}, 0.25, replace(MIDDLE, iteration=90)) == 2
    assert substitutes({"trajectory"}, 0.25, replace(MIDDLE, iteration=100)) == 0


def test_slots_that_the_caps_left_empty_are_told_after_the_picks():
    plan = plan_replay({"state"}, 0.25, MIDDLE)
    assert plan.reason_after(4) is None
    assert plan.reason_after(3) == "fewer eligible than the share"
    assert plan.reason_after(0) == "nothing eligible"


def test_buckets_half_solved_weigh_most_and_none_vanishes():
    weights = curriculum_weights({"easy": 1.0, "middle": 0.5, "hard": 0.1, "unsolved": 0.0})
    assert weights == pytest.approx({"easy": 0.1, "middle": 1.0, "hard": 0.36, "unsolved": 0.1})


@pytest.mark.parametrize(
    ("units", "share", "iteration"),
    [({"token"}, 0.25, 2), ({"state"}, 0.6, 2), ({"state"}, 0.2, 0)],
)
def test_plans_out_of_range_are_refused(units, share, iteration):
    with pytest.raises(ValueError, match="expected"):
        plan_replay(units, share, replace(MIDDLE, iteration=iteration))
