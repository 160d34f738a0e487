"""Fidelity is decided by content, never by the presence of a key."""

from typing import Any

import pytest

from storage.importers.samples import Turn
from storage.importers.tokens import MAX_CHARACTERS, MIN_ZEROS, are_ids, extends, turn, why_unfit


def test_ids_with_as_many_logprobs_are_tokens():
    made = turn([1, 2], [3, 4], [-0.5, 0.0005], "ab", ("ask", "ab"))
    assert made == Turn([1, 2], [3, 4], [-0.5, 0.0], "ab", None)  # rounding above 0 is 0


@pytest.mark.parametrize(
    "ids", [[], None, "12", [1.0], [True], [-1], [2**31], [1, None], [[1]], {"0": 1}]
)
def test_what_is_no_list_of_ids_is_text(ids: Any):
    assert not are_ids(ids)
    assert turn(ids, [3], [-1.0], "a", ("a", "a")) is None
    assert turn([3], ids, [-1.0], "a", ("a", "a")) is None


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        (None, "has none"), ([], "has none"), ([-0.1], "has 1 for 2"),
        ([-0.1, None], "no finite numbers"), ([-0.1, float("nan")], "no finite numbers"),
        ([-0.1, float("-inf")], "no finite numbers"), ([-0.1, "x"], "no finite numbers"),
        ([True, -0.1], "no finite numbers"), ([-0.1, 0.5], "above zero"),
    ],
)  # fmt: skip
def test_unfit_logprobs_leave_the_ids(logprobs: Any, reason: str):
    made = turn([1], [3, 4], logprobs, "ab", ("", ""))
    assert made is not None
    assert made.logprobs is None
    assert reason in (made.reason or "")


def test_many_zeros_are_nobodys_logprobs():
    assert why_unfit([0.0] * MIN_ZEROS, MIN_ZEROS) == "the file has nothing but zeros"
    assert why_unfit([0.0] * (MIN_ZEROS - 1), MIN_ZEROS - 1) is None  # greedy and sure
    assert why_unfit([0.0] * MIN_ZEROS + [-0.1], MIN_ZEROS + 1) is None


def test_more_characters_than_tokens_can_stand_for_are_a_stub():
    assert turn([1, 2], [3], [-1.0], "", ("x" * (2 * MAX_CHARACTERS + 1), "")) is None
    assert turn([1, 2], [3], [-1.0], "", ("x" * (2 * MAX_CHARACTERS), "")) is not None
    assert turn([1, 2], [3], [-1.0], "", ("", "x" * (MAX_CHARACTERS + 1))) is None


def test_a_turn_extends_one_whose_ids_all_come_first():
    before = Turn([1, 2], [3], None, "")
    assert extends(Turn([1, 2, 3, 4], [5], None, ""), before)
    assert not extends(Turn([1, 2, 4], [5], None, ""), before)
    assert not extends(Turn([1, 2], [5], None, ""), before)
