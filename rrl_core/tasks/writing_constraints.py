"""Whether a short text keeps what it was asked to keep, and whether it is a text at all.

A constraint is a kind and a value, kept as JSON in `Prompt.meta["constraints"]`:

    words      [low, high]   number of words, both included
    sentences  n             exactly so many, each of three words or more
    lines      n             exactly so many lines with text, each of two words or more
    list       n             exactly the lines "1. ..." to "n. ...", each of two words or more
    title      1             the first line is `# ` and two to eight words; no other begins so
    include    [word, ...]   each stands in it as a whole word, at most `MAX_REPEATS` times
    avoid      [word, ...]   none stands in it
    starts     word          the first word
    ends       word          the last word

Title and numbers of a list do not count as words or sentences. Capitals do not matter.

A completion earns the weighted share of its constraints that are met, and nothing at all unless it
is prose: otherwise letters at random, one word again and again, or the request itself would earn
what their length happens to meet. The test is coarse and for English: letters, vowels, function
words, few repetitions, little that stands in the request. It refuses what is cheap to make, it does
not tell good from bad: that takes a judge. Time is linear in the text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rrl_core.tasks.protocol import Prompt, Score

MAX_CHARACTERS = 20_000  # no text that is asked for is so long
MAX_REPEATS = 3  # of a word that has to stand in it
MIN_WORDS = 5
MIN_LETTERS = 0.75  # of the characters that are no space
MIN_WITH_VOWEL = 0.9  # of the words
MAX_LETTERS_A_WORD, MAX_MEAN_LETTERS = 25, 8.5
MIN_FUNCTION, MAX_FUNCTION = 0.15, 0.75  # share of function words
MIN_DISTINCT = 0.45  # share of different words
MIN_DISTINCT_TRIPLES = 0.85  # share of different runs of three words
MAX_COPIED = 0.25  # share of runs of three words that stand in the request

_FUNCTION_WORDS = """
    a about after again all also always an and any are around as at away be because been before
    being both but by can could did do does down each even every few for from had has have he her
    here hers him his how i if in into is it its just like many may me might more most much my near
    never no nobody not nothing now of off on once one only or other our out over past she should
    since so some soon still such than that the their them then there these they this those through
    to today too under until up upon us was we were what when where which while who whose why will
    with without would yet you your"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'\u2019\u201d)]*+(?=\s|$)")
_ITEM = re.compile(r"(\d{1,3})\. +(\S.*)")


@dataclass(frozen=True)
class Draft:
    """A completion taken apart: its lines with text, and its body without title and numbers."""

    lines: tuple[str, ...]
    title: str | None
    items: tuple[tuple[str, str], ...]  # number and text of each line that is one of a list
    body: str
    words: tuple[str, ...]  # of the body, in small letters

    @property
    def body_lines(self) -> tuple[str, ...]:
        """The lines with text behind the title."""
        return self.lines if self.title is None else self.lines[1:]


