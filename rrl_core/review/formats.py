"""How a review is asked for, written and read: versioned texts, and the reader of reviews.

A format is a file `texts/<name>.toml`; events hold its hash, so that every review tells what it was
asked with. A review has two short labelled lines, which a small model can write:

    Wrong: what went wrong in the attempt
    Instead: what to do in the next one

Reading is lenient (our choice): capitals, list marks and bold type around the labels do not matter,
both may stand on one line, words may come before. A part ends at an empty line or where another
review begins. Every text is read, in time linear in its length: all quantifiers are possessive.

A review is a parrot (our choice) when it brings no words of its own: 0.8 of its runs of three
words stand in the attempt, or 0.8 of those of either part stand in the request. What it quotes is
judged by words, so that neither marks nor spaces nor capitals hide a copy.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

FORMATS = Path(__file__).parent / "texts"
RUN_WORDS = 3
PARROT_SHARE = 0.8

ReviewStatus = Literal["ok", "malformed", "empty", "truncated", "parrot"]

_WORD = re.compile(r"\w++")
_EMPTY_LINE = re.compile(r"\n[^\S\n]*+\n")
_MARKS = " \t\r\n*_"


@dataclass(frozen=True)
class ReviewFormat:
    """The texts of one format, as its file holds them."""

    name: str
    sha256: str
    """Of the file's bytes."""
    labels: Mapping[str, str]
    """Of the parts `what_went_wrong` and `what_to_do`, each with its colon."""
    max_chars: Mapping[str, int]
    """Most characters of an attempt, of feedback, of a part and of a whole review."""
    texts: Mapping[str, str]
    """Texts with $placeholders by what they are for."""
    opening: str = ""
    """What a review is begun with for the model, which goes on from there."""


@dataclass(frozen=True)
class ParsedReview:
    """A review as it was read."""

    status: ReviewStatus
    what_went_wrong: str | None
    """None unless the review has both parts."""
    what_to_do: str | None
    """None unless the review has both parts."""
    text: str
    """What the second attempt is given: both parts where ok, else the raw text, cut."""


def format_names() -> list[str]:
    """Return the names of the formats there are."""
    return sorted(path.stem for path in FORMATS.glob("*.toml"))


@cache
def load_format(name: str = "v1") -> ReviewFormat:
    """Return the format `name`.

    Raises:
        ValueError: there is no such format; the message names those there are.
    """
    if name not in format_names():
        raise ValueError(f"expected a review format of {format_names()}; came {name!r}")
    content = (FORMATS / f"{name}.toml").read_bytes()
    given = tomllib.loads(content.decode())
    digest = hashlib.sha256(content).hexdigest()
    parts = (given["labels"], given["max_chars"], given["texts"], given["opening"])
    return ReviewFormat(name, digest, *parts)


def parse_review(
    fmt: ReviewFormat, text: str, finish_reason: str, attempt_text: str
) -> ParsedReview:
    """Read a review; any text can be read.

    Args:
        fmt: what it was asked with.
        text: the completion, behind the opening it was given.
        finish_reason: "length" where the completion was cut off; of no matter where both parts had
            come to their end.
        attempt_text: the attempt under review.
    """
    raw = text.strip()[: fmt.max_chars["review"]].rstrip()
    wrong, instead, is_ended = _parts(fmt, text)
    has_both = bool(wrong and instead)
    parts = (wrong, instead) if has_both else (None, None)
    if wrong == instead == "" or not _WORD.search(text.removeprefix(fmt.opening)):
        return ParsedReview("empty", None, None, raw)
    if finish_reason == "length" and not is_ended:
        return ParsedReview("truncated", *parts, raw)
    if _is_parrot(fmt, [wrong, instead] if wrong and instead else [text], attempt_text):
        return ParsedReview("parrot", *parts, raw)
    if not has_both:
        return ParsedReview("malformed", None, None, raw)
    labels = fmt.labels
    lines = f"{labels['what_went_wrong']} {wrong}\n{labels['what_to_do']} {instead}"
    return ParsedReview("ok", wrong, instead, lines)


def _parts(fmt: ReviewFormat, text: str) -> tuple[str | None, str | None, bool]:
    """Return both parts, and whether the second came to its end before the text did.

    A part is "" where no word follows its label, None where a label is missing.
    """
    first, second = _label_patterns(fmt.labels["what_went_wrong"], fmt.labels["what_to_do"])
    start = first.search(text)
    middle = start and second.search(text, start.end())
    if start is None or middle is None:
        return None, None, False
    again = first.search(text, middle.end())
    rest = text[middle.end() : again.start() if again else len(text)]
    limit = fmt.max_chars["part"]
    is_ended = again is not None or _EMPTY_LINE.search(rest.lstrip()) is not None
    return _clean(text[start.end() : middle.start()], limit), _clean(rest, limit), is_ended


@cache
def _label_patterns(first: str, second: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what finds the labels: the first at the start of a line, the second anywhere."""
    marks = r"^[ \t*_>#\-0-9.)]*+"
    words = [re.escape(label.rstrip(":")) + r"[*_ \t]*+:" for label in (first, second)]
    flags = re.IGNORECASE | re.MULTILINE
    return (
        re.compile(marks + words[0], flags),
        re.compile(rf"(?:{marks}|(?<!\w)){words[1]}", flags),
    )


def _clean(part: str, limit: int) -> str:
    """Return the first paragraph of a part on one line, without bold type around it.

    A part without words is "".
    """
    paragraph = _EMPTY_LINE.split(part.strip(_MARKS), maxsplit=1)[0]
    line = " ".join(paragraph.split())[:limit].strip(_MARKS)
    return line if _WORD.search(line) else ""


def _is_parrot(fmt: ReviewFormat, said: Sequence[str], attempt_text: str) -> bool:
    texts = fmt.texts
    asked = _words(f"{texts['verdict']} {texts['reflect']} {texts['request']}")
    if any(_copied_share([part], asked) >= PARROT_SHARE for part in said):
        return True
    return _copied_share(said, _words(attempt_text)) >= PARROT_SHARE


def _copied_share(said: Sequence[str], source: Sequence[str]) -> float:
    """Return the share of the runs of words said that stand in the source."""
    num_runs = num_copied = 0
    for words in map(_words, said):
        size = min(RUN_WORDS, len(words))
        runs = _runs(words, size)
        num_runs += len(runs)
        num_copied += len(runs & _runs(source, size))
    return num_copied / num_runs


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return set(zip(*(words[start:] for start in range(size)), strict=False))
