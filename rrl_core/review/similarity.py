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
6. Near-duplicates have the same numbers, in any order, and cosine 0.8 or more between the idf of
   their terms. Another number makes another problem.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import (  # type: ignore[import-untyped]
    CountVectorizer,
    HashingVectorizer,
)
from sklearn.preprocessing import normalize  # type: ignore[import-untyped]

K1, B = 1.5, 0.75
NEAR = 0.8
NUM_PLACES = 512
EMBEDDING_MODEL = f"char-3-4-hashed-{NUM_PLACES}/1"

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]
Flags = NDArray[np.bool_]

_TERM = r"[^\W\d_]+|\d+(?:[.,]\d+)*|[-+*/=^%<>\u2212\u00d7\u00f7]"
_NUMBER = re.compile(r"\d++(?:[.,]\d++)*+")
_BLOCK = 4096


class TermIndex:
    """The terms of texts [N] and of queries [Q], as sparse matrices.

    Memory grows with the number of terms; queries are compared one at a time. No bit of an answer
    depends on the order of the texts or of the queries.
    """

    def __init__(self, texts: Sequence[str], queries: Sequence[str]) -> None:
        num_texts = len(texts)
        # The last text is there because the vectorizer refuses texts without a single term.
        counts = CountVectorizer(token_pattern=_TERM).fit_transform([*texts, *queries, "term"])
        counts = counts[:-1].astype(np.float64)
        num_with_term = np.bincount(counts[:num_texts].indices, minlength=counts.shape[1])
        idf = np.log1p((num_texts - num_with_term + 0.5) / (num_with_term + 0.5))
        weights, units = _bm25_weights(counts, num_texts, idf), _unit_idf(counts, idf)
        self._text_weights = weights[:num_texts].T.tocsr()
        self._query_weights = weights[num_texts:]
        self._text_units = units[:num_texts].T.tocsr()
        self._query_units = units[num_texts:]
        keys = _number_keys([*texts, *queries])
        self._text_keys, self._query_keys = keys[:num_texts], keys[num_texts:]

    def bm25(self, query: int) -> Floats:
        """Return the relative score of each text for one of the queries, [N], 0 or more.

        A query without terms scores 0 everywhere.
        """
        weights = self._query_weights[query]
        own = float(weights.sum())
        scores: Floats = (weights.sign() @ self._text_weights).toarray()[0]
        return scores / own if own else scores

    def near_duplicates(self, query: int) -> Flags:
        """Return whether each text is a near-duplicate of one of the queries, [N].

        Texts without any term are all alike.
        """
        units = self._query_units[query]
        is_near: Flags = (units @ self._text_units).toarray()[0] >= NEAR
        if not units.nnz:
            is_near = self._text_units.getnnz(axis=0) == 0
        return is_near & (self._text_keys == self._query_keys[query])


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


def _bm25_weights(counts: sparse.csr_matrix, num_texts: int, idf: Floats) -> sparse.csr_matrix:
    """Return what each term adds to the score of its text."""
    lengths = np.asarray(counts.sum(axis=1)).ravel()
    mean = max(1.0, lengths[:num_texts].sum() / max(1, num_texts))
    weights = counts.copy()
    norm = K1 * (1 - B + B * np.repeat(lengths, np.diff(counts.indptr)) / mean)
    weights.data = idf[counts.indices] * counts.data * (K1 + 1) / (counts.data + norm)
    return weights


def _unit_idf(counts: sparse.csr_matrix, idf: Floats) -> sparse.csr_matrix:
    """Return the idf of each text's terms, divided by their length."""
    units = counts.copy()
    units.data = idf[counts.indices]
    return normalize(units, copy=False)


def _number_keys(texts: Sequence[str]) -> NDArray[np.int64]:
    """Return a key of each text, equal where two texts have the same numbers."""
    keys: dict[tuple[str, ...], int] = {}
    numbers = (tuple(sorted(_NUMBER.findall(text))) for text in texts)
    return np.fromiter((keys.setdefault(n, len(keys)) for n in numbers), np.int64, len(texts))