class Constraints:
    """The weighted share of a prompt's constraints that a completion meets, 0 where it is no prose.

    Components tell 1.0 or 0.0 by kind, and under `prose`. The feedback names what is not met; what
    is asked for stands in the prompt anyway. A prompt without constraints is `unscorable`.
    """

    name = "constraints"

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        text = json.dumps(self._weights, sort_keys=True)
        self.version = "1" if not weights else "1-" + hashlib.sha256(text.encode()).hexdigest()[:8]

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` by its form."""
        constraints: dict[str, Any] = json.loads(prompt.meta.get("constraints", "{}"))
        weights = {kind: self._weights.get(kind, 1.0) for kind in constraints}
        if not sum(weights.values()):
            return Score(None, "unscorable", feedback="the prompt has no constraint that weighs")
        if len(completion) > MAX_CHARACTERS:
            met = dict.fromkeys(constraints, False)
            why = f"longer than {MAX_CHARACTERS} characters"
        else:
            draft = take_apart(completion)
            met = {kind: is_met(kind, value, draft) for kind, value in constraints.items()}
            why = why_no_prose(draft, prompt.messages[-1]["content"])
        components = {kind: float(is_kept) for kind, is_kept in met.items()}
        failed = [kind for kind, is_kept in met.items() if not is_kept]
        faults = ([f"no readable text: {why}"] if why else []) + [f"not met: {k}" for k in failed]
        earned = sum(weights[kind] for kind, is_kept in met.items() if is_kept)
        value = 0.0 if why else earned / sum(weights.values())
        return Score(value, "ok", components | {"prose": float(not why)}, "; ".join(faults))


def take_apart(completion: str) -> Draft:
    """Return the parts of a completion that constraints speak of."""
    lines = tuple(line.strip() for line in completion.split("\n") if line.strip())
    title = lines[0][2:].strip() if lines and lines[0].startswith("# ") else None
    rest = lines if title is None else lines[1:]
    found = [_ITEM.fullmatch(line) for line in rest]
    items = tuple((match[1], match[2]) for match in found if match)
    body = "\n".join(match[2] if match else line for match, line in zip(found, rest, strict=True))
    return Draft(lines, title, items, body, tuple(words_of(body)))


def words_of(text: str) -> list[str]:
    """Return the words of a text in small letters; figures are none."""
    return [word.lower() for word in _WORD.findall(text)]


def is_met(kind: str, value: Any, draft: Draft) -> bool:
    """Return whether a draft meets a constraint.

    Raises:
        KeyError: there is no such kind.
    """
    return _CHECKS[kind](draft, value)


def why_no_prose(draft: Draft, request: str) -> str:
    """Return what shows that a draft is no text of somebody's own; empty where nothing does."""
    words = draft.words
    if len(words) < MIN_WORDS:
        return f"fewer than {MIN_WORDS} words"
    characters = [c for c in draft.body if not c.isspace()]
    if sum(map(str.isalpha, characters)) < MIN_LETTERS * len(characters):
        return "too few letters"
    lengths = list(map(len, words))
    if max(lengths) > MAX_LETTERS_A_WORD or sum(lengths) > MAX_MEAN_LETTERS * len(words):
        return "words too long"
    if sum(not set("aeiouy").isdisjoint(word) for word in words) < MIN_WITH_VOWEL * len(words):
        return "words without a vowel"
    function = sum(word in FUNCTION_WORDS for word in words)
    if not MIN_FUNCTION * len(words) <= function <= MAX_FUNCTION * len(words):
        return "no sentences"
    triples = _triples(words)
    is_varied = len(set(words)) >= MIN_DISTINCT * len(words)
    if not is_varied or any(first == second for first, second in pairwise(words)):
        return "words are repeated"
    if len(set(triples)) < MIN_DISTINCT_TRIPLES * len(triples):
        return "sentences are repeated"
    asked = set(_triples(words_of(request)))
    if sum(triple in asked for triple in triples) > MAX_COPIED * len(triples):
        return "it repeats the request"
    return ""


def _triples(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + 3]) for start in range(len(words) - 2)]


def _has_words(text: str, number: int) -> bool:
    return len(words_of(text)) >= number


def _are_sentences(draft: Draft, number: int) -> bool:
    parts = _SENTENCE_END.split(draft.body)
    *sentences, rest = parts
    return (
        len(sentences) == number
        and not rest.strip()
        and all(_has_words(sentence, 3) for sentence in sentences)
    )


def _are_lines(draft: Draft, number: int) -> bool:
    lines = draft.body_lines
    return len(lines) == number and all(_has_words(line, 2) for line in lines)


def _is_list(draft: Draft, number: int) -> bool:
    numbers = [str(place) for place in range(1, number + 1)]
    return (
        [found for found, _ in draft.items] == numbers
        and len(draft.body_lines) == number
        and all(_has_words(text, 2) for _, text in draft.items)
    )


def _is_titled(draft: Draft, value: int) -> bool:
    del value  # there is one title or none
    others = any(line.startswith("#") for line in draft.lines[1:])
    return draft.title is not None and 2 <= len(words_of(draft.title)) <= 8 and not others


def _includes(draft: Draft, wanted: Sequence[str]) -> bool:
    return all(1 <= draft.words.count(word.lower()) <= MAX_REPEATS for word in wanted)


def _avoids(draft: Draft, unwanted: Sequence[str]) -> bool:
    return bool(draft.words) and not {word.lower() for word in unwanted} & {*draft.words}


_CHECKS: Mapping[str, Callable[[Draft, Any], bool]] = {
    "words": lambda draft, value: value[0] <= len(draft.words) <= value[1],
    "sentences": _are_sentences,
    "lines": _are_lines,
    "list": _is_list,
    "title": _is_titled,
    "include": _includes,
    "avoid": _avoids,
    "starts": lambda draft, value: draft.words[:1] == (value.lower(),),
    "ends": lambda draft, value: draft.words[-1:] == (value.lower(),),
}
KINDS = tuple(_CHECKS)
