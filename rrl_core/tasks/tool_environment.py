"""The environment of a task with tools: it makes the calls of a turn and gives back their results.

A turn without a call ends the episode, unless there is a reminder for a turn that has no answer
either. A call that is wrong, or a tool that fails, is answered with
an error that says what was expected: the policy goes on, and the status says so.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rrl_core.tasks.calculator import CalculatorError, calculate
from rrl_core.tasks.protocol import Messages, Prompt, Reply, ReplyStatus, TaskError
from rrl_core.tasks.sandbox.child import decode
from rrl_core.tasks.sandbox.running import Limits, Outcome, isolation, run_candidate
from rrl_core.tasks.tool_calls import MAX_CALLS, Result, Tool, find_calls, make_call

MAX_PROGRAM_CHARS = 4_000
ANSWER_MARK = "####"
_WORST: tuple[ReplyStatus, ...] = ("timeout", "tool_error", "ok")


class ToolEnvironment:
    """Makes the calls of the policy's turns; the results come as messages of role `tool`.

    `reminder` is said by the user after a turn with neither a call nor `ANSWER_MARK`.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        max_turns: int,
        turn_tokens: int | None,
        reminder: str | None = None,
    ) -> None:
        self.name = "tools"
        self.version = "1-" + "-".join(f"{tool.name}{tool.version}" for tool in tools)
        if reminder is not None:
            self.version += f"-reminds{hashlib.sha256(reminder.encode()).hexdigest()[:8]}"
        self._reminder = reminder
        self.max_turns = max_turns
        self.turn_tokens = turn_tokens
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}

    def reply(self, prompt: Prompt, conversation: Messages) -> Reply:
        """Make the calls of the last turn; without a reply the episode is over."""
        del prompt
        said = conversation[-1]["content"]
        calls = find_calls(said)
        if not calls and self._reminder is not None and ANSWER_MARK not in said:
            return Reply(({"role": "user", "content": self._reminder},))
        results = [make_call(self._tools, call) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            results.append(Result(f"error: expected at most {MAX_CALLS} calls", "tool_error"))
        statuses = {result.status for result in results}
        worst: ReplyStatus = next((status for status in _WORST if status in statuses), "ok")
        return Reply(tuple({"role": "tool", "content": r.text} for r in results), worst)


class Calculator:
    """Exact arithmetic, see `rrl_core.tasks.calculator`."""

    name = "calculator"
    version = "1"
    description = "computes an arithmetic expression."
    argument = "expression"
    meaning = "numbers with + - * / ^ and brackets"
    example = "(17 + 4) * 12"

    def __call__(self, text: str) -> Result:
        """Compute the expression `text`."""
        try:
            return Result(calculate(text))
        except CalculatorError as error:
            return Result(f"error: {error}", "tool_error")


class PythonTool:
    """Runs a Python program in the sandbox; the result is what it prints, and its last value.

    Raises:
        TaskError: only limits can be set on it here, and `allow_limits_only` is not given.
    """

    name = "python"
    description = "runs a Python program and returns what it prints."
    argument = "code"
    meaning = "the program"
    example = "print(sum(range(10)))"

    def __init__(self, limits: Limits, *, allow_limits_only: bool = False) -> None:
        self._isolation = isolation()
        if self._isolation == "limits_only" and not allow_limits_only:
            raise TaskError(
                "expected to run the policy's programs in namespaces of their own; this system "
                "permits none, so that they could read this user's files and reach the network; "
                "leave `python` out of `tools`, allow user namespaces, or set `allow_limits_only = "
                "true` in a container or virtual machine that holds nothing of value"
            )
        self._limits = limits
        self.version = f"1-{limits.time_limit_s:g}s-{limits.memory_mb}mb"

    def __call__(self, text: str) -> Result:
        """Run the program `text` in a child process of its own."""
        if len(text) > MAX_PROGRAM_CHARS:
            return Result(
                f"error: expected a program of at most {MAX_PROGRAM_CHARS} characters", "tool_error"
            )
        source = text.encode("utf-8", "replace").decode()
        outcome = run_candidate(_RUNNER, "run", [((source,), {})], self._limits, self._isolation)
        if outcome.ending == "failed":
            raise RuntimeError(f"no child: {outcome.failure}")
        if outcome.ending == "timeout":
            seconds = f"{self._limits.time_limit_s:g}"
            return Result(f"error: the program took more than {seconds} seconds", "timeout")
        is_ok, said = _said(outcome)
        if is_ok:
            return Result(said.strip() or "(no output)")
        return Result(f"error: {said.strip() or 'the program ended early'}", "tool_error")


def _said(outcome: Outcome) -> tuple[bool, str]:
    """Return whether a program ended well, and what it said; what it made up says nothing."""
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        kind, content = outcome.lines[0]
        said: Any = decode(content) if kind == "value" else None
        is_ok, text = said
        if isinstance(is_ok, bool) and isinstance(text, str):
            return is_ok, text
    return False, ""


# Runs inside the child; what the program prints, the value of its last line, or its exception.
_RUNNER = """
import ast, contextlib, io
def run(source):
    output = io.StringIO()
    names = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(output):
            body = ast.parse(source).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "program", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "program", "eval"), names)
                if value is not None:
                    print(repr(value))
    except BaseException as error:
        return [False, (output.getvalue()[-2000:] + f"{type(error).__name__}: {error}")[-4000:]]
    text = output.getvalue()
    return [True, text if len(text) <= 8000 else text[:4000] + text[-4000:]]
"""
