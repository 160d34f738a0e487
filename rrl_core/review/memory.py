"""Memory: which verified reviews of other problems a review is shown.

Source: SRRL (arXiv 2607.05541), which keeps reviews that led to a success and retrieves some for
later reviews. Our choices:

1. Similarity compares problems, never reviews. By ranking:
       recency    1 / (1 + number of newer entries); the floor does not apply
       bm25       BM25 relative to the problem's score with itself, about 0 to 1
       embedding  cosine of character n-gram vectors, 0 where below
   An entry less similar than the floor is not retrieved.
2. score = similarity * 2 * (num_helpful + 1) / (num_helpful + num_harmful + 2): an entry without
   history keeps its similarity, a good one at most doubles it. Ties go by review id.
3. Never retrieved are entries of the same problem or of a near-duplicate (`similarity`), and those
   in which the problem's gold stands as an answer (`leak.holds_gold`).
4. The token budget is filled in the order of the scores; an entry that does not fit is skipped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rrl_core.review.leak import holds_gold
from rrl_core.review.similarity import (
    EMBEDDING_MODEL,
    NUM_PLACES,
    Floats,
    TermIndex,
    Vectors,
    embed,
)

Ranking = Literal["recency", "bm25", "embedding"]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MemoryEntry:
    """A verified review that may be shown."""

    review_id: str
    prompt_id: str
    problem: str
    """Text of the problem that it belongs to."""
    text: str
    """The review."""
    num_tokens: int
    """Tokens it takes in a prompt."""
    num_helpful: int = 0
    """Reviews it was shown to whose second attempt succeeded."""
    num_harmful: int = 0
    """Reviews it was shown to whose second attempt failed."""
    vector: Sequence[float] | Vectors | None = field(default=None, compare=False)
    """Of the problem, by `similarity.EMBEDDING_MODEL`; None: it is made when needed."""


@dataclass(frozen=True)
class Query:
    """A problem to find reviews for."""

    prompt_id: str
    problem: str
    gold: str | None
    """Its reference answer; None where there is none."""


@dataclass(frozen=True)
class MemoryRule:
    """How entries are ranked, and how many are shown."""

    ranking: Ranking
    max_entries: int
    max_tokens: int
    """Of all entries shown to one review together."""
    floor: float = 0.0
    """Least similarity; not used by recency."""

    def __post_init__(self) -> None:
        if self.ranking not in get_args(Ranking):
            raise ValueError(f"expected a ranking of {get_args(Ranking)}; came {self.ranking!r}")
        if self.max_entries < 0 or self.max_tokens < 0 or not math.isfinite(self.floor):
            raise ValueError(
                f"expected max_entries >= 0, max_tokens >= 0 and a finite floor; came "
                f"{self.max_entries}, {self.max_tokens} and {self.floor}"
            )


@dataclass(frozen=True)
class Retrieved:
    """An entry that is shown."""

    entry: int
    """Its index among the entries."""
    review_id: str
    similarity: float


def retrieve(
    entries: Sequence[MemoryEntry], queries: Sequence[Query], rule: MemoryRule
) -> list[list[Retrieved]]:
    """Return what each query's review is shown, best first.

    Args:
        entries: oldest first; the order matters to recency alone.
        queries: problems under review.
        rule: ranking and limits.

    Raises:
        ValueError: an entry has a count below 0 or a vector of another length.
    """
    if not entries:
        return [[] for _ in queries]
    compared = _compare(entries, queries, rule)
    retrieved = []
    for place, query in enumerate(queries):
        similarity_N = _SIMILARITIES[rule.ranking](compared, place)
        order = _ranked(compared, place, query, similarity_N, rule)
        retrieved.append(_pick(entries, query, order, similarity_N, rule))
    return retrieved


@dataclass(frozen=True)
class _Compared:
    """Columns of the entries [N]; their P distinct problems, and what these are compared by."""

    problem_N: Ints
    prompt_ids_N: NDArray[np.object_]
    tokens_N: Ints
    factor_N: Floats
    id_order_N: Ints
    terms_P: TermIndex
    vectors_PD: Vectors | None
    query_vectors_QD: Vectors | None


def _compare(
    entries: Sequence[MemoryEntry], queries: Sequence[Query], rule: MemoryRule
) -> _Compared:
    counts_3N = np.array([[e.num_tokens, e.num_helpful, e.num_harmful] for e in entries]).T
    if counts_3N.min() < 0:
        raise ValueError("expected token, helpful and harmful counts of 0 or more in each entry")
    tokens_N, helpful_N, harmful_N = counts_3N
    problems = sorted({entry.problem for entry in entries})
    places = {problem: place for place, problem in enumerate(problems)}
    asked = [query.problem for query in queries]
    is_by_vector = rule.ranking == "embedding"
    return _Compared(
        problem_N=np.array([places[entry.problem] for entry in entries]),
        prompt_ids_N=np.array([entry.prompt_id for entry in entries], dtype=object),
        tokens_N=tokens_N,
        factor_N=2 * (helpful_N + 1) / (helpful_N + harmful_N + 2),
        id_order_N=_order([entry.review_id for entry in entries]),
        terms_P=TermIndex(problems, asked),
        vectors_PD=_vectors(entries, problems) if is_by_vector else None,
        query_vectors_QD=embed(asked) if is_by_vector else None,
    )


def _order(review_ids: list[str]) -> Ints:
    """Return each id's place when the ids are sorted."""
    places = np.empty(len(review_ids), dtype=np.int64)
    order = sorted(range(len(review_ids)), key=review_ids.__getitem__)
    places[order] = np.arange(len(review_ids))
    return places


