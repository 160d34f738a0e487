import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.exploration import (
    distinct_n,
    novelty,
    pass_at_k,
    self_bleu4,
    similarity,
    unique_solution_rate,
)

EXACT = 1e-12
TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=8).map(" ".join), max_size=6)


def test_distinct_n_counts_different_n_grams():
    texts = ["a b a b", "a b c"]
    assert distinct_n(texts, 1) == pytest.approx(3 / 7, abs=EXACT)  # a b c of seven words
    assert distinct_n(texts, 2) == pytest.approx(3 / 5, abs=EXACT)  # ab ba bc of ab ba ab, ab bc
    assert distinct_n(["a"], 2) == 0.0
    with pytest.raises(ValueError, match="n = 0"):
        distinct_n(texts, 0)


def test_self_bleu_of_copies_is_one_and_of_strangers_zero():
    assert self_bleu4(["a b c d e", "a b c d e"]) == pytest.approx(1.0, abs=EXACT)
    assert self_bleu4(["a b c d", "e f g h"]) == 0.0
    assert self_bleu4(["a b c"]) == 0.0
    assert self_bleu4([]) == 0.0
    assert self_bleu4(["", "a"]) == 0.0


def test_self_bleu_by_hand():
    # "a b c d" against "a b c": 3/4 words; smoothed 2-grams (2+1)/(3+1), 3-grams (1+1)/(2+1),
    # 4-grams (0+1)/(1+1); longer than its reference, so no brevity penalty.
    first = (3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    # "a b c" against "a b c d": 3/3, (2+1)/(2+1), (1+1)/(1+1), (0+1)/(0+1); brevity exp(1 - 4/3)
    second = math.exp(1 - 4 / 3)
    assert self_bleu4(["a b c d", "a b c"]) == pytest.approx((first + second) / 2, abs=EXACT)


def plain_self_bleu4(texts):
    """Each text against each other, as BLEU is defined."""
    words = [text.split() for text in texts]
    scores = []
    for i, text in enumerate(words):
        others = words[:i] + words[i + 1 :]
        if not text or not others:
            scores.append(0.0)
            continue
        product = 1.0
        for n in (1, 2, 3, 4):
            grams = [tuple(text[j : j + n]) for j in range(len(text) - n + 1)]
            found = 0
            for gram in set(grams):
                most = max(
                    sum(tuple(o[j : j + n]) == gram for j in range(len(o) - n + 1)) for o in others
                )
                found += min(grams.count(gram), most)
            extra = int(n > 1)
            product *= (found + extra) / (len(grams) + extra) if grams or extra else 0.0
        length = min((len(o) for o in others), key=lambda o: (abs(o - len(text)), o))
        scores.append(product**0.25 * min(1.0, math.exp(1 - length / len(text))))
    return sum(scores) / len(scores) if len(texts) > 1 else 0.0


@settings(deadline=None)
@given(TEXTS)
def test_self_bleu_is_what_comparing_all_pairs_gives(texts):
    assert self_bleu4(texts) == pytest.approx(plain_self_bleu4(texts), abs=1e-9)


def test_unique_solutions_are_counted_among_known_successes():
    signatures = ["7 +", "7 +", "7 *", None, "8 -"]
    assert unique_solution_rate(signatures, [True, True, True, True, False]) == 2 / 3
    assert unique_solution_rate(["7 +"], [False]) == 0.0


def test_pass_at_k_is_unbiased_and_exact():
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4, abs=EXACT)
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9, abs=EXACT)  # 1 - C(3,3)/C(5,3) = 1 - 1/10
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(10_000, 1, 10) == pytest.approx(1e-3, abs=EXACT)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_out_of_range_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"came n = {n}, c = {c}, k = {k}"):
        pass_at_k(n, c, k)


def test_similarity_by_hand():
    # "the", "hat": _th the he_ and _ha hat at_; "the cat": _th the he_, _ca cat at_
    assert similarity("the hat", "The cat!") == pytest.approx(4 / 8, abs=EXACT)
    assert similarity("the hat", "hat, THE 7") == 1.0
    assert similarity("the hat", "") == similarity("", "") == similarity("7", "7") == 0.0


def test_novelty_by_hand():
    assert novelty("the hat", ["no", "The cat!"]) == 0.0  # half in common: a copy
    assert novelty("the hat", []) == novelty("the hat", ["no", "if"]) == 1.0
    # _th the he_ and 5 shingles of "words" against "the" and 5 of "house": 3 of 13
    assert novelty("the words", ["the house"]) == pytest.approx((0.5 - 3 / 13) / 0.3, abs=EXACT)
    assert novelty("", ["the hat"]) == novelty("?! 7", []) == 0.0


STORY = (
    "We sat by the river until the lamp went out. Nobody said a word, and for once that was fine "
    "with all of us, since the boats had come back from the sea."
)


@pytest.mark.parametrize("place", range(0, len(STORY), 7))
def test_a_copy_with_one_other_character_is_not_new(place):
    changed = STORY[:place] + "q" + STORY[place + 1 :]
    assert novelty(changed, [STORY]) == 0.0


@pytest.mark.parametrize(
    "copy",
    [
        STORY.upper(),
        STORY + " 12345 !!!",
        " ".join(reversed(STORY.split())),
        STORY.replace(" ", "  \n"),
        STORY + " " + STORY,
        "Well, here is my answer: " + STORY,
        STORY[: len(STORY) * 3 // 4],
    ],
    ids=["capitals", "figures", "order", "space", "twice", "opening", "cut"],
)
def test_a_copy_in_other_clothes_is_not_new(copy):
    assert novelty(copy, ["something else", STORY]) == 0.0


@given(TEXTS, st.text(max_size=20))
def test_novelty_is_the_same_in_any_order_and_never_grows_with_company(texts, text):
    value = novelty(text, texts)
    assert 0.0 <= value <= 1.0
    assert novelty(text, texts[::-1]) == value
    assert novelty(text, [*texts, "a new one"]) <= value
