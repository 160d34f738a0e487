"""Functions to write, judged by tests: the project's own problems, or files of the known shapes.

A line of a file holds one problem, by its fields:

- MBPP (Austin et al., arXiv 2108.07732): `text` or `prompt`, `code` (the reference, from which the
  function's signature is taken), `test_list`, if need be `test_setup_code` or `test_imports`.
- HumanEval (Chen et al., arXiv 2107.03374): `prompt` (what the completion follows on),
  `entry_point` and `test`, which defines `check(candidate)`.

`difficulty` is kept where there is one. Nothing of a file is ever run by this process, and the
reference is not run at all. A problem whose assertions cannot be taken apart (see
`rrl_core.tasks.code_tests`) stays in the task and is judged `unscorable`; if none can, the file is
refused.
"""

import ast
import builtins
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rrl_core.tasks.code_tests import CodeTests, Tests, read_assertions
from rrl_core.tasks.jsonl import read_json_lines, set_aside
from rrl_core.tasks.prompts import PromptTask, ScorerSettings, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Scorer, Split, TaskError
from rrl_core.tasks.sandbox.running import Limits
from rrl_core.tasks.scorers import make_reward

OWN_PROBLEMS = Path(__file__).with_name("problems") / "code.jsonl"
INSTRUCTION = "Think briefly if you need to. End with the whole function in one ```python block."


class CodeScorerSettings(ScorerSettings):
    """How completions are run."""

    time_limit_s: float = Field(4.0, gt=0, le=60, description="Seconds for a completion's tests.")
    memory_mb: int = Field(256, ge=64, le=4096, description="Memory of a completion's process.")
    allow_limits_only: bool = Field(
        False, description="Whether code may run where it can see files and network of this user."
    )
    num_children: int | None = Field(
        None, ge=1, le=64, description="Completions run side by side; None: one for each CPU."
    )


class CodeSettings(CodeScorerSettings, TaskSettings):
    """Parameters of the task `code`."""

    path: Path = Field(OWN_PROBLEMS, description="File of problems; the default is our own.")
    eval_path: Path | None = Field(
        None, description="The file of eval problems; None sets `eval_fraction` of `path` aside."
    )
    eval_fraction: float = Field(
        0.25, ge=0, lt=1, description="Share of the problems set aside; at least one unless 0."
    )
    num_examples: int = Field(1, ge=0, description="First assertions shown with a problem's text.")
    instruction: str = Field(
        INSTRUCTION, description="Put after each problem, a space between; empty adds nothing."
    )
    reward: str = Field("code_tests", description="`code_tests` or your `module:function`.")
    partial: bool = Field(
        False, description="Whether the reward is the share of tests passed, not all or nothing."
    )


def build_code(settings: CodeSettings) -> PromptTask:
    """Read the problems, and look how well completions can be kept apart here.

    Raises:
        TaskError: a file or line is not as expected, no train problem is left, or only limits can
            be set on untrusted code and `allow_limits_only` is not set.
    """
    problems = _scorable(settings.path, settings)
    if settings.eval_path is not None:
        train, held_out = problems, _scorable(settings.eval_path, settings)
    else:
        train, held_out = set_aside(problems, settings.eval_fraction)
    return PromptTask(
        "code",
        _scorers(settings),
        train_prompts=[_prompt("train", problem, settings) for problem in train],
        eval_prompts=[_prompt("eval", problem, settings) for problem in held_out],
    )


def _scorers(settings: CodeSettings) -> tuple[Scorer, ...]:
    if settings.reward != "code_tests":
        return (make_reward(settings.reward, settings.reward_time_limit_s),)
    return (make_code_tests(settings, is_partial=settings.partial),)


def make_code_tests(settings: CodeScorerSettings, *, is_partial: bool) -> CodeTests:
    """Return the scorer `code_tests`, or `code_tests_share` with `is_partial`.

    Raises:
        TaskError: only limits can be set on untrusted code, and the settings don't allow that.
    """
    return CodeTests(
        Limits(settings.time_limit_s, settings.memory_mb),
        is_partial=is_partial,
        allow_limits_only=settings.allow_limits_only,
        num_children=settings.num_children,
    )


