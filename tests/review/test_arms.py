"""Control arms: how often, which, and the same in a resumed run."""

import pytest

from rrl_core.review.arms import ARMS, choose_arm

SEEDS = range(4000)
WITHOUT_MEMORY = [arm for arm in ARMS if arm != "no_memory"]


def share(counts, usable=ARMS):
    return sum(choose_arm(counts, seed, usable) is not None for seed in SEEDS) / len(SEEDS)


def test_a_fifth_gets_a_control_until_every_usable_arm_has_a_hundred():
    # Binomial, 4,000 draws: standard error 0.0063 at 0.2 and 0.0034 at 0.05.
    full = dict.fromkeys(ARMS, 100)
    assert share({}) == pytest.approx(0.20, abs=0.02)
    assert share({**full, "blank": 99}) == pytest.approx(0.20, abs=0.02)
    assert share(full) == pytest.approx(0.05, abs=0.011)
    # An arm that cannot be used is not waited for.
    assert share({**full, "no_memory": 0}, WITHOUT_MEMORY) == pytest.approx(0.05, abs=0.011)


def test_only_the_rarest_arms_are_drawn_and_each_of_them_is():
    counts = {"retry": 5, "no_memory": 3, "blank": 3, "raw_feedback": 4, "random_review": 9}
    drawn = {choose_arm(counts, seed, ARMS) for seed in range(300)}
    assert drawn == {None, "no_memory", "blank"}
    assert {choose_arm(counts, seed, WITHOUT_MEMORY) for seed in range(300)} == {None, "blank"}
    assert {choose_arm({}, seed, WITHOUT_MEMORY) for seed in range(300)} == {None, *ARMS} - {
        "no_memory"
    }


def test_the_same_seed_gives_the_same_arm():
    assert [choose_arm({}, s, ARMS) for s in range(50)] == [
        choose_arm({}, s, ARMS) for s in range(50)
    ]


def test_all_arms_fill_evenly():
    counts = dict.fromkeys(ARMS, 0)
    for seed in range(1000):
        if arm := choose_arm(counts, seed, ARMS):
            counts[arm] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="no_memory_review"):
        choose_arm({"no_memory_review": 1}, 0, ARMS)


def test_a_prompt_that_can_get_no_arm_gets_none():
    assert {choose_arm({}, seed, ()) for seed in range(50)} == {None}


def test_an_arm_that_is_never_usable_does_not_starve_the_others():
    counts = dict.fromkeys(ARMS, 0)
    for seed in range(1000):
        if arm := choose_arm(counts, seed, ("retry", "blank")):
            counts[arm] += 1
    assert counts["retry"] + counts["blank"] > 150  # a fifth of 1,000, until both have 100
