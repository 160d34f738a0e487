"""The calculator for models: exact, and quick whatever it is asked."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.tasks.calculator import CalculatorError, calculate

MOST_S = 1.0  # of a hostile expression; it takes milliseconds


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("2 ^ 3 ^ 2", "512"),  # from the right: 2 ^ 9
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("10 - 4 - 3", "3"),
        ("1,234 \u00d7 2 \u00f7 4", "617"),
        ("7 // 2 + -7 % 4", "4"),  # 3 + 1
        ("12 x 12", "144"),
        ("1 / 8", "0.125"),
        ("-1/400", "-0.0025"),
        ("7 / 3", "7/3 (2.333333333333...)"),
        ("-1 / 3", "-1/3 (-0.333333333333...)"),
        ("1.50 + .5e1", "6.5"),
        ("98765 * 43210", "4267635650"),  # 98765 * 43210 = 98765 * 43000 + 98765 * 210
    ],
)
def test_values_are_exact(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "got nothing"),
        ("2 +", "a number at the end"),
        ("2 3", "an operator before `3`"),
        ("(2", r"expected `\)`"),
        ("2)", r"an operator before `\)`"),
        ("1 / (2 - 2)", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ^ -1", "division by zero"),
        ("2 ^ 0.5", "whole exponents"),
        ("__import__('os')", "got `__import__"),
        ("two + 2", "got `two"),
        ("1" * 401, "at most 400 characters, got 401"),
    ],
)
def test_what_has_no_value_says_what_was_expected(expression: str, message: str):
    with pytest.raises(CalculatorError, match=message):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9^9^9^9^9",
        "9**" * 130 + "9",
        "10^999 * 10^999",
        "(" * 200 + "1" + ")" * 200,
        "-" * 399 + "1",
        "1e999999999",
        "1e" + "9" * 300,
        "9" * 400,
        "*".join(["9" * 30] * 12),
        "(0.1)^1000",
        "1" + ",111" * 90,
        "2^1000",
    ],
)
def test_hostile_expressions_are_refused_at_once(expression: str):
    started = time.process_time()
    with pytest.raises(CalculatorError):
        calculate(expression)
    assert time.process_time() - started < MOST_S


@given(st.text(alphabet="0123456789+-*/%^(). ,ex", max_size=60))
def test_any_text_has_a_value_or_an_error(expression: str):
    try:
        value = calculate(expression)
    except CalculatorError:
        return
    Fraction(value.partition(" ")[0])


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_sums_products_and_quotients_are_those_of_fractions(a: int, b: int, c: int):
    value = calculate(f"({a}) * ({b}) - ({b}) / {c}")
    assert Fraction(value.partition(" ")[0]) == Fraction(a) * b - Fraction(b, c)