def _prompt(split: Split, problem: Prompt, settings: CodeSettings) -> Prompt:
    return make_prompt(
        "code",
        split,
        problem.messages,
        problem.answer,
        instruction=settings.instruction,
        difficulty=problem.difficulty,
        meta=problem.meta,
    )


def _scorable(path: Path, settings: CodeSettings) -> list[Prompt]:
    problems = [_read(place, row, settings) for place, row in read_json_lines(path)]
    if problems and not any(problem.answer for problem in problems):
        raise TaskError(
            f"{path}: expected assertions like `assert f(1) == 2`; came none that can be taken "
            f"apart; the first: {problems[0].meta['why_unscorable']}"
        )
    return problems


def _read(place: str, row: Mapping[str, Any], settings: CodeSettings) -> Prompt:
    """Return a problem as a prompt of no split yet; without an answer where it is unscorable."""
    try:
        if "entry_point" in row:
            text, entry, header, source = _read_human_eval(row)
        else:
            text, entry, header, source = _read_mbpp(row, settings.num_examples)
    except (KeyError, TypeError, AttributeError, SyntaxError, ValueError) as error:
        raise TaskError(
            f"{place}: expected `text` or `prompt`, `code` with a function and `test_list` (MBPP), "
            f"or `prompt`, `entry_point` and `test` (HumanEval), all text; came the keys "
            f"{sorted(row)} ({type(error).__name__}: {error}); correct or remove the line"
        ) from error
    answer, why = None, {}
    try:
        called, tests = read_assertions(source)
        if called not in (entry, "candidate"):
            raise ValueError(f"expected calls of `{entry}`; came one of `{called}`")
        answer = Tests(entry, tests, header).to_answer()
    except ValueError as error:
        why = {"why_unscorable": str(error)}
    difficulty = row.get("difficulty", "")
    if not isinstance(difficulty, str):
        raise TaskError(f"{place}: expected `difficulty` as text; came {difficulty!r}; quote it")
    meta = {"task_id": str(row.get("task_id", "")), "entry": entry, **why}
    return make_prompt(
        "code", "train", ask(text), answer, instruction="", difficulty=difficulty, meta=meta
    )


def _read_mbpp(row: Mapping[str, Any], num_examples: int) -> tuple[str, str, str, str]:
    """Return the text to ask with, the function's name, what runs before it, and assertions."""
    assertions = [line.strip() for line in row["test_list"]]
    signatures = dict(_signatures(_text(row, "code")))
    if not signatures:
        raise ValueError("no function in `code`")
    called = _called_name(assertions[0]) if assertions else None
    entry = called if called in signatures else next(reversed(signatures))
    text = _text(row, "text" if "text" in row else "prompt").strip()
    lines = [f"{text}\nWrite the function `{signatures[entry]}`."]
    lines += [f"Example: {assertion}" for assertion in assertions[:num_examples]]
    setup = [row.get("test_setup_code", ""), *row.get("test_imports", [])]
    header = "\n".join(filter(None, setup))
    return "\n".join(lines), entry, header, "\n".join(assertions)


def _read_human_eval(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """As `_read_mbpp`; the header is the prompt, so that a body alone may follow on it."""
    header, entry = _text(row, "prompt"), _text(row, "entry_point")
    text = f"Complete the function `{entry}`:\n```python\n{header.strip()}\n```\n"
    return text, entry, header, _text(row, "test")


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise TypeError(f"`{key}` is no text")
    return str(row[key])


def _signatures(code: str) -> Iterator[tuple[str, str]]:
    """Yield name and signature of each function in `code`."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, f"{node.name}({ast.unparse(node.args)})"


def _called_name(assertion: str) -> str | None:
    """Return the first function by its own name that an assertion calls; None if it calls none."""
    try:
        tree = ast.parse(assertion)
    except SyntaxError:
        return None
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [function.id for function in calls if isinstance(function, ast.Name)]
    return next((name for name in names if name not in dir(builtins)), None)
