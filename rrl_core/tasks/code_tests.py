r"""Tests of a function, read out of assertions, and the scorer that runs a completion on them.

`read_assertions` takes `assert f(1, [2]) == 3` apart into inputs and expected value, and runs
nothing. Understood are `==` and `is` with a literal, `assert f(…)` and `assert not f(…)`, and
closeness: `abs(f(…) - 1.5) < 1e-6` and `math.isclose(f(…), 1.5, rel_tol=…, abs_tol=…)`. A literal
is what `ast.literal_eval` reads, and `set([…])` and its like. Any other assertion makes the whole
problem unscorable: judged by the rest alone, a wrong solution could pass.

The tests of a prompt are its reference answer, as JSON (`Tests.to_answer`), so that old completions
can be judged again from the log alone.
"""

import ast
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rrl_core.tasks.protocol import Prompt, Score, TaskError
from rrl_core.tasks.sandbox.child import decode, encode
from rrl_core.tasks.sandbox.running import Isolation, Limits, Outcome, isolation, run_candidate
from rrl_core.tasks.sandbox.values import EXACT, Tolerance, matches

MAX_SOURCE_CHARS = 100_000
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([A-Za-z0-9+]*+)[^\n]*+\n", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
_MAKERS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "dict": dict,
           "float": float}  # fmt: skip


@dataclass(frozen=True)
class Test:
    """One call and what it must return."""

    arguments: tuple[Any, ...]
    expected: Any
    named: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = EXACT

    __test__ = False  # pytest takes it for a test otherwise


@dataclass(frozen=True)
class Tests:
    """The tests of one function; `header` is source that is run before the completion's."""

    entry: str
    tests: tuple[Test, ...]
    header: str = ""

    __test__ = False

    def to_answer(self) -> str:
        """Return the tests as the reference answer of a prompt."""
        rows = [
            {
                "arguments": encode(list(test.arguments)),
                "named": {name: encode(value) for name, value in test.named.items()},
                "expected": encode(test.expected),
                **({} if test.tolerance == EXACT else {"tolerance": asdict(test.tolerance)}),
            }
            for test in self.tests
        ]
        return json.dumps({"entry": self.entry, "header": self.header, "tests": rows})

    @staticmethod
    def from_answer(answer: str) -> "Tests":
        """Return the tests that `to_answer` wrote.

        Raises:
            ValueError: it did not write this, or there is no test.
        """
        try:
            read = json.loads(answer)
            tests = tuple(
                Test(
                    arguments=tuple(map(decode, row["arguments"])),
                    expected=decode(row["expected"]),
                    named={name: decode(value) for name, value in row["named"].items()},
                    tolerance=Tolerance(**row.get("tolerance", {})),
                )
                for row in read["tests"]
            )
            if not tests:
                raise ValueError("there is no test")
            return Tests(read["entry"], tests, read["header"])
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"these are no tests: {error}") from error


def read_assertions(source: str) -> tuple[str, tuple[Test, ...]]:
    """Return the function that assertions call, and their tests.

    Args:
        source: Python statements, all of them assertions; `assert True` is passed over. Or the
            definition of `check(candidate)`, with those in it, as HumanEval has them.

    Raises:
        ValueError: a statement is no assertion of a form that is understood; the message has it.
    """
    entry: str | None = None
    tests = []
    for statement in _statements(source):
        if isinstance(statement, ast.Assert) and _is_true(statement.test):
            continue
        try:
            name, test = _read_assertion(statement)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            text = ast.unparse(statement)[:200]
            raise ValueError(f"`{text}` is no assertion that can be taken apart") from error
        entry = entry or name
        if name != entry:
            raise ValueError(f"expected calls of `{entry}`; came one of `{name}`")
        tests.append(test)
    if entry is None or not tests:
        raise ValueError("there is no assertion")
    return entry, tuple(tests)


