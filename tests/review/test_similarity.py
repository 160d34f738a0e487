"""BM25 by hand and against a loop, vectors of length 1, near-duplicates."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.review.similarity import (
    EMBEDDING_MODEL,
    NUM_PLACES,
    Bm25Index,
    NearDuplicates,
    embed,
)

EXACT = 1e-12
FLOAT32 = 1e-6


def test_bm25_by_hand():
    # N = 2, mean length 2.5; idf_a = ln(1 + 0.5/2.5), idf_c = ln(1 + 1.5/1.5)
    # "a b":   norm 1.5 (0.25 + 0.75 * 2/2.5) = 1.275; a 2.5/2.275
    # "a a c": norm 1.5 (0.25 + 0.75 * 3/2.5) = 1.725; a 2 * 2.5/3.725; c 2.5/2.725
    # the query with itself, as a text of length 2: (idf_a + idf_c) 2.5/2.275
    a, c = math.log(1.2), math.log(2.0)
    own = (a + c) * 2.5 / 2.275
    expected = [a * 2.5 / 2.275 / own, (a * 5 / 3.725 + c * 2.5 / 2.725) / own]
    assert Bm25Index(["a b", "A a c"], ["a c"]).scores(0) == pytest.approx(expected, abs=EXACT)


def terms(text):
    return re.findall(r"[a-z]+|\d+|\+", text.lower())


def looped_bm25(texts, query):
    held = [terms(text) for text in texts]
    mean = max(1.0, sum(map(len, held)) / max(1, len(held)))

    def score(words):
        total = 0.0
        for term in set(terms(query)):
            num = sum(term in other for other in held)
            tf = words.count(term)
            norm = 1.5 * (1 - 0.75 + 0.75 * len(words) / mean)
            total += math.log(1 + (len(held) - num + 0.5) / (num + 0.5)) * tf * 2.5 / (tf + norm)
        return total

    own = score(terms(query))
    return [score(words) / own if own else 0.0 for words in held]


TEXTS = st.lists(
    st.sampled_from(["what", "is", "3", "4", "+", "apples", "TOM", "12"]), max_size=8
).map(" ".join)


@settings(max_examples=60)
@given(st.lists(TEXTS, max_size=6), TEXTS)
def test_bm25_is_its_formula(texts, query):
    assert Bm25Index(texts, [query]).scores(0) == pytest.approx(
        looped_bm25(texts, query), abs=EXACT
    )


@settings(max_examples=30)
@given(
    st.lists(TEXTS, min_size=1, max_size=6), st.lists(TEXTS, min_size=1, max_size=3), st.randoms()
)
def test_the_order_of_texts_changes_no_bit(texts, queries, draw):
    order = draw.sample(range(len(texts)), len(texts))
    index, other = Bm25Index(texts, queries), Bm25Index([texts[i] for i in order], queries)
    for query in range(len(queries)):
        assert index.scores(query)[order].tolist() == other.scores(query).tolist()


def test_words_of_all_problems_do_not_make_a_problem_similar():
    ask = "{} End with a line: #### <number>"
    problems = [f"What is {n} + 4?" for n in range(50)] + ["How many ducks swim in the pond?"]
    index = Bm25Index([ask.format(p) for p in problems], [ask.format("How many ducks fly?")])
    scores = index.scores(0)
    assert scores.argmax() == 50
    assert scores[50] > 10 * scores[:50].max()


NEAR = [
    ("What is 3 + 4?", "what is  3+4", True),
    ("What is 3 + 4?", "What is 4 + 3?", True),
    ("What is 3 + 4?", "What is 3 + 5?", False),
    ("What is 3 + 4?", "What is 3 + 4 + 4?", False),
    ("Tom has 12 red apples and gives 4 to Ann, his sister. How many are left?",
     "Tom has 12 red apples and gives 4 to Ann, his brother. How many are left?", True),
    ("Tom has 12 red apples and gives 4 to Ann, his sister. How many are left?",
     "Tom has 12 red apples and gives 5 to Ann, his sister. How many are left?", False),
    ("How many r are in strawberry?", "How many r are in blueberry?", False),
    ("", "", True),
    ("???", "!!", True),
    ("", "word", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "query", "is_near"), NEAR)
def test_near_duplicates_have_the_same_numbers_and_nearly_the_same_words(text, query, is_near):
    others = [
        f"What is {n} + {m}? How many apples are left in all?" for n in range(9) for m in (1, 7)
    ]
    others += [f"How many r are in {word}?" for word in ("cherry", "pear", "raspberry")]
    near = NearDuplicates([text, *others])
    assert near(text, query) == near(query, text) == is_near


def test_a_term_weighs_its_idf_when_problems_are_compared():
    # N = 2: idf_a = ln(1 + 0.5/2.5) = 0.182, idf_b = ln(1 + 1.5/1.5) = 0.693, unknown ln 6 = 1.792
    near = NearDuplicates(["a b", "a c"])
    assert near("a b", "b")  # 0.480 / sqrt(0.514 * 0.480) = 0.967
    assert not near("a b", "a c")  # 0.033 / 0.514 = 0.065
    assert not near("b", "b z")  # 0.480 / sqrt(0.480 * 3.691) = 0.361


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_every_text_is_a_near_duplicate_of_itself(texts):
    near = NearDuplicates(texts)
    assert all(near(text, f" {text}\n") for text in [*texts, "new"])


def test_no_texts_and_no_queries_are_fine():
    assert Bm25Index([], ["a"]).scores(0).shape == (0,)
    Bm25Index(["a"], [])
    assert not NearDuplicates([])("a", "b")
    assert embed([]).shape == (0, NUM_PLACES)


@settings(max_examples=40)
@given(st.lists(st.text(max_size=30), max_size=4))
def test_vectors_have_length_one_and_stand_alone(texts):
    vectors = embed(texts)
    assert vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        length = float(np.linalg.norm(vector.astype(np.float64)))
        assert length == pytest.approx(1.0, abs=FLOAT32) or length == 0.0
        assert vector.tolist() == embed([text])[0].tolist()
    assert embed(["apples"])[0].any()
    assert embed(["a lone \ud800"])[0].any()


def test_vectors_are_near_where_words_are():
    duck, ducks, sum_ = embed(["a duck swims in a pond", "ducks swim in ponds", "What is 3 + 4?"])
    assert duck @ ducks > 0.4
    assert abs(duck @ sum_) < 0.2


def test_the_vectors_of_this_model_never_change():
    # Of "cat": " ca", "cat", "at ", " cat", "cat ", each at a place with a sign: +-1/sqrt(5).
    vector = embed(["cat"])[0]
    assert EMBEDDING_MODEL == "char-3-4-hashed-512/1"
    places = {int(i): int(np.sign(vector[i])) for i in np.flatnonzero(vector)}
    assert places == PLACES
    assert np.abs(vector[list(places)]) == pytest.approx(1 / math.sqrt(5), abs=FLOAT32)


PLACES = {13: 1, 241: -1, 289: 1, 295: 1, 355: 1}
