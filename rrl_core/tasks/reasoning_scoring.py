"""Draws and scores problems of `reasoning-gym`: runs in a killable child only.

Some of its scorers run the answer as a Python expression. Here they get literals where they `eval`,
and formulas of numbers, single letters and known functions where they let sympy parse. Any other
answer is refused before it is run (`Refused`), and earns nothing.
"""

import ast
import contextlib
import copy
import functools
import hashlib
import importlib
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import reasoning_gym
import sympy
from reasoning_gym.factory import DATASETS
from sympy.parsing import sympy_parser

EVALUATING = ("algorithmic.string_insertion", "algorithmic.spiral_matrix",
              "algorithmic.binary_matrix", "games.n_queens")  # fmt: skip
PARSING = ("games.puzzle24", "games.countdown")  # the others ask `sympy.parse_expr`
FUNCTIONS = ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan",
             "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs", "pi")  # fmt: skip
NONSENSE = "?"
_FORMULA = re.compile(
    rf"""(?:
      \s | [-+*/^(),]
    | [0-9]++(?:\.[0-9]*+)?+ | \.[0-9]++
    | (?:{"|".join(FUNCTIONS)}|[A-Za-z])(?![A-Za-z0-9_])
    )*+""",
    re.VERBOSE,
)


class Refused(BaseException):
    """The answer is no literal or formula; no `except Exception` of a scorer may hide it."""


def answer(question: list[Any]) -> Any:
    """Return what `kinds`, `draw` or `score` (the first item) returns for the other items."""
    functions: dict[str, Callable[..., Any]] = {"kinds": kinds, "draw": draw, "score": score}
    return functions[question[0]](*question[1:])


def kinds() -> list[str]:
    """Return the names of all generators."""
    return sorted(DATASETS)


def draw(kind: str, parameters: dict[str, Any], first: int, number: int) -> list[Any] | str:
    """Return `number` problems from the `first` draw on; None for a draw that raises.

    Returns:
        Of each the question, the answer, the difficulty, and what the scorer gives for nonsense; or
        why the generator refuses its parameters.
    """
    try:
        _generator(kind, json.dumps(parameters))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return list(_draws(kind, json.dumps(parameters), range(first, first + number)))


def score(
    kind: str, parameters: dict[str, Any], number: int, asked_sha256: str, answer: str
) -> float | None:
    """Return what the generator's scorer gives an answer to the draw `number`.

    Returns:
        The scorer's number; 0.0 for an answer that must not be run; None where the draw is another
        problem than was asked.
    """
    generator, entry = _entry(kind, json.dumps(parameters), number)
    if hashlib.sha256(entry["question"].encode()).hexdigest() != asked_sha256:
        return None
    try:
        return float(generator.score_answer(answer, copy.deepcopy(entry)))
    except Refused:
        return 0.0


def _draws(kind: str, parameters: str, numbers: range) -> Iterator[list[Any] | None]:
    for number in numbers:
        try:
            generator, entry = _entry(kind, parameters, number)
        except Exception:
            yield None
            continue
        nonsense = 0.0
        with contextlib.suppress(Exception, Refused):
            nonsense = float(generator.score_answer(NONSENSE, copy.deepcopy(entry)))
        yield [entry["question"], entry["answer"], entry["metadata"].get("difficulty"), nonsense]


@functools.lru_cache(maxsize=512)
def _entry(kind: str, parameters: str, number: int) -> tuple[Any, dict[str, Any]]:
    """Return the generator and a problem of it, the same in every process."""
    generator = _generator(kind, parameters)
    random.seed(number)  # a few generators draw from the common sources too
    np.random.seed(number)  # noqa: NPY002  the source they use
    return generator, generator[number]


@functools.lru_cache(maxsize=16)
def _generator(kind: str, parameters: str) -> Any:
    return reasoning_gym.create_dataset(kind, **json.loads(parameters))


def _read_literal(text: str) -> Any:
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    raise Refused


def _guarded(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_formula(text: Any, *arguments: Any, **named: Any) -> Any:
        if not (isinstance(text, str) and _FORMULA.fullmatch(text)):
            raise Refused
        return parse(text, *arguments, **named)

    return parse_formula


def _guard_scorers() -> None:
    for name in EVALUATING:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = _read_literal
    guarded = _guarded(sympy_parser.parse_expr)
    vars(sympy)["parse_expr"] = guarded
    for name in PARSING:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["parse_expr"] = guarded


_guard_scorers()
