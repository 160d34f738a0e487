"""A calculator for models: exact arithmetic on text, within limits, and nothing else.

    sum      = product (("+" | "-") product)*
    product  = signed (("*" | "/" | "//" | "%") signed)*
    signed   = ("+" | "-")* power
    power    = atom ("^" | "**") signed | atom
    atom     = number | "(" sum ")"

Numbers are fractions, so nothing is rounded on the way. A comma separates thousands only where
groups of three digits follow it; x, the multiplication sign and the division sign are understood.
`//` and `%` round down. What would be larger than `MAX_DIGITS` digits is refused before it is
computed, so an expression of `MAX_CHARS` characters takes milliseconds, whatever it says.
"""

import re
from fractions import Fraction

MAX_CHARS = 400
MAX_DEPTH = 40  # of parentheses, signs and towers of powers
MAX_DIGITS = 200  # of a numerator or denominator
MAX_EXPONENT = 1000
DECIMALS = 12  # of what has no end

_TOKEN = re.compile(
    r"\s*+(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])(?:\.[0-9]++)?+"
    r"|(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+)"
    r"|(?P<sign>\*\*|//|[-+*/%^()]))"
)
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})  # noqa: RUF001


class CalculatorError(ValueError):
    """The expression has no value here; the message is for whoever wrote it."""


def calculate(expression: str) -> str:
    """Return the value of an expression as text.

    Returns:
        A whole number or an exact decimal; of a fraction without end the fraction and, in brackets,
        its beginning: `7/3 (2.333333333333...)`.

    Raises:
        CalculatorError: it is no expression, is too long, has no value, or one too large.
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"expected at most {MAX_CHARS} characters, got {len(expression)}")
    return _written(_Reader(expression).whole())


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, expression: str) -> None:
        self._tokens = list(_tokens(expression))
        self._place = 0
        self._depth = 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._place < len(self._tokens):
            raise CalculatorError(f"expected an operator before `{self._tokens[self._place][1]}`")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while (sign := self._sign()) in ("+", "-"):
            self._place += 1
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while (sign := self._sign()) in ("*", "/", "//", "%"):
            self._place += 1
            other = self._signed()
            if sign == "*":
                value = _bounded(value * other)
            elif not other:
                raise CalculatorError("division by zero")
            elif sign == "/":
                value = _bounded(value / other)
            else:
                value = _bounded(Fraction(value // other) if sign == "//" else value % other)
        return value

    def _signed(self) -> Fraction:
        self._enter()
        sign = self._sign()
        if sign in ("+", "-"):
            self._place += 1
            value = self._signed()
            value = -value if sign == "-" else value
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if self._sign() not in ("^", "**"):
            return base
        self._place += 1
        return _power(base, self._signed())

    def _atom(self) -> Fraction:
        if self._place == len(self._tokens):
            raise CalculatorError("expected a number at the end")
        kind, text = self._tokens[self._place]
        self._place += 1
        if kind == "number":
            return _number(text)
        if text != "(":
            raise CalculatorError(f"expected a number, got `{text}`")
        self._enter()
        value = self._sum()
        if self._sign() != ")":
            raise CalculatorError("expected `)`")
        self._place += 1
        self._depth -= 1
        return value

    def _sign(self) -> str | None:
        """Return the operator or bracket that comes next; None: a number, or nothing."""
        if self._place == len(self._tokens):
            return None
        kind, text = self._tokens[self._place]
        return text if kind == "sign" else None

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculatorError(f"expected at most {MAX_DEPTH} levels of brackets and signs")


def _tokens(expression: str) -> list[tuple[str, str]]:
    text = expression.translate(_SPELLINGS).rstrip()
    text = re.sub(r"(?<=[0-9)])\s*+[xX]\s*+(?=[0-9(+-])", "*", text)
    found, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise CalculatorError(
                f"expected numbers, + - * / // % ^ and brackets, got `{text[place:].strip()[:20]}`"
            )
        kind = str(match.lastgroup)
        found.append((kind, match[kind]))
        place = match.end()
    if not found:
        raise CalculatorError("expected an expression, got nothing")
    return found


def _number(text: str) -> Fraction:
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_DIGITS:
        raise CalculatorError(f"expected numbers of at most {MAX_DIGITS} digits, got `{text[:20]}`")
    return _bounded(Fraction(digits) * Fraction(10) ** int(exponent or 0))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise CalculatorError(f"expected whole exponents of at most {MAX_EXPONENT}")
    if exponent < 0 and not base:
        raise CalculatorError("division by zero")
    num_bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if num_bits * abs(int(exponent)) > 4 * MAX_DIGITS:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")
    return value


def _written(value: Fraction) -> str:
    rest, num_decimals = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        num_decimals = max(num_decimals, power)
    sign = "-" if value < 0 else ""
    if rest != 1:
        beginning = _decimal(abs(value.numerator) * 10**DECIMALS // value.denominator, DECIMALS)
        return f"{value} ({sign}{beginning}...)"
    return sign + _decimal(
        abs(value.numerator) * 10**num_decimals // value.denominator, num_decimals
    )


def _decimal(scaled: int, num_decimals: int) -> str:
    digits = str(scaled).rjust(num_decimals + 1, "0")
    return f"{digits[:-num_decimals]}.{digits[-num_decimals:]}" if num_decimals else digits