def _statements(source: str) -> list[ast.stmt]:
    """Return the statements of `source`, or of the function `check` in it."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python statements: {error}") from error
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            is_text = [isinstance(node, ast.Expr) for node in statement.body]
            return statement.body[1:] if is_text[0] else statement.body
    return statements


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _read_assertion(statement: ast.stmt) -> tuple[str, Test]:
    if not isinstance(statement, ast.Assert):
        raise ValueError("no assertion")
    call, expected, tolerance = _read_claim(statement.test)
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise ValueError("no call of a function by name")
    arguments = tuple(map(_literal, call.args))
    named = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("named arguments in a dictionary")
        named[keyword.arg] = _literal(keyword.value)
    test = Test(arguments, expected, named, tolerance)
    encode([list(arguments), list(named.values()), expected])  # or it cannot be sent or compared
    return call.func.id, test


def _read_claim(claim: ast.expr) -> tuple[ast.expr, Any, Tolerance]:
    """Return the call, what it must return, and how closely."""
    match claim:
        case ast.UnaryOp(op=ast.Not(), operand=call):
            return call, False, EXACT
        case ast.Compare(
            left=ast.Call(func=ast.Name("abs"), args=[ast.BinOp(call, ast.Sub(), expected)]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[limit],
        ):
            return call, _literal(expected), Tolerance(absolute=float(_literal(limit)))
        case ast.Compare(left=call, ops=[ast.Eq() | ast.Is()], comparators=[expected]):
            return call, _literal(expected), EXACT
        case ast.Call(func=ast.Attribute(ast.Name("math"), "isclose"), args=[call, expected]):
            given = {keyword.arg: float(_literal(keyword.value)) for keyword in claim.keywords}
            relative, absolute = given.pop("rel_tol", 1e-9), given.pop("abs_tol", 0.0)
            if given:
                raise ValueError("unknown arguments of isclose")
            return call, _literal(expected), Tolerance(absolute, relative)
        case ast.Call():
            return claim, True, EXACT
    raise ValueError("no claim that is understood")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(name), args=[content], keywords=[]) if name in _MAKERS:
            return _MAKERS[name](_literal(content))
    return ast.literal_eval(node)


def find_source(completion: str) -> str:
    """Return the Python source in a completion: the last fenced block, or else the whole text.

    A block marked as another language than Python is none. The fence of the last block may be
    missing, as where a completion was cut.
    """
    blocks, start = [], None
    for fence in _FENCE.finditer(completion + "\n"):
        if start is None:
            start = fence.end() if fence[1].lower() in ("", "python", "py", "python3") else -1
        else:
            blocks += [completion[start : fence.start()]] if start >= 0 else []
            start = None
    if start is not None and start >= 0:
        blocks.append(completion[start:])
    return blocks[-1] if blocks else completion


class CodeTests:
    """1.0 when the function that a completion defines passes all tests, else 0.0.

    With `is_partial` the share of the tests that it passes. A completion that breaks, hangs, or
    sends nonsense fails the tests it has not answered: that is its own fault and no timeout of the
    judge. Components: `passed_share`, `num_tests`, and `is_isolated`, 0.0 where the code ran under
    limits only.

    Feedback is diagnostic: it tells the number of the first failing test, and whether its value was
    wrong, what kind of exception came, or which limit was passed; no input and no value.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        is_partial: bool = False,
        allow_limits_only: bool = False,
        num_children: int | None = None,
    ) -> None:
        """Look how well code can be kept apart here.

        Raises:
            TaskError: only limits can be set on it, and `allow_limits_only` is not given.
        """
        self.isolation: Isolation = isolation()
        if self.isolation == "limits_only" and not allow_limits_only:
            raise TaskError(
                "expected to run the completions' code in namespaces of its own; this system "
                "permits none, so that it could read this user's files and reach the network; "
                "allow user namespaces, or set `allow_limits_only = true` in a container or "
                "virtual machine that holds nothing of value"
            )
        self.limits = limits
        self.is_partial = is_partial
        self.name = "code_tests_share" if is_partial else "code_tests"
        self.version = f"1-{limits.time_limit_s:g}s-{limits.memory_mb}mb"
        self.num_parallel = num_children or len(os.sched_getaffinity(0))

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge the function in `completion` by the tests of `prompt`."""
        try:
            tests = Tests.from_answer(prompt.answer or "")
        except ValueError:
            return Score(None, "unscorable", feedback="the tests could not be taken apart")
        source = find_source(completion)
        if len(source) > MAX_SOURCE_CHARS:
            outcome = Outcome((), "ended")
        else:
            inputs = [
                ([encode(value) for value in test.arguments],
                 {name: encode(value) for name, value in test.named.items()})
                for test in tests.tests
            ]  # fmt: skip
            source = f"{tests.header}\n{source}" if tests.header else source
            outcome = run_candidate(source, tests.entry, inputs, self.limits, self.isolation)
        if outcome.ending == "failed":
            return Score(None, "scorer_error", feedback=f"no child: {outcome.failure}"[:300])
        return self._score(tests.tests, outcome)

    def _score(self, tests: Sequence[Test], outcome: Outcome) -> Score:
        faults = list(_faults(tests, outcome))
        share = sum(not fault for fault in faults) / len(faults)
        components = {
            "passed_share": share,
            "num_tests": float(len(faults)),
            "is_isolated": float(self.isolation == "namespaces"),
        }
        failed = [(n, fault) for n, fault in enumerate(faults, 1) if fault]
        feedback = ""
        if failed:
            number, fault = failed[0]
            feedback = f"test {number} of {len(faults)}: {fault}"
        value = share if self.is_partial else math.floor(share)
        return Score(float(value), "ok", components, feedback)


_ENDINGS = {
    "complete": "nothing came",
    "ended": "the program ended, or broke what it sends",
    "timeout": "the time limit was passed",
    "output": "too much output",
}


def _faults(tests: Sequence[Test], outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with each test's answer, "" for nothing."""
    lines = iter(outcome.lines)
    broken = ""
    for test in tests:
        kind, content = next(lines, (None, None))
        if kind == "broken":
            broken = f"the program raised {_exception_name(content)}"
        if kind == "value":
            yield "" if matches(content, test.expected, test.tolerance) else "wrong value"
        elif kind == "raised":
            yield f"raised {_exception_name(content)}"
        else:
            yield broken or _ENDINGS[outcome.ending]


def _exception_name(content: object) -> str:
    """Return the name of an exception; what the candidate made up to be read is not passed on."""
    return content if isinstance(content, str) and _NAME.fullmatch(content) else "an exception"
