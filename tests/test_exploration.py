import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.exploration import distinct_n, pass_at_k, self_bleu4, unique_solution_rate

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
