"""Similarity of problems: BM25, vectors of character n-grams, and near-duplicates.

BM25: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009).

    score(q, d) = sum over terms t of q of
                  idf_t * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / avg))
    idf_t       = ln(1 + (N - n_t + 0.5) / (n_t + 0.5))

tf counts t in d, |d| the terms of d, avg is their mean, n_t of N texts hold t; k1 = 1.5, b = 0.75.

Our choices:
1. The 1 inside the logarithm keeps a term of more than half of the texts from weighing below 0.
2. A term counts once however often the query has it.
3. Terms are words, numbers and arithmetic signs, in small letters.
4. A score is given relative to the query's score with itself: about 0 to 1 for every query, so that
   one floor fits all. Words that all problems share, such as an instruction, weigh next to nothing.
5. A vector counts n-grams within words, 3 and 4 characters long, hashed into 512 places with signs,
   so that collisions cancel on average; its length is 1 (0 for a text without characters).
6. Near-duplicates have the same numbers, in any order, and cosine above 0.8 between their terms,
   each weighing its idf: what all problems share says nothing, other numbers are other problems.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import (  # type: ignore[import-untyped]
    CountVectorizer,
    HashingVectorizer,
)

K1, B = 1.5, 0.75
NEAR = 0.8
NUM_PLACES = 512
EMBEDDING_MODEL = f"char-3-4-hashed-{NUM_PLACES}/1"

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]

_TERM = r"[^\W\d_]++|\d++(?:[.,]\d++)*+|[-+*/=^%<>\u2212\u00d7\u00f7]"
_find_terms = re.compile(_TERM).findall
_BLOCK = 4096


class Bm25Index:
    """The terms of texts [N] and of queries [Q], as sparse matrices.

    No bit of a score depends on the order of the texts or of the queries.
    """

    def __init__(self, texts: Sequence[str], queries: Sequence[str]) -> None:
        num_texts = len(texts)
        # The last text is there because the vectorizer refuses texts without a single term.
        counts = CountVectorizer(token_pattern=_TERM).fit_transform([*texts, *queries, "term"])
        counts = counts[:-1].astype(np.float64)
        num_with_term = np.bincount(counts[:num_texts].indices, minlength=counts.shape[1])
        lengths = np.asarray(counts.sum(axis=1)).ravel()
        mean = max(1.0, lengths[:num_texts].sum() / max(1, num_texts))
        tf, norm = counts.data, K1 * (1 - B + B * lengths / mean)
        saturation = tf * (K1 + 1) / (tf + np.repeat(norm, np.diff(counts.indptr)))
        counts.data = saturation * _idf(num_texts, num_with_term)[counts.indices]
        self._text_weights = counts[:num_texts].T.tocsr()
        self._query_weights = counts[num_texts:]

    def scores(self, query: int) -> Floats:
        """Return the relative score of each text for one of the queries, [N], 0 or more.

        A query without terms scores 0 everywhere.
        """
        weights = self._query_weights[query]
        own = float(weights.sum())
        scores: Floats = (weights.sign() @ self._text_weights).toarray()[0]
        return scores / own if own else scores


class NearDuplicates:
    """Tells near-duplicates among problems.

    The idf is that of at most 4,096 of the texts, evenly spread over their sorted list: enough to
    tell what all problems share. Their order does not matter.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        distinct = sorted(set(texts))
        sample = distinct[:: len(distinct) // _BLOCK + 1]
        self._num_texts = len(sample)
        self._num_with_term = Counter(term for text in sample for term in _terms(text))

    def __call__(self, first: str, second: str) -> bool:
        """Return whether two problems are near-duplicates; those without a term are all alike."""
        if _numbers(first) != _numbers(second):
            return False
        one, other = _terms(first), _terms(second)
        shared, *squares = (self._square(terms) for terms in (one & other, one, other))
        return one == other or shared > NEAR * math.sqrt(math.prod(squares))

    def _square(self, terms: set[str]) -> float:
        """Return the squared length of the terms' weights, whatever the order of a set."""
        held = np.array([self._num_with_term[term] for term in terms])
        return math.fsum(_idf(self._num_texts, held) ** 2)


def embed(texts: Sequence[str]) -> Vectors:
    """Return the vector of each text, [N, 512] float32, of length 1, by `EMBEDDING_MODEL`.

    The vector of a text without characters, or whose n-grams all cancel, is 0.
    """
    vectorizer = HashingVectorizer(
        analyzer="char_wb", ngram_range=(3, 4), n_features=NUM_PLACES, dtype=np.float32
    )
    vectors = np.zeros((len(texts), NUM_PLACES), dtype=np.float32)
    for start in range(0, len(texts), _BLOCK):
        # A lone surrogate has no UTF-8 form to be hashed.
        block = [text.encode("utf-8", "replace").decode() for text in texts[start : start + _BLOCK]]
        vectors[start : start + _BLOCK] = vectorizer.transform(block).toarray()
    return vectors


@dataclass(frozen=True)
class Embedder:
    """What makes vectors of texts."""

    name: str
    """Stored beside its vectors: those of another are never compared with them."""
    num_places: int
    embed: Callable[[Sequence[str]], Vectors]
    """Texts [N] to vectors [N, num_places], of length 1; of a text without tokens 0."""


HASHED = Embedder(EMBEDDING_MODEL, NUM_PLACES, embed)


def _idf(num_texts: int, num_with_term: NDArray[np.int64]) -> Floats:
    return np.log1p((num_texts - num_with_term + 0.5) / (num_with_term + 0.5))


def _terms(text: str) -> set[str]:
    return set(_find_terms(text.lower()))


def _numbers(text: str) -> list[str]:
    return sorted(term for term in _find_terms(text) if term[0].isdigit())
