"""Which attempt of which group is reviewed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.review.gate import gated_attempts


def gated(rewards, groups, gate, threshold=1.0, samples=None):
    return gated_attempts(rewards, groups, samples or list(range(len(rewards))), gate, threshold)


def test_a_success_closes_the_gate_of_all_fail_and_not_that_of_sample():
    rewards, groups = [0.0, 1.0, 0.0, 0.0, 1.0], list("aabbc")
    assert gated(rewards, groups, "sample") == [0, 2]
    assert gated(rewards, groups, "group_all_fail") == [2]


def test_success_is_the_threshold_or_more():
    # With a strict > and rewards of 0 and 1, everything would have failed.
    assert gated([1.0, 1.0], list("aa"), "sample", threshold=1) == []
    assert gated([0.998, 0.999], list("ab"), "sample", threshold=0.999) == [0]


def test_of_the_failed_the_lowest_sample_index_is_taken():
    rewards = [0.0, 0.0, 1.0, 0.0]
    assert gated(rewards, list("aaaa"), "sample", samples=[3, 1, 0, 2]) == [1]
    assert gated(rewards, list("aaaa"), "sample", samples=[1, 1, 0, 2]) == [0]


def test_an_attempt_without_score_neither_fails_nor_succeeds():
    assert gated([None, None], list("aa"), "sample") == []
    assert gated([None, None], list("aa"), "group_all_fail") == []
    assert gated([None, 0.0], list("aa"), "group_all_fail") == [1]
    assert gated([None, 1.0], list("aa"), "sample") == []
    assert gated([], [], "sample") == []


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, None]), st.sampled_from("abc")), max_size=12
)


@settings(max_examples=60)
@given(ROWS, st.sampled_from(["sample", "group_all_fail"]), st.randoms())
def test_the_order_of_rows_changes_no_choice(rows, gate, draw):
    numbered = [(reward, group, place) for place, (reward, group) in enumerate(rows)]
    shuffled = draw.sample(numbered, len(numbered))

    def chosen(rows):
        rewards, groups, samples = (
            (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
        )
        return {rows[i] for i in gated_attempts(rewards, groups, samples, gate, 1.0)}

    assert chosen(numbered) == chosen(shuffled)
    assert {group for _, group, _ in chosen(numbered)} == {
        group
        for group in "abc"
        if (own := [r for r, g in rows if g == group and r is not None])
        and (min(own) if gate == "sample" else max(own)) < 1.0
    }


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'group_all_fail', 'sample'"):
        gated([0.0], ["a"], "always")
    with pytest.raises(ValueError, match="1 rewards, 0 groups"):
        gated_attempts([0.0], [], [], "sample", 1.0)
    with pytest.raises(ValueError, match="finite"):
        gated([float("nan")], ["a"], "sample")
