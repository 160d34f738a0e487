"""A user's own problems, one JSON object a line.

A line holds `prompt` (text) or `messages` (chat messages, the last by the user), `answer` (text or
number; only your own reward can do without) and, if you like, `difficulty` (text). Everything else
is kept as text in `Prompt.meta`, values that are not text as JSON, for your reward to read.
"""

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rrl_core.tasks.prompts import PromptTask, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Split, TaskError
from rrl_core.tasks.replies import REPLY_LIMIT_S, load_environment
from rrl_core.tasks.scorers import BUILT_IN, make_scorers
from rrl_core.tasks.transcript import last_turn_scorers

OWN_KEYS = {"prompt", "messages", "answer", "difficulty"}


class JsonlSettings(TaskSettings):
    """Parameters of the task `jsonl`."""

    path: Path = Field(description="The file of problems.")
    eval_path: Path | None = Field(
        None, description="The file of eval problems; None sets `eval_fraction` of `path` aside."
    )
    eval_fraction: float = Field(
        0.1, ge=0, lt=1, description="Share of the problems set aside; at least one unless 0."
    )
    instruction: str = Field(
        "", description="Put after each problem, a space between; empty adds nothing."
    )
    environment: str | None = Field(
        None, description="Your `module:function` that answers each turn; None: one turn."
    )
    reply_time_limit_s: float | None = Field(
        REPLY_LIMIT_S,
        gt=0,
        le=3600,
        description="Most seconds for a reply of your own environment, in a child process; off: in "
        "this process, without a limit.",
    )
    max_turns: int = Field(4, ge=1, le=100, description="Most turns of the policy in an episode.")
    turn_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a turn; None: those of the whole episode."
    )


@dataclass(frozen=True)
class _Problem:
    messages: tuple[Mapping[str, str], ...]
    answer: str | None
    difficulty: str
    meta: Mapping[str, str]


_Asked = TypeVar("_Asked", _Problem, Prompt)


def build_jsonl(settings: JsonlSettings) -> PromptTask:
    """Read the problems.

    Which problems are set aside depends on a hash of each one's messages: adding lines moves none
    from one split to the other.

    Raises:
        TaskError: a file or line is not as expected, or no train problem is left.
    """
    scorers = make_scorers(settings.reward, settings.reward_time_limit_s)
    needs_answer = settings.reward in BUILT_IN
    environment = None
    if settings.environment is not None:
        environment = load_environment(
            settings.environment,
            settings.max_turns,
            settings.turn_tokens,
            settings.reply_time_limit_s,
        )
        scorers = last_turn_scorers(scorers) if needs_answer else scorers
    problems = list(_read_problems(settings.path, needs_answer))
    if settings.eval_path is not None:
        train, held_out = problems, list(_read_problems(settings.eval_path, needs_answer))
    else:
        train, held_out = set_aside(problems, settings.eval_fraction)

    def prompt(split: Split, problem: _Problem) -> Prompt:
        return make_prompt(
            "jsonl",
            split,
            problem.messages,
            problem.answer,
            instruction=settings.instruction,
            difficulty=problem.difficulty,
            meta=problem.meta,
        )

    return PromptTask(
        "jsonl",
        scorers,
        train_prompts=[prompt("train", problem) for problem in train],
        eval_prompts=[prompt("eval", problem) for problem in held_out],
        environment=environment,
    )


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's JSON object with its place, `file:line`, for messages; skip blank lines.

    Only the newline character ends a line: U+2028 and its like may stand inside one.

    Raises:
        TaskError: the file is missing or a line is no JSON object in UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TaskError(
            f"expected a JSONL file at {path.absolute()}; {error.strerror}; give another path"
        ) from error
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{place}: expected a JSON object in UTF-8; {error}; correct or remove the line"
            ) from error
        if not isinstance(row, dict):
            raise TaskError(
                f"{place}: expected a JSON object; came {type(row).__name__}; "
                f"correct or remove the line"
            )
        yield place, row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _read_problems(path: Path, needs_answer: bool) -> Iterator[_Problem]:
    for place, row in read_json_lines(path):
        answer = row.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = json.dumps(answer)
        if not (isinstance(answer, str) or (answer is None and not needs_answer)):
            raise TaskError(
                f"{place}: expected `answer`, text or a number; came {answer!r}; add it, or set "
                f"`reward` to your own `module:function`"
            )
        difficulty = row.get("difficulty", "")
        if not isinstance(difficulty, str):
            raise TaskError(
                f"{place}: expected `difficulty` as text; came {difficulty!r}; quote it"
            )
        meta = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in row.items()
            if key not in OWN_KEYS
        }
        yield _Problem(_read_messages(place, row), answer, difficulty, meta)


def _read_messages(place: str, row: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    if "prompt" in row and "messages" not in row and isinstance(row["prompt"], str):
        return ask(row["prompt"])
    messages = row.get("messages")
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    if "prompt" in row or not (is_chat and messages and messages[-1]["role"] == "user"):
        raise TaskError(
            f"{place}: expected either `prompt` as text or `messages` as a list of "
            f'{{"role", "content"}} that ends with the user\'s; came the keys {sorted(row)}; '
            f"correct the line"
        )
    return tuple(messages)


def set_aside(problems: Sequence[_Asked], fraction: float) -> tuple[list[_Asked], list[_Asked]]:
    """Return the train problems and the `fraction` of them set aside, by a hash of each."""
    places = [_hash_fraction(problem) for problem in problems]
    limit = max(fraction, min(places, default=0.0)) if fraction else -1.0
    train = [problem for place, problem in zip(places, problems, strict=True) if place > limit]
    held_out = [problem for place, problem in zip(places, problems, strict=True) if place <= limit]
    return train, held_out


def _hash_fraction(problem: _Problem | Prompt) -> float:
    """Return a number in [0, 1) that depends on the problem's messages alone."""
    content = json.dumps(problem.messages, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:6], "big") / 2**48
