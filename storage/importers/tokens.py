"""Whether token ids and log-probs of a file are what the engine saw, decided by their content.

    tokens: ids of prompt and response that are no stub, and a finite log-prob <= 0 for each
            sampled one
    text:   anything else; ids whose log-probs are missing or unfit keep the ids

A stub is known by its text: no tokenizer has `MAX_CHARACTERS` characters to a token on the average
of a text. Log-probs that are all exactly zero say that nobody computed them (`MIN_ZEROS`).
"""

import math
from collections.abc import Sequence
from typing import Any

from storage.importers.samples import Turn

MAX_CHARACTERS = 16
MIN_ZEROS = 8
_LARGEST = 2**31 - 1
_ROUNDING = 1e-3  # of a log-prob that should be zero


def turn(
    prompt_ids: Any, completion_ids: Any, logprobs: Any, text: str, texts: tuple[str, str]
) -> Turn | None:
    """Return a turn; None when its ids are no token ids or a stub.

    Args:
        prompt_ids: what should be the ids given.
        completion_ids: what should be the ids sampled.
        logprobs: what should be their log-probs.
        text: the response up to the end of this turn.
        texts: what prompt and completion say at least, empty where it is not known.
    """
    if not (are_ids(prompt_ids) and are_ids(completion_ids)):
        return None
    if any(map(_is_stub, texts, (prompt_ids, completion_ids))):
        return None
    reason = why_unfit(logprobs, len(completion_ids))
    kept = None if reason else [min(0.0, float(value)) for value in logprobs]
    return Turn(prompt_ids, completion_ids, kept, text, reason)


def are_ids(ids: Any) -> bool:
    """Tell whether `ids` is a list of token ids, one at least."""
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        return False
    return bool(min(ids) >= 0 and max(ids) <= _LARGEST)


def why_unfit(logprobs: Any, num_ids: int) -> str | None:
    """Return why log-probs cannot be those of `num_ids` sampled tokens; None when they may be."""
    if not isinstance(logprobs, list) or not logprobs:
        return "the file has none"
    if len(logprobs) != num_ids:
        return f"the file has {len(logprobs)} for {num_ids} token ids"
    if not set(map(type, logprobs)) <= {int, float} or not all(map(math.isfinite, logprobs)):
        return "the file has some that are no finite numbers"
    if max(logprobs) > _ROUNDING:
        return "the file has some above zero"
    if num_ids >= MIN_ZEROS and not any(logprobs):
        return "the file has nothing but zeros"
    return None


def extends(turn: Turn, before: Turn) -> bool:
    """Tell whether a turn was given all that an earlier one was given and sampled."""
    given = [*before.prompt_ids, *before.completion_ids]
    return turn.prompt_ids[: len(given)] == given


def _is_stub(text: str, ids: Sequence[int]) -> bool:
    return len(text) > MAX_CHARACTERS * len(ids)
