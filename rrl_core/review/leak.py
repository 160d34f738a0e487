r"""Leak guard: whether a review states an answer, and whether it is the reference answer, the gold.

Our choice throughout (the paper has no guard). A text states as an answer

1. what follows a ``####`` on its line, and what stands in a ``\boxed{``, closed or not;
2. what follows "answer is", "result should be", "solution:" and so on, but not "your answer is";
3. the number after the last ``=`` of a line, within 40 characters of the line's end.

The stratum of a review is

    gold    it states the gold, or the gold stands anywhere in it and not in the problem
    answer  it states another number, or marks or boxes any answer; an equation counts in the last
            line only, since a review may quote the one that is wrong
    none    neither

Numbers are compared exactly, as `rrl_core.tasks.answers` reads them. A gold that is no number is
compared by its words; one shorter than 4 characters ("A", "no") counts only where it is stated.

Reviews are flagged and never blocked; memory entries are (`holds_gold`). Time is linear in the
text: every quantifier is possessive or bounded by a small number.
"""

import re
from fractions import Fraction
from typing import Literal

from rrl_core.tasks.answers import all_numbers, read_reference

LeakStratum = Literal["none", "answer", "gold"]
MIN_TEXT_GOLD = 4
MAX_SIDE = 40
MAX_STATED = 200

_BETWEEN = r"[^\w+.\u2212-]"  # what may stand before a number, but is no part of it
_VERB = rf"{_BETWEEN}{{1,3}}(?:should|must|would|will|is|was|be|equals)\b"
_STATES = re.compile(
    rf"(?<!your )\b(?:answer|result|solution)(?:{_BETWEEN}{{0,3}}[:=]|(?:{_VERB}){{1,3}})"
    rf"{_BETWEEN}{{0,4}}",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+\u2212-]?+(?:[0-9]|\.[0-9])[0-9.,]*+(?:[eE/][+-]?+[0-9]++)?+")
_WORD = re.compile(r"\w++")


def leak_stratum(review_text: str, gold: str | None, problem_text: str = "") -> LeakStratum:
    """Return what a review gives away.

    Args:
        review_text: the review, of any length.
        gold: the reference answer; None where there is none.
        problem_text: what the problem itself tells.
    """
    if holds_gold(review_text, gold) or _stands_apart(review_text, gold or "", problem_text):
        return "gold"
    last_line = review_text.rstrip().rpartition("\n")[2]
    is_marked = any(map(_WORD.search, _marked(review_text)))
    numbers = {*map(_first_number, _phrased(review_text)), *_equations(last_line)} - {None}
    if is_marked or numbers:
        return "answer"
    return "none"


def holds_gold(entry_text: str, gold: str | None) -> bool:
    """Return whether a text states `gold` as an answer; False where gold is None."""
    number = None if gold is None else read_reference(gold)
    marked, phrased = _marked(entry_text), _phrased(entry_text)
    if number is not None:
        stated = {*map(read_reference, marked), *_equations(entry_text)}
        return number in stated or number in map(_first_number, phrased)
    words = _words(gold or "")
    return bool(words) and any(_words(text)[: len(words)] == words for text in marked | phrased)


def _stands_apart(review_text: str, gold: str, problem_text: str) -> bool:
    """Return whether the gold stands in the review and not in the problem."""
    number = read_reference(gold)
    if number is not None:
        return number in all_numbers(review_text) - all_numbers(problem_text)
    review, words, problem = (
        f" {' '.join(_words(text))} " for text in (review_text, gold, problem_text)
    )
    return len(gold.strip()) >= MIN_TEXT_GOLD and words in review and words not in problem


def _marked(text: str) -> set[str]:
    """Return what follows each marker and stands in each box, cut."""
    after = [part.lstrip()[:MAX_STATED].partition("\n")[0] for part in text.split("####")[1:]]
    inside = [part[:MAX_STATED] for part in text.split("\\boxed{")[1:]]
    return {*after, *map(_box_content, inside)}


def _box_content(text: str) -> str:
    """Return `text` up to the brace that closes the box it begins in."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[:place]
    return text


def _phrased(text: str) -> set[str]:
    """Return what follows each phrase that states an answer, cut."""
    return {text[match.end() : match.end() + MAX_STATED] for match in _STATES.finditer(text)}


def _equations(text: str) -> set[Fraction]:
    """Return the numbers that end a line after its last `=`."""
    sides = {line.rpartition("=")[2] for line in text.split("\n") if "=" in line}
    numbers = {read_reference(side) for side in sides if len(side) <= MAX_SIDE}
    return {number for number in numbers if number is not None}


def _first_number(text: str) -> Fraction | None:
    """Return the number that `text` begins with."""
    match = _NUMBER.match(text)
    return read_reference(match[0]) if match else None


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
