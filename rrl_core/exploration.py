"""How varied completions are, and how likely some of several is right.

Sources: distinct-n (Li et al., arXiv 1510.03055); Self-BLEU (Zhu et al., arXiv 1802.01886) of
BLEU (Papineni et al. 2002); pass@k, unbiased (Chen et al., arXiv 2107.03374).

Our choices:
1. A word is what stands between white space.
2. Self-BLEU is BLEU-4 with uniform weights and the brevity penalty of the closest reference length
   (the shorter of two as close). Precisions of 2- to 4-grams are smoothed by adding one to count
   and total (Lin and Och 2004); a text that shares no word with the others scores 0.
3. Self-BLEU uses all texts: of the others only the largest count of each n-gram matters, so time
   is linear and no sample need be drawn. It grows with the number of texts: compare equal numbers.
4. Novelty compares sets of three neighbouring characters within words, in small letters and without
   what is no letter: neither order, punctuation, figures nor one changed character make a copy new.
   A nearest text with half of them in common is a copy, with a fifth a stranger; English texts on
   one subject have about a tenth. Counts of sets are exact, so the number is the same on every
   machine: vectors of floats (`rrl_core.review.similarity`) would not give a score to be stored.
"""

import bisect
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

COPY, STRANGER = 0.5, 0.2  # similarity from which a text is nothing new, and wholly new

Ngrams = Counter[tuple[str, ...]]
_find_words = re.compile(r"[^\W\d_]+").findall


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Return the number of different n-grams over that of all n-grams of all texts, in [0, 1].

    1 = nothing is repeated; 0 where no text has n words.
    """
    ngrams: Ngrams = Counter()
    for text in texts:
        ngrams.update(_ngrams(text.split(), n))
    return len(ngrams) / ngrams.total() if ngrams else 0.0


def self_bleu4(texts: Sequence[str]) -> float:
    """Return the mean BLEU-4 of each text against all others, in [0, 1].

    1 = all are copies; larger = less varied. 0 for fewer than two texts: none has another.
    """
    if len(texts) < 2:
        return 0.0
    words = [text.split() for text in texts]
    lengths = sorted(map(len, words))
    log_precisions = [0.0] * len(texts)
    for n in (1, 2, 3, 4):
        for place, log_precision in enumerate(_log_precisions(words, n)):
            log_precisions[place] += log_precision / 4
    scores = [
        math.exp(log_precision + _log_brevity(len(text), lengths))
        for log_precision, text in zip(log_precisions, words, strict=True)
    ]
    return math.fsum(scores) / len(scores)


def similarity(first: str, second: str) -> float:
    """Return what two texts have in common of their shingles (Jaccard index), in [0, 1].

    0 where one has no letter.
    """
    return _jaccard(shingles(first), shingles(second))


def novelty(text: str, others: Iterable[str]) -> float:
    """Return how far the most similar of other texts is, in [0, 1].

        min(max((COPY - largest similarity) / (COPY - STRANGER), 0), 1)

    1 = no other is like it, or there is none; 0 = a copy, or a text without a letter.
    """
    return shingle_novelty(shingles(text), map(shingles, others))


def shingle_novelty(own: frozenset[str], others: Iterable[frozenset[str]]) -> float:
    """Return `novelty` of a text with the shingles `own` among others'."""
    if not own:
        return 0.0
    nearest = max((_jaccard(own, other) for other in others), default=0.0)
    return min(max((COPY - nearest) / (COPY - STRANGER), 0.0), 1.0)


def shingles(text: str) -> frozenset[str]:
    """Return each run of three characters of a text's words, a space before and behind a word."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = (f" {word} " for word in _find_words(plain))
    return frozenset(word[start : start + 3] for word in words for start in range(len(word) - 2))


def unique_solution_rate(signatures: Sequence[str | None], is_ok: Sequence[bool]) -> float:
    """Return the number of different signatures over that of successes, in [0, 1].

    Args:
        signatures: [B] of solutions to one prompt, or with the prompt's id in them; None where
            unknown: left out.
        is_ok: [B] True where the solution is a success; others are left out.

    Returns:
        1 = every success is another solution; 0 where there is none.
    """
    known = [s for s, ok in zip(signatures, is_ok, strict=True) if ok and s is not None]
    return len(set(known)) / len(known) if known else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate that one of k samples is right: 1 - C(n-c, k) / C(n, k).

    Args:
        n: samples that were drawn, k or more.
        c: those that are right.
        k: samples one is allowed, 1 or more.

    Raises:
        ValueError: a number is out of range.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"expected 0 <= c <= n and 1 <= k <= n; came n = {n}, c = {c}, k = {k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def _jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared) if shared else 0.0


def _ngrams(words: Sequence[str], n: int) -> Ngrams:
    if n < 1:
        raise ValueError(f"expected n-grams of 1 word or more; came n = {n}")
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _log_precisions(words: Sequence[Sequence[str]], n: int) -> list[float]:
    """Return ln of each text's share of n-grams found in another, clipped and smoothed."""
    counts = [_ngrams(text, n) for text in words]
    largest: dict[tuple[str, ...], tuple[int, int, int]] = {}  # count, its text, next largest count
    for place, ngrams in enumerate(counts):
        for ngram, count in ngrams.items():
            top, owner, second = largest.get(ngram, (0, -1, 0))
            if count > top:
                largest[ngram] = (count, place, top)
            else:
                largest[ngram] = (top, owner, max(second, count))
    added = 0 if n == 1 else 1
    logs = []
    for place, ngrams in enumerate(counts):
        matches = 0
        for ngram, count in ngrams.items():
            top, owner, second = largest[ngram]
            matches += min(count, second if owner == place else top)
        found, total = matches + added, ngrams.total() + added
        logs.append(math.log(found / total) if found else -math.inf)
    return logs


def _log_brevity(length: int, lengths: Sequence[int]) -> float:
    """Return ln of the brevity penalty; `lengths` are sorted and hold this text's own once."""
    place = bisect.bisect_left(lengths, length)
    others = [*lengths[max(0, place - 1) : place], *lengths[place + 1 : place + 2]]
    closest = min(others, key=lambda other: (abs(other - length), other))
    return min(0.0, 1 - closest / length) if length else -math.inf
