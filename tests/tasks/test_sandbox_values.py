"""What a child may send back, and when it is the value that was expected."""

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.tasks.sandbox.child import decode, encode
from rrl_core.tasks.sandbox.values import Tolerance, matches

ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**40), 10**40),
    st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
KEYS = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.tuples(st.integers()))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
    ),
    max_leaves=8,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["int", "float", "tuple", "dict", "set", "complex", "bytes", "x"]),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=6,
)


def sent(value):
    return json.loads(json.dumps(encode(value)))


@given(VALUES)
@settings(max_examples=50)
def test_every_value_comes_back_as_itself_and_matches_itself(value):
    back = decode(sent(value))
    assert (type(back), back) == (type(value), value)
    assert matches(sent(value), value)


@given(JSON, VALUES)
@settings(max_examples=100)
def test_whatever_is_sent_matches_or_does_not_but_never_raises(line, expected):
    assert matches(line, expected) in (True, False)


DIFFERENT = [
    (True, 1), (1, True), (0, False), (None, False), ((1, 2), [1, 2]), ([1, 2], (1, 2)),
    ("1", 1), (b"a", "a"), ({1: 2}, {True: 2}), ({1}, {True}), ([1], {1}), (frozenset({1}), {1}),
    ({}, []), ({1: 2}, {1: 3}), ({1: 2}, {1: 2, 3: 4}), ([1, 2, 3], [1, 2]), ([], [[]]), (1.5, 1),
    (math.nan, 1.0), (math.inf, -math.inf), (bytearray(b"a"), b"a"), ({(1, 2)}, {(1, 3)}),
    ("", None), (10**400, 1e300),
]  # fmt: skip
SAME = [
    (6.0, 6), (6, 6.0), (math.nan, math.nan), ([1, 2.0], [1.0, 2]), ({2: 1, 1: 2}, {1: 2, 2: 1}),
    ({3, 1}, {1, 3}), (-0.0, 0), (10**400, 10**400), (True, True),
    ({(1, 2): [None]}, {(1, 2): [None]}),
]  # fmt: skip


@pytest.mark.parametrize(("actual", "expected"), DIFFERENT, ids=repr)
def test_other_kinds_and_other_contents_are_different(actual, expected):
    assert not matches(sent(actual), expected)


@pytest.mark.parametrize(("actual", "expected"), SAME, ids=repr)
def test_equal_numbers_and_contents_are_the_same(actual, expected):
    assert matches(sent(actual), expected)


def test_numbers_may_be_as_far_off_as_the_test_allows():
    assert matches(1.0005, 1.0, Tolerance(absolute=1e-3))
    assert not matches(1.002, 1.0, Tolerance(absolute=1e-3))
    assert matches(sent([101.0]), [100], Tolerance(relative=0.01))
    assert not matches(sent(math.inf), 1.0, Tolerance(absolute=1e9))
    assert not matches(sent("1.0"), 1.0, Tolerance(absolute=1e9))


def test_a_subclass_is_its_content_whatever_it_claims():
    class Always(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class AlwaysList(list):
        def __iter__(self):
            return iter([1, 2, 3])

        def __eq__(self, other):
            return True

    assert encode(Always(3)) == 3
    assert encode(AlwaysList([9])) == [9]
    with pytest.raises(TypeError, match=r"a object cannot be compared"):
        encode(object())


@pytest.mark.parametrize(
    "line",
    [
        {"set": [(2**61 - 1) * k for k in range(40_000)]},  # all have the hash 0
        {"dict": [[(2**61 - 1) * k, 1] for k in range(40_000)]},
        {"set": [{"frozenset": [(2**61 - 1) * k for k in range(40_000)]}]},
        {"int": "f" * 900_000},
        [[]] * 300_000,
    ],
    ids=["set", "dict", "nested", "int", "list"],
)
@pytest.mark.parametrize("expected", [{1}, {1: 1}, 7, [1], {frozenset({1})}], ids=repr)
def test_what_is_much_longer_than_expected_takes_no_time(line, expected):
    started = time.thread_time()
    assert not matches(line, expected)
    assert time.thread_time() - started < 1.0
