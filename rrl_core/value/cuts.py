"""Cut points: where a response can be cut so that its first tokens make a state to go on from.

Source: Retrospective Replay (arXiv 2504.14363), which replays "promising states" and does not say
where a response is cut. A state is a prompt and the first t tokens of a response; token ids are
never made from text again, text only says which t are good.

Our choice:
1. A cut stands after a line, a line of code (inside a ``` fence), a sentence or a turn: there an
   idea is complete, and continuations differ. At least one token and at most 0.8 of the response
   are given; later, little is left to continue.
2. White space that follows a boundary may belong to either side: the first token that ends
   in it is the cut. A boundary inside a token is no cut.
3. A response without any boundary, such as "12+5=17", is cut between its words and after any of
   = : ; , ("word"); a single word after the character that ends nearest to its half ("half").
4. Of more boundaries than asked for, those in the middle of equal shares of the list are kept;
   ends of turns come first.
   In an episode of several turns a turn ends where the policy's next one begins, behind what a tool
   or an environment said: its reply is part of the state. Nothing is cut within what it said, and
   nothing at the token that ends the policy's own turn: that is the same state, and less is known.
   The 0.8 are then of the tokens that were sampled.
5. Drop: for a success that the policy has forgotten, up to and with the token whose log-prob fell
   most since it was sampled, by 0.1 nats or more (its probability by a tenth). It is given, because
   it is what the policy no longer does by itself.
"""

import hashlib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from rrl_core.spans import sampled_mask

CutKind = Literal["prompt", "line", "sentence", "code", "turn", "word", "half", "drop"]
MAX_FRAC = 0.8
MIN_DROP = 0.1  # nats: less is rounding, or a policy that hardly moved

_BROKEN = "\ufffd"  # what a decoder writes for a character that is not complete
_MAX_CHARACTER_TOKENS = 4  # UTF-8 has at most 4 bytes a character
_LINE = re.compile(r"(\n)\s*")
_SENTENCE = re.compile(
    r"([.!?…][\"'”’»)\]*_]{0,3}(?=[ \t]++\S)|[。！？][”’」』）]{0,3})[ \t]*"  # noqa: RUF001
)
_WORD = re.compile(r"([=:;,]|(?=\s))\s*")
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Cut:
    """A place where a response is cut.

    `prefix_tokens`: tokens of the response that are given. `cut`: why here.
    """

    prefix_tokens: int
    cut: CutKind


class _Boundary(NamedTuple):
    """Characters [first, last] of the decoded text at any of which a token may end."""

    first: int
    last: int
    kind: CutKind


def cut_points(
    completion_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    max_cuts: int,
    max_frac: float = MAX_FRAC,
    turn_token_ids: Collection[int] = (),
    bounds: Sequence[int] | None = None,
) -> list[Cut]:
    """Return where to cut a response: deterministic, in increasing order, each place once.

    Args:
        completion_ids: token ids of the response, as sampled.
        decode: text of token ids, such as `Policy.decode`. Few prefixes are decoded: at most
            log2(tokens) for each cut.
        max_cuts: most cuts to return, at least 1.
        max_frac: (0, 1], largest part of the response to give.
        turn_token_ids: ids that end a turn, such as `Policy.eos_token_ids`.
        bounds: of the stretches that were sampled, in an episode of several turns
            (`rrl_core.spans`); then they say where turns end.

    Returns:
        Cuts with 1 <= prefix_tokens <= max_frac * len(completion_ids), none within a character.
        Empty where the response is white space, or where not even one character may be given.

    Raises:
        ValueError: `max_cuts` or `max_frac` is out of range.
    """
    if max_cuts < 1:
        raise ValueError(f"expected `max_cuts` of at least 1, got {max_cuts}")
    limit = _limit(len(completion_ids), max_frac, bounds)
    text_of = cache(lambda num_tokens: decode(completion_ids[:num_tokens]))
    text = text_of(len(completion_ids))
    if limit < 1 or not text.strip():
        return []
    if bounds is None:
        turns = [t for t, token in enumerate(completion_ids[:limit], 1) if token in turn_token_ids]
    else:
        turns = [start for start in bounds[::2] if 1 <= start <= limit]
    is_sampled = partial(_is_within, bounds, text_of)
    cuts = [Cut(t, "turn") for t in _spread(turns, max_cuts)]
    boundaries = filter(is_sampled, _boundaries(text))
    cuts += _locate(boundaries, text_of, text, limit, max_cuts - len(cuts))
    cuts = cuts or _locate(filter(is_sampled, _words(text)), text_of, text, limit, max_cuts)
    cuts = cuts or _half(text_of, text, len(completion_ids), limit)
    cuts = [cut for cut in cuts if cut.cut == "turn" or _is_inside(bounds, cut.prefix_tokens)]
    first_at = {cut.prefix_tokens: cut for cut in reversed(cuts)}
    return [first_at[t] for t in sorted(first_at)]


