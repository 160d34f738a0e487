"""Memory: what a review is shown, and what it never is."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.review.leak import holds_gold
from rrl_core.review.memory import MemoryEntry, MemoryRule, Query, Retrieved, retrieve
from rrl_core.review.similarity import Bm25Index, Embedder, embed

EXACT = 1e-12
QUERY = Query("p-q", "How many ducks swim in the pond with 5 swans?", "12")


def entry(
    review_id: str, problem: str, text: str = "Wrong: a\nInstead: b", **changes
) -> MemoryEntry:
    made = MemoryEntry(review_id, "p-" + review_id, problem, text, num_tokens=10)
    return replace(made, **changes)


def shown(entries, rule="bm25", query=QUERY, max_entries=9, max_tokens=1000, floor=0.0):
    [found] = retrieve(entries, [query], MemoryRule(rule, max_entries, max_tokens, floor))
    return [pick.review_id for pick in found]


DUCKS = entry("ducks", "How many ducks fly over the pond?")
APPLES = entry("apples", "Tom eats apples at home.")
POND = entry("pond", "Is the pond deep?")


@pytest.mark.parametrize("ranking", ["bm25", "embedding"])
def test_the_most_similar_problem_comes_first(ranking):
    assert shown([POND, DUCKS, APPLES], ranking) == ["ducks", "pond", "apples"]


def test_recency_shows_the_newest_first_and_has_no_floor():
    assert shown([POND, DUCKS, APPLES], "recency", floor=2.0) == ["apples", "ducks", "pond"]


def test_what_helped_counts_up_to_twice_and_what_harmed_less():
    # Newest first: similarities 1, 1/2, 1/3 times 1/4, 10/11, 1/2: 0.25, 0.455, 0.167.
    entries = [POND, replace(DUCKS, num_helpful=9), replace(APPLES, num_harmful=2)]
    assert shown(entries, "recency") == ["ducks", "apples", "pond"]
    [found] = retrieve(entries, [QUERY], MemoryRule("recency", 9, 99))
    assert found[0] == Retrieved(1, "ducks", 0.5)  # the similarity itself


@pytest.mark.parametrize("ranking", ["recency", "bm25", "embedding"])
def test_the_same_problem_is_never_shown(ranking):
    again = [
        replace(DUCKS, prompt_id="p-q"),
        entry("same", QUERY.problem),
        entry("near", "how many ducks swim in the pond, with 5 swans"),
    ]
    assert shown([*again, APPLES], ranking) == ["apples"]


def test_ties_go_to_the_newest():
    assert shown([replace(DUCKS, review_id=name) for name in "cab"]) == ["b", "a", "c"]


def test_the_order_holds_beyond_the_entries_that_are_sorted_first():
    # 600 entries; newest first, the odd ones helped: 10/11 / age against 1/2 / age. The first 500
    # of that order hold the gold.
    entries = [
        entry(f"{i:03}", f"Problem of ducks {i}", num_helpful=9 * (i % 2)) for i in range(600)
    ]
    scores = [1 / (600 - i) * (10 / 11 if i % 2 else 1 / 2) for i in range(600)]
    expected = sorted(range(600), key=lambda i: (-scores[i], i))
    assert shown(entries, "recency", max_entries=600, max_tokens=6000) == [
        f"{i:03}" for i in expected
    ]
    blocked = [
        replace(entries[i], text="#### 12") if i in expected[:500] else entries[i]
        for i in range(600)
    ]
    assert shown(blocked, "recency") == [f"{i:03}" for i in expected[500:509]]


def test_an_entry_in_which_the_gold_stands_is_never_shown():
    told = replace(DUCKS, text="Wrong: a\nInstead: 3 * 4 = 12")
    assert shown([told, POND]) == ["pond"]
    assert shown([told, POND], query=replace(QUERY, gold="13")) == ["ducks", "pond"]
    assert shown([told, POND], query=replace(QUERY, gold=None)) == ["ducks", "pond"]


def test_an_entry_that_does_not_fit_is_skipped():
    large = replace(DUCKS, num_tokens=60)
    assert shown([large, POND, APPLES], max_tokens=60) == ["ducks"]
    assert shown([large, POND, APPLES], max_tokens=59) == ["pond", "apples"]
    assert shown([DUCKS, replace(POND, num_tokens=60), APPLES], max_tokens=20) == [
        "ducks",
        "apples",
    ]
    assert shown([DUCKS, POND], max_entries=1) == ["ducks"]
    assert shown([DUCKS], max_entries=0) == []


@pytest.mark.parametrize("ranking", ["bm25", "embedding"])
def test_what_is_less_similar_than_the_floor_is_not_shown(ranking):
    entries = [DUCKS, POND, APPLES]
    [found] = retrieve(entries, [QUERY], MemoryRule(ranking, 9, 1000))
    middle = found[1].similarity
    assert shown(entries, ranking, floor=middle) == ["ducks", "pond"]
    assert shown(entries, ranking, floor=middle + 1e-9) == ["ducks"]


def test_the_similarity_is_that_of_the_problems():
    entries = [DUCKS, POND, APPLES]
    problems = [e.problem for e in entries]
    [found] = retrieve(entries, [QUERY], MemoryRule("bm25", 9, 1000))
    scores = Bm25Index(problems, [QUERY.problem]).scores(0)
    assert [pick.similarity for pick in found] == pytest.approx(
        [scores[pick.entry] for pick in found], abs=EXACT
    )
    [found] = retrieve(entries, [QUERY], MemoryRule("embedding", 9, 1000))
    scores = embed(problems) @ embed([QUERY.problem])[0]
    assert [pick.similarity for pick in found] == pytest.approx(
        [max(0, scores[pick.entry]) for pick in found], abs=1e-6
    )


def test_vectors_that_entries_bring_are_used():
    stored = [replace(e, vector=embed([e.problem])[0].tolist()) for e in (DUCKS, POND, APPLES)]
    assert shown(stored, "embedding") == shown([DUCKS, POND, APPLES], "embedding")
    swapped = [replace(DUCKS, vector=stored[2].vector), replace(APPLES, vector=stored[0].vector)]
    assert shown(swapped, "embedding") == ["apples", "ducks"]
    opposite = replace(DUCKS, vector=-embed([QUERY.problem])[0])
    [[pick]] = retrieve([opposite], [QUERY], MemoryRule("embedding", 1, 99))
    assert pick.similarity == 0.0
    with pytest.raises(ValueError, match=r"char-3-4-hashed-512/1.*shape \(2,\)"):
        shown([replace(DUCKS, vector=[0.6, 0.8])], "embedding")


def test_another_embedder_ranks_by_its_own_vectors():
    def embed_by_end(texts):
        return np.array([[t.endswith("."), not t.endswith(".")] for t in texts], dtype=np.float32)

    rule, by_end = MemoryRule("embedding", 9, 1000, 0.5), Embedder("by-end/1", 2, embed_by_end)
    [found] = retrieve([DUCKS, APPLES], [replace(QUERY, problem="We eat.")], rule, by_end)
    assert found == [Retrieved(1, "apples", 1.0)]
    hashed = replace(APPLES, vector=embed([APPLES.problem])[0])
    with pytest.raises(ValueError, match=r"`by-end/1`, 2 numbers.*shape \(512,\)"):
        retrieve([hashed], [QUERY], rule, by_end)


def test_nothing_is_shown_of_an_empty_memory():
    assert retrieve([], [QUERY, QUERY], MemoryRule("bm25", 2, 100)) == [[], []]
    assert retrieve([DUCKS], [], MemoryRule("bm25", 2, 100)) == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("age", 1, 1), "'age'"),
        (("bm25", -1, 1), "max_entries >= 0"),
        (("bm25", 1, -1), "max_tokens >= 0"),
        (("bm25", 1, 1, float("nan")), "finite floor"),
    ],
)
def test_a_rule_out_of_range_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        MemoryRule(*numbers)


def test_a_count_below_zero_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        shown([replace(DUCKS, num_tokens=-1)])


PROBLEMS = st.sampled_from(
    [
        "What is 3 + 4?",
        "what is 4+3",
        "What is 3 + 5?",
        "How many ducks?",
        "Tom has 3 apples",
        "",
        "?",
    ]
)
TEXTS = st.sampled_from(["Wrong: a\nInstead: b", "#### 7", "\\boxed{8}", "3 + 4 = 7", "take 7"])
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        PROBLEMS,
        TEXTS,
        st.integers(0, 40),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=8,
).map(lambda rows: [MemoryEntry(f"rv-{i:02}", *row) for i, row in enumerate(rows)])
QUERIES = st.lists(
    st.builds(Query, st.sampled_from("abz"), PROBLEMS, st.sampled_from(["7", "8", None])),
    max_size=3,
)
RULES = st.builds(
    MemoryRule,
    st.sampled_from(["recency", "bm25", "embedding"]),
    st.integers(0, 4),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.2]),
)


def words(text):
    return sorted(re.findall(r"\w+", text.lower()))


@settings(max_examples=80, deadline=None)
@given(ENTRIES, QUERIES, RULES)
def test_laws_of_what_is_shown(entries, queries, rule):
    retrieved = retrieve(entries, queries, rule)
    assert len(retrieved) == len(queries)
    for query, picks in zip(queries, retrieved, strict=True):
        found = [entries[pick.entry] for pick in picks]
        assert [e.review_id for e in found] == [pick.review_id for pick in picks]
        assert len({pick.entry for pick in picks}) == len(picks) <= rule.max_entries
        assert sum(e.num_tokens for e in found) <= rule.max_tokens
        for e, pick in zip(found, picks, strict=True):
            assert e.prompt_id != query.prompt_id
            assert words(e.problem) != words(query.problem)
            assert not holds_gold(e.text, query.gold)
            assert rule.ranking == "recency" or pick.similarity >= rule.floor


@settings(max_examples=30, deadline=None)
@given(ENTRIES, QUERIES, RULES)
def test_a_query_finds_the_same_alone_and_among_others(entries, queries, rule):
    together = retrieve(entries, queries, rule)
    for query, picks in zip(queries, together, strict=True):
        [alone] = retrieve(entries, [query], rule)
        assert [pick.review_id for pick in alone] == [pick.review_id for pick in picks]
