"""Sums and products of small numbers, generated offline by `reasoning-gym`.

Problems are distinct by their expression. The first `num_eval` of the stream are the eval split and
the next `num_train` the train split, so a longer training leaves the evaluation as it is. A problem
is used only if its stated answer is the exact value of its expression: the generator rounds some
divisions down.
"""

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from rrl_core.seeds import derive_seed
from rrl_core.tasks.prompts import PromptTask, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Split, TaskError
from rrl_core.tasks.scorers import make_scorers

BARREN_DRAWS = 5000  # so many draws in a row without a new problem: there are no more
MAX_DIVIDED_DIGITS = 12  # of a dividend, whose divisors the generator tries up to its root


class ArithmeticSettings(TaskSettings):
    """Parameters of the task `arithmetic`."""

    kind: Literal["chain_sum", "basic_arithmetic"] = Field(
        "chain_sum", description="The generator: `chain_sum` adds and subtracts."
    )
    min_terms: int = Field(2, ge=2, le=20, description="Fewest numbers in a problem.")
    max_terms: int = Field(3, ge=2, le=20, description="Most numbers in a problem.")
    min_digits: int = Field(1, ge=1, le=12, description="Fewest digits of a problem's numbers.")
    max_digits: int = Field(1, ge=1, le=12, description="Most digits of a problem's numbers.")
    operators: tuple[Literal["+", "-", "*", "/"], ...] = Field(
        ("+", "-"), min_length=1, description="Operators of `basic_arithmetic`."
    )
    has_parentheses: bool = Field(
        False, description="Whether `basic_arithmetic` uses parentheses and negative numbers."
    )
    max_number: int | None = Field(
        None, ge=1, description="Largest size of a number or answer; None means any."
    )
    num_train: int = Field(1000, ge=1, description="Number of train problems.")
    num_eval: int = Field(200, ge=0, description="Number of eval problems.")
    seed: int = Field(0, description="Other seeds give other problems.")


def build_arithmetic(settings: ArithmeticSettings) -> PromptTask:
    """Generate the problems; equal settings give equal prompts.

    Raises:
        TaskError: settings contradict each other, or allow too few distinct problems.
    """
    scorers = make_scorers(settings.reward, settings.reward_time_limit_s)
    problems = expressions(settings, "arithmetic")

    def prompt(split: Split, expression: str, answer: str, difficulty: str) -> Prompt:
        return make_prompt(
            "arithmetic",
            split,
            ask(f"What is {expression}?"),
            answer,
            instruction=settings.instruction,
            difficulty=difficulty,
        )

    return PromptTask(
        "arithmetic",
        scorers,
        train_prompts=[prompt("train", *problem) for problem in problems[settings.num_eval :]],
        eval_prompts=[prompt("eval", *problem) for problem in problems[: settings.num_eval]],
    )


def expressions(settings: ArithmeticSettings, task: str) -> list[tuple[str, str, str]]:
    """Return expression, answer and difficulty of each problem: those of the eval split first.

    Raises:
        TaskError: settings contradict each other, or allow too few distinct problems; `task` is
            whose settings they are.
    """
    _check(settings, task)
    num_asked = settings.num_eval + settings.num_train
    problems = list(islice(_distinct_problems(settings), num_asked))
    if len(problems) < num_asked:
        raise TaskError(
            f"{task}: expected {num_asked} distinct problems (num_eval {settings.num_eval} + "
            f"num_train {settings.num_train}); these settings gave {len(problems)}; ask for fewer, "
            f"or widen terms, digits, operators or max_number"
        )
    return [
        (facts["expression"], problem["answer"],
         f"{facts['num_terms']} terms, {facts['num_digits']}-digit")
        for problem in problems
        for facts in [problem["metadata"]]
    ]  # fmt: skip


def _check(settings: ArithmeticSettings, task: str) -> None:
    for low, high in (("min_terms", "max_terms"), ("min_digits", "max_digits")):
        if getattr(settings, low) > getattr(settings, high):
            raise TaskError(
                f"{task}: expected {low} <= {high}; came {low} = {getattr(settings, low)} and "
                f"{high} = {getattr(settings, high)}; set both"
            )
    is_plain = set(settings.operators) == {"+", "-"} and not settings.has_parentheses
    if settings.kind == "chain_sum" and not is_plain:
        raise TaskError(
            f"{task}: `chain_sum` always has operators + and - and no parentheses; came "
            f"operators = {list(settings.operators)} and has_parentheses = "
            f"{settings.has_parentheses}; use kind = 'basic_arithmetic'"
        )
    if "/" in settings.operators and not settings.has_parentheses:
        raise TaskError(
            f"{task}: operator / came with has_parentheses = False, for which the generator "
            "states wrong answers; set has_parentheses = True or leave / out"
        )
    if "/" in settings.operators and settings.max_terms * settings.max_digits > MAX_DIVIDED_DIGITS:
        raise TaskError(
            f"{task}: with operator / expected max_terms * max_digits <= {MAX_DIVIDED_DIGITS}, "
            f"beyond which the generator's search for divisors may take for ever; came "
            f"{settings.max_terms} * {settings.max_digits}; lower one or leave / out"
        )


def _distinct_problems(settings: ArithmeticSettings) -> Iterator[Mapping[str, Any]]:
    """Yield problems with different expressions and exact answers, in the order of the stream."""
    generator = _make_generator(settings)
    seen = set()
    draw, last_new = 0, 0
    while draw - last_new < BARREN_DRAWS:
        problem = _draw_problem(generator, draw, settings.max_number)
        if problem is not None and problem["metadata"]["expression"] not in seen:
            seen.add(problem["metadata"]["expression"])
            last_new = draw
            yield problem
        draw += 1


def _make_generator(settings: ArithmeticSettings) -> Any:
    with warnings.catch_warnings():
        # A library that reasoning-gym loads compares with `is`; told once, when it is compiled.
        warnings.filterwarnings("ignore", '"is" with a literal', SyntaxWarning)
        import reasoning_gym
    sizes = settings.model_dump(include={"min_terms", "max_terms", "min_digits", "max_digits"})
    if settings.kind == "basic_arithmetic":
        sizes["operators"] = list(settings.operators)
        sizes["allow_parentheses"] = settings.has_parentheses
    # The generator seeds its n-th draw with seed + n: derived seeds keep two streams apart.
    seed = derive_seed(settings.seed, "arithmetic")
    return reasoning_gym.create_dataset(settings.kind, seed=seed, **sizes)


def _draw_problem(generator: Any, draw: int, max_number: int | None) -> Mapping[str, Any] | None:
    """Return a draw; None if it divides by zero, its answer is not exact or a number too large."""
    try:
        problem: Mapping[str, Any] = generator[draw]
        expression = problem["metadata"]["expression"]
        value = _evaluate(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return None
    numbers = [abs(value), *(Fraction(number) for number in re.findall("[0-9]+", expression))]
    is_small = max_number is None or max(numbers) <= max_number
    return problem if is_small and value == Fraction(problem["answer"]) else None


_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluate(node: ast.expr) -> Fraction:
    """Return the exact value of an expression of the generator; no model text comes here."""
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand)
    assert isinstance(node, ast.Constant)
    return Fraction(str(node.value))
