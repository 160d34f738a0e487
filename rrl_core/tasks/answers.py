r"""Reads the answer out of a completion, as an exact number.

The text that holds the answer, by the first rule that applies:

1. what follows the last ``####``, up to the end of the line (a marker that ends its line is
   followed by the next line with text);
2. what stands in the last balanced ``\boxed{...}``;
3. the last number of the text. What stands in a box cut off before its ``}`` does not count.

Under 1 and 2 that text must hold one number, with any words, units, ``$`` or ``%`` around it; the
right side counts of an equation. If it holds none, or several different ones, there is no answer:
the later rules are not tried.

A comma separates thousands only where groups of three digits follow it. U+2212 is a minus. ``20%``
is 20. ``3/4`` and ``\frac{3}{4}`` are 0.75. Powers and products (``2^10``, ``2x3``), dates and
version numbers are unreadable: no answer, rather than the number they begin with. So are numbers of
more than ``MAX_DIGITS`` digits or powers of ten. Infinity and NaN are words, not numbers.

Time is linear in the text: every quantifier in the patterns is possessive, so nothing is retried.
"""

import re
from fractions import Fraction

MAX_DIGITS = 1000

_UNSIGNED = r"[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+"
_TOKEN = re.compile(
    rf"""
      [A-Za-z]++(?:[0-9_][A-Za-z0-9_.]*+)?+      # a word, with the digits in it: m2, H2O, v1.5
    | \^\{{?+[+-]?+[0-9]++                        # the exponent of a unit: m^2, s^{{-1}}
    | (?P<sign>(?<![A-Za-z0-9)\]}}%])[+-]|)       # a minus after a number or a word is no sign
      (?:\\?+[$€£¥])?+
      (?P<number>
        (?P<run>[0-9]++(?:,[0-9]++)*+)(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+
        (?:(?:[/._xX]|\^\{{?+|\*\*)[+-]?+{_UNSIGNED})*+  # 3/4; also 2^10, 2x3, 3/4/2024, 1.2.3
      | (?<![A-Za-z0-9.)])\.{_UNSIGNED}
      )
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(r"(?<![0-9])\\[dt]?+frac\{([0-9.+-]++)\}\{([0-9.+-]++)\}")
_BRACE = re.compile(r"\\boxed\{|\\[{}]|[{}]")
_DECIMAL = re.compile(r"([+-]?+(?:[0-9]++(?:\.[0-9]++)?+|\.[0-9]++))(?:[eE]([+-]?+[0-9]++))?+")
_LAST_LINE = re.compile(
    r"####[ ][+-]?+[0-9]++(?:,[0-9]++)*+(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+(?:/[0-9]++)?+"
)


def find_answer(completion: str) -> Fraction | None:
    """Return the number that `completion` gives as its answer; None if it gives none."""
    text = completion.replace("\u2212", "-")
    marked, cut = _marked_answer(text)
    if marked is not None:
        return _only_number(marked)
    numbers = _find_numbers(text[:cut])
    return _parse_number(numbers[-1]) if numbers else None


def read_reference(answer: str) -> Fraction | None:
    """Return the number that a reference answer states; None if it is not exactly one number.

    A reference may be a whole solution with a marked answer. Unlike in a completion, the last of
    several unmarked numbers is not taken for the answer.
    """
    text = answer.replace("\u2212", "-")
    marked, _ = _marked_answer(text)
    return _only_number(text if marked is None else marked)


def all_numbers(text: str) -> set[Fraction]:
    """Return every number that stands anywhere in `text`."""
    numbers = set(_find_numbers(text.replace("\u2212", "-")))
    return {number for number in map(_parse_number, numbers) if number is not None}


def ends_with_answer_line(completion: str) -> bool:
    """Return whether the last line with text is exactly `#### <number>`."""
    line = completion.replace("\u2212", "-").rstrip().rpartition("\n")[2]
    return _LAST_LINE.fullmatch(line) is not None


def _marked_answer(text: str) -> tuple[str | None, int]:
    """Return the text that rule 1 or 2 finds, and where a box never closed begins to hold."""
    _, marker, after = text.rpartition("####")
    if marker:
        return after.lstrip().partition("\n")[0], len(text)
    content, content_start = None, 0
    open_starts: list[int] = []  # of each open brace: where its box's content begins, 0 if no box
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_starts.append(0)
        elif brace[0] == "\\boxed{":
            open_starts.append(brace.end())
        elif brace[0] == "}" and open_starts:
            start = open_starts.pop()
            if start > content_start:
                content, content_start = text[start : brace.start()], start
    return content, next(filter(None, open_starts), len(text))


def _only_number(text: str) -> Fraction | None:
    """Return the one number that `text` holds, the right side of an equation; else None."""
    numbers = set(_find_numbers(text.rpartition("=")[2]))
    return _parse_number(numbers.pop()) if len(numbers) == 1 else None


def _find_numbers(text: str) -> list[str]:
    """Return the numbers of `text` in order, without currency signs and thousands separators."""
    numbers = []
    for token in _TOKEN.finditer(_FRACTION.sub(r"\1/\2", text)):
        if token["number"] is None:
            continue
        first, *others = (token["run"] or "").split(",")
        if others and not (len(first) <= 3 and all(len(group) == 3 for group in others)):
            numbers.append(token["sign"] + first)  # "1,2,3" lists numbers
            numbers.extend(others[:-1])
            numbers.append(others[-1] + token["number"][len(token["run"]) :])
        else:
            numbers.append(token["sign"] + token["number"].replace(",", ""))
    return numbers


def _parse_number(text: str) -> Fraction | None:
    """Return the exact value of a decimal or of a ratio of two; None if `text` is neither."""
    top, slash, bottom = text.partition("/")
    numerator = _parse_decimal(top)
    denominator = _parse_decimal(bottom) if slash else Fraction(1)
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _parse_decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    mantissa, exponent = match[1], match[2] or "0"
    if max(len(mantissa), len(exponent)) > MAX_DIGITS or abs(int(exponent)) > MAX_DIGITS:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent)