def _vectors(entries: Sequence[MemoryEntry], problems: list[str]) -> Vectors:
    """Return the vector of each problem, [P, D]; those that no entry brings are made here."""
    given = {entry.problem: entry.vector for entry in entries if entry.vector is not None}
    missing = [problem for problem in problems if problem not in given]
    vectors_PD = np.empty((len(problems), NUM_PLACES), dtype=np.float32)
    made = dict(zip(missing, embed(missing), strict=True))
    for place, problem in enumerate(problems):
        vector = np.asarray(given.get(problem, made.get(problem)), dtype=np.float32)
        if vector.shape != (NUM_PLACES,):
            raise ValueError(
                f"expected vectors of `{EMBEDDING_MODEL}`, {NUM_PLACES} numbers long; came one of "
                f"shape {vector.shape}; leave it out, and it is made anew"
            )
        vectors_PD[place] = vector
    return vectors_PD


def _by_recency(compared: _Compared, query: int) -> Floats:
    return 1 / np.arange(len(compared.tokens_N), 0, -1)


def _by_bm25(compared: _Compared, query: int) -> Floats:
    return compared.terms_P.bm25(query)[compared.problem_N]


def _by_embedding(compared: _Compared, query: int) -> Floats:
    assert compared.vectors_PD is not None
    assert compared.query_vectors_QD is not None
    cosine_P = compared.vectors_PD @ compared.query_vectors_QD[query]
    return np.maximum(0.0, cosine_P)[compared.problem_N].astype(np.float64)


_SIMILARITIES: Mapping[str, Callable[[_Compared, int], Floats]] = {
    "recency": _by_recency,
    "bm25": _by_bm25,
    "embedding": _by_embedding,
}


def _ranked(
    compared: _Compared, place: int, query: Query, similarity_N: Floats, rule: MemoryRule
) -> Ints:
    """Return the entries that may be shown for the query at `place`, best first."""
    is_allowed = (
        ~compared.terms_P.near_duplicates(place)[compared.problem_N]
        & (compared.prompt_ids_N != query.prompt_id)
        & (compared.tokens_N <= rule.max_tokens)
    )
    if rule.ranking != "recency":
        is_allowed &= similarity_N >= rule.floor
    allowed = np.flatnonzero(is_allowed)
    scores = similarity_N[allowed] * compared.factor_N[allowed]
    return allowed[np.lexsort((compared.id_order_N[allowed], -scores))]


def _pick(
    entries: Sequence[MemoryEntry],
    query: Query,
    order: Ints,
    similarity_N: Floats,
    rule: MemoryRule,
) -> list[Retrieved]:
    """Return the first entries of `order` that fit and do not hold the query's gold."""
    picks: list[Retrieved] = []
    left = rule.max_tokens
    for place in order.tolist():
        if len(picks) == rule.max_entries:
            break
        entry = entries[place]
        if entry.num_tokens <= left and not holds_gold(entry.text, query.gold):
            left -= entry.num_tokens
            picks.append(Retrieved(place, entry.review_id, float(similarity_N[place])))
    return picks
