r"""Calls of tools as a model writes them, and what each call came to.

    <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>

Read are an object or a list of them, with or without a ``` fence; `parameters` for `arguments`,
arguments that are JSON in a text, or the plain text itself; an end that is missing. Everything else
is an error that is told to the model, in one sentence it can act upon.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rrl_core.tasks.protocol import ReplyStatus

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MAX_CALLS = 4  # of a turn; the others are told that they are too many
MAX_CALL_CHARS = 8_000
MAX_RESULT_CHARS = 1_000
_EXAMPLE = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True)
class Call:
    """One call that was asked for: `problem` says why it cannot be made, "" that it can."""

    name: str = ""
    arguments: Any = None
    problem: str = ""


@dataclass(frozen=True)
class Result:
    """What a call came to, as text for the model."""

    text: str
    status: ReplyStatus = "ok"


class Tool(Protocol):
    """Something a model may call; never raises for what the model asks of it, and ends in time.

    It takes one text, named `argument`, of which `meaning` says what it is, and `example` is one.
    """

    name: str
    version: str
    description: str
    argument: str
    meaning: str
    example: str

    def __call__(self, text: str) -> Result:
        """Do what is asked for."""


def find_calls(text: str) -> list[Call]:
    """Return the calls in a turn, in order, at most one more than `MAX_CALLS`."""
    calls: list[Call] = []
    _, opening, rest = text.partition(OPENING)
    while opening and len(calls) <= MAX_CALLS:
        content, closing, after = rest.partition(CLOSING)
        content, again, _ = content.partition(OPENING)  # the end of the one before is missing
        calls += _read(content)
        rest = rest[len(content) :] if again else after
        _, opening, rest = rest.partition(OPENING)
        if not (closing or again):
            break
    return calls[: MAX_CALLS + 1]


def _read(content: str) -> Iterator[Call]:
    if len(content) > MAX_CALL_CHARS:
        yield Call(problem=f"expected a call of at most {MAX_CALL_CHARS} characters")
        return
    text = content.strip().removeprefix("```json").strip("`").strip()
    try:
        parsed = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        yield Call(problem=f"expected JSON such as {_EXAMPLE} between {OPENING} and {CLOSING}")
        return
    for one in parsed if isinstance(parsed, list) else [parsed]:
        yield _call(one)


def _call(parsed: Any) -> Call:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return Call(problem=f"expected an object such as {_EXAMPLE}")
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    return Call(parsed["name"], arguments)


def make_call(tools: Mapping[str, Tool], call: Call) -> Result:
    """Make a call, or say why it cannot be made."""
    if call.problem:
        return _error(call.problem)
    tool = tools.get(call.name)
    if tool is None:
        return _error(f"there is no tool `{call.name[:40]}`, expected one of {', '.join(tools)}")
    text = _text(tool, call.arguments)
    if text is None:
        return _error(f"expected the one argument `{tool.argument}` of `{tool.name}`, a text")
    result = tool(text)
    if len(result.text) <= MAX_RESULT_CHARS:
        return result
    half = MAX_RESULT_CHARS // 2
    return Result(f"{result.text[:half]}\n...\n{result.text[-half:]}", result.status)


def _text(tool: Tool, given: Any) -> str | None:
    """Return what a tool is given; None where it is not what it takes."""
    if isinstance(given, str):
        try:
            read = json.loads(given, strict=False)
        except (ValueError, RecursionError):
            read = None
        given = read if isinstance(read, dict) else {tool.argument: given}
    if not isinstance(given, dict) or set(given) != {tool.argument}:
        return None
    value = given[tool.argument]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return str(value)
    except ValueError:  # a number of thousands of digits
        return None


def _error(problem: str) -> Result:
    return Result(f"error: {problem}", "tool_error")


def instruction(tools: Sequence[Tool]) -> str:
    """Return the text that tells a model which tools there are, and how they are called."""
    lines = ["You can call tools. Available tools:"]
    lines += [f"- {t.name}: {t.description} Argument {t.argument}: {t.meaning}" for t in tools]
    first = tools[0]
    example = {"name": first.name, "arguments": {first.argument: first.example}}
    lines += [
        "To call one, write its name and arguments as JSON, and stop:",
        f"{OPENING}{json.dumps(example)}{CLOSING}",
        "You are given its result, and go on.",
    ]
    return "\n".join(lines)