def drop_cut(
    sampler_logprobs: Sequence[float],
    policy_logprobs: Sequence[float],
    max_frac: float = MAX_FRAC,
    bounds: Sequence[int] | None = None,
) -> Cut | None:
    """Return the cut after the token with the largest log mu - log pi, the first of equals.

    Args:
        sampler_logprobs: [T] log mu of the response's tokens when it was sampled, nats.
        policy_logprobs: [T] log pi of the same tokens under the policy now; -inf is allowed.
        max_frac: (0, 1], only the first part of the response is searched.
        bounds: of the stretches that were sampled; the other tokens fell from nothing.

    Returns:
        A cut of kind "drop" that gives the token; None where no token of that part fell by
        `MIN_DROP`.

    Raises:
        ValueError: lengths differ, a log-prob is NaN, or `max_frac` is out of range.
    """
    if len(sampler_logprobs) != len(policy_logprobs):
        raise ValueError(
            f"expected one log-prob per token from both, got {len(sampler_logprobs)} of the "
            f"sampler and {len(policy_logprobs)} of the policy"
        )
    pairs = zip(sampler_logprobs, policy_logprobs, strict=True)
    drops = [mu - pi for mu, pi in pairs][: _limit(len(sampler_logprobs), max_frac, bounds)]
    if any(math.isnan(drop) for drop in drops):
        raise ValueError("expected log-probs that are numbers, got NaN; leave the response out")
    mask = sampled_mask(bounds, len(drops))
    if mask is not None:
        drops = [drop if is_kept else 0.0 for drop, is_kept in zip(drops, mask, strict=True)]
    largest = max(drops, default=0.0)
    return Cut(drops.index(largest) + 1, "drop") if largest >= MIN_DROP else None


def prefix_sha256(ids: Sequence[int]) -> str:
    """Return the sha256 (hex) of token ids written as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()


def _is_inside(bounds: Sequence[int] | None, num_tokens: int) -> bool:
    """Return whether the first tokens end within a stretch that was sampled."""
    if bounds is None:
        return True
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return any(start < num_tokens < end for start, end in pairs)


def _is_within(
    bounds: Sequence[int] | None, text_of: Callable[[int], str], boundary: "_Boundary"
) -> bool:
    """Return whether a boundary lies in the text of a stretch that was sampled."""
    if bounds is None:
        return True
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return any(
        len(text_of(start)) < boundary.first and boundary.last <= len(text_of(end))
        for start, end in pairs
    )


def _limit(num_tokens: int, max_frac: float, bounds: Sequence[int] | None) -> int:
    """Return how many tokens may be given; in an episode the given ones count for nothing."""
    if not 0 < max_frac <= 1:
        raise ValueError(f"expected `max_frac` in (0, 1], got {max_frac}")
    mask = sampled_mask(bounds, num_tokens)
    if mask is None:
        return int(max_frac * num_tokens)
    num_sampled = list(accumulate(mask))
    return bisect_right(num_sampled, int(max_frac * num_sampled[-1])) if mask else 0


def _spread(items: Sequence[_T], num: int) -> list[_T]:
    """Return at most `num` items: those in the middle of as many equal shares."""
    if len(items) <= num:
        return list(items)
    return [items[(2 * i + 1) * len(items) // (2 * num)] for i in range(num)]


def _boundaries(text: str) -> list[_Boundary]:
    """Return the ends of lines, lines of code and sentences, in order."""
    fences = [fence.start() for fence in _FENCE.finditer(text)]
    found = [_Boundary(m.end(1), m.end(), "sentence") for m in _SENTENCE.finditer(text)]
    for m in _LINE.finditer(text):
        is_code = bisect_left(fences, m.end(1)) % 2 == 1
        found.append(_Boundary(m.end(1), m.end(), "code" if is_code else "line"))
    return sorted(found)


def _words(text: str) -> list[_Boundary]:
    return [_Boundary(m.end(1), m.end(), "word") for m in _WORD.finditer(text)]


def _locate(
    boundaries: Iterable[_Boundary],
    text_of: Callable[[int], str],
    text: str,
    limit: int,
    num: int,
) -> list[Cut]:
    """Find the tokens that end at `num` of the boundaries, of those within `limit` tokens.

    A decoder may write a broken character at the end of a prefix. Without it, a longer prefix has
    a longer text, so a boundary is searched by halves; and what was found is checked.
    """

    def num_characters(num_tokens: int) -> int:
        return len(text_of(num_tokens).rstrip(_BROKEN))

    start = len(text) - len(text.lstrip())
    end = num_characters(limit)
    within = [boundary for boundary in boundaries if start < boundary.first <= end]
    cuts = []
    for first, last, kind in _spread(within, num):
        num_tokens = 1 + bisect_left(range(1, limit), first, key=num_characters)
        given = text_of(num_tokens)
        if first <= len(given) <= last and text.startswith(given):
            cuts.append(Cut(num_tokens, kind))
    return cuts


def _half(text_of: Callable[[int], str], text: str, num_tokens: int, limit: int) -> list[Cut]:
    """Cut at the end of the character that ends nearest to half of what is not blank at first."""
    blank = bisect_left(range(1, num_tokens), True, key=lambda t: bool(text_of(t).strip()))
    half = blank + (num_tokens - blank) // 2
    near = range(max(1, half - _MAX_CHARACTER_TOKENS), min(limit, half + _MAX_CHARACTER_TOKENS) + 1)
    whole = [t for t in near if text_of(t).strip() and text.startswith(text_of(t))]
    return [Cut(t, "half") for t in sorted(whole, key=lambda t: abs(t - half))[:1]]
