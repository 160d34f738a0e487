"""Memory: which verified reviews of other problems a review is shown.

Source: SRRL (arXiv 2607.05541), which keeps reviews that led to a success and retrieves some for
later reviews. Our choices:

1. Similarity compares problems, never reviews. By ranking:
       recency    1 / (1 + number of newer entries); the floor does not apply
       bm25       BM25 relative to the problem's score with itself, about 0 to 1
       embedding  cosine of vectors, 0 where below: by default of character n-grams (`similarity`)
   An entry less similar than the floor is not retrieved.
2. score = similarity * (num_helpful + 1) / (num_helpful + num_harmful + 2). The factor of an entry
   without history is 1/2; a good one doubles a score at most. Ties go to the
   newer: ids name the run, and a fork is to be shown what its original is.
3. Never retrieved are entries of the same problem or of a near-duplicate (`similarity`), and those
   in which the problem's gold stands as an answer (`leak.holds_gold`).
4. The token budget is filled in the order of the scores; an entry that does not fit is skipped.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rrl_core.review.leak import holds_gold
from rrl_core.review.similarity import (
    HASHED,
    Bm25Index,
    Embedder,
    Floats,
    NearDuplicates,
    Vectors,
)

Ranking = Literal["recency", "bm25", "embedding"]
Ints = NDArray[np.int64]

_BLOCK = 64  # queries whose cosines are held at a time
_FIRST = 256  # entries sorted first


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
    """Of the problem, by the embedder that ranks; None: it is made when needed."""


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
    entries: Sequence[MemoryEntry],
    queries: Sequence[Query],
    rule: MemoryRule,
    embedder: Embedder = HASHED,
) -> list[list[Retrieved]]:
    """Return what each query's review is shown, best first.

    Args:
        entries: oldest first; the order matters to recency alone.
        queries: problems under review.
        rule: ranking and limits.
        embedder: makes the vectors of the ranking `embedding`.

    Raises:
        ValueError: an entry has a count below 0 or a vector of another length.
    """
    if not entries:
        return [[] for _ in queries]
    columns = _columns(entries)
    asked = [query.problem for query in queries]
    near_duplicates = NearDuplicates(columns.problems_P)
    similarities = _SIMILARITIES[rule.ranking](entries, columns, asked, embedder)
    retrieved = []
    for query, similarity_N in zip(queries, similarities, strict=True):
        places = _best_first(columns, query, similarity_N, rule)
        picks = _pick(entries, query, places, near_duplicates, rule)
        retrieved.append(
            [Retrieved(p, entries[p].review_id, float(similarity_N[p])) for p in picks]
        )
    return retrieved


def _pick(
    entries: Sequence[MemoryEntry],
    query: Query,
    places: Iterator[int],
    near_duplicates: NearDuplicates,
    rule: MemoryRule,
) -> list[int]:
    """Return the first of `places` whose entries fit and tell nothing of the query itself."""
    is_near = cache(partial(near_duplicates, query.problem))
    picks: list[int] = []
    left = rule.max_tokens
    for place in places:
        entry = entries[place]
        if len(picks) == rule.max_entries:
            break
        if entry.num_tokens > left or holds_gold(entry.text, query.gold) or is_near(entry.problem):
            continue
        left -= entry.num_tokens
        picks.append(place)
    return picks


@dataclass(frozen=True)
class _Columns:
    """The entries [N] as columns, and their P distinct problems, sorted."""

    problems_P: list[str]
    problem_N: Ints
    prompt_of: Mapping[str, int]
    prompt_N: Ints
    tokens_N: Ints
    factor_N: Floats


def _columns(entries: Sequence[MemoryEntry]) -> _Columns:
    counts_3N = np.array([[e.num_tokens, e.num_helpful, e.num_harmful] for e in entries]).T
    if counts_3N.min() < 0:
        raise ValueError("expected token, helpful and harmful counts of 0 or more in each entry")
    tokens_N, helpful_N, harmful_N = counts_3N
    problem_of, problem_N = _places([entry.problem for entry in entries])
    prompt_of, prompt_N = _places([entry.prompt_id for entry in entries])
    factor_N = (helpful_N + 1) / (helpful_N + harmful_N + 2)
    return _Columns(list(problem_of), problem_N, prompt_of, prompt_N, tokens_N, factor_N)


def _places(texts: list[str]) -> tuple[dict[str, int], Ints]:
    """Return the distinct texts, sorted, and where each text stands among them."""
    places = {text: place for place, text in enumerate(sorted(set(texts)))}
    return places, np.array([places[text] for text in texts], dtype=np.int64)


def _by_recency(
    entries: Sequence[MemoryEntry], columns: _Columns, asked: Sequence[str], embedder: Embedder
) -> Iterator[Floats]:
    similarity_N = 1 / np.arange(len(entries), 0, -1)
    return (similarity_N for _ in asked)


def _by_bm25(
    entries: Sequence[MemoryEntry], columns: _Columns, asked: Sequence[str], embedder: Embedder
) -> Iterator[Floats]:
    index = Bm25Index(columns.problems_P, asked)
    return (index.scores(place)[columns.problem_N] for place in range(len(asked)))


def _by_embedding(
    entries: Sequence[MemoryEntry], columns: _Columns, asked: Sequence[str], embedder: Embedder
) -> Iterator[Floats]:
    vectors_PD = _vectors(entries, columns.problems_P, embedder)
    for start in range(0, len(asked), _BLOCK):
        for cosine_P in embedder.embed(asked[start : start + _BLOCK]) @ vectors_PD.T:
            yield np.maximum(0.0, cosine_P)[columns.problem_N].astype(np.float64)


_SIMILARITIES: Mapping[
    str, Callable[[Sequence[MemoryEntry], _Columns, Sequence[str], Embedder], Iterator[Floats]]
] = {"recency": _by_recency, "bm25": _by_bm25, "embedding": _by_embedding}


def _vectors(
    entries: Sequence[MemoryEntry], problems: Sequence[str], embedder: Embedder
) -> Vectors:
    """Return the vector of each problem, [P, D]; those that no entry brings are made here."""
    known = {entry.problem: entry.vector for entry in entries if entry.vector is not None}
    missing = [problem for problem in problems if problem not in known]
    known.update(zip(missing, embedder.embed(missing), strict=True))
    vectors_PD = np.empty((len(problems), embedder.num_places), dtype=np.float32)
    for place, problem in enumerate(problems):
        vector = np.asarray(known[problem], dtype=np.float32)
        if vector.shape != (embedder.num_places,):
            raise ValueError(
                f"expected vectors of `{embedder.name}`, {embedder.num_places} numbers long; came "
                f"one of shape {vector.shape}; leave it out, and it is made anew"
            )
        vectors_PD[place] = vector
    return vectors_PD


def _best_first(
    columns: _Columns, query: Query, similarity_N: Floats, rule: MemoryRule
) -> Iterator[int]:
    """Yield the entries of other prompts that are similar and short enough, best first."""
    is_allowed = columns.prompt_N != columns.prompt_of.get(query.prompt_id, -1)
    is_allowed &= columns.tokens_N <= rule.max_tokens
    if rule.ranking != "recency":
        is_allowed &= similarity_N >= rule.floor
    allowed = np.flatnonzero(is_allowed)
    scores = similarity_N[allowed] * columns.factor_N[allowed]
    # Sorting them all would take most of the time, and the first few are nearly always enough.
    least = np.partition(scores, -_FIRST)[-_FIRST] if len(scores) > _FIRST else -np.inf
    for part in (np.flatnonzero(scores >= least), np.flatnonzero(scores < least)):
        yield from allowed[part[np.lexsort((-part, -scores[part]))]].tolist()
