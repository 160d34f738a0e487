r"""Problems whose answers are written in LaTeX, as in MATH (Hendrycks et al., arXiv 2103.03874).

A line holds `problem` and either `answer` or `solution`, whose last balanced `\boxed{}` is the
answer; if you like `level` ("Level 3" or 3), which gives the difficulty, and `type` or `subject`.
A solution without a box leaves its problem `unscorable`; if no problem has an answer, the file is
refused.
"""

import importlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from rrl_core.tasks.answers import marked_answer
from rrl_core.tasks.jsonl import read_json_lines, set_aside
from rrl_core.tasks.math_verifying import MathVerify
from rrl_core.tasks.prompts import PromptTask, ScorerSettings, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Scorer, Split, TaskError
from rrl_core.tasks.scorers import BUILT_IN, make_scorers

OWN_PROBLEMS = Path(__file__).with_name("problems") / "math.jsonl"
INSTRUCTION = r"Think briefly if you need to. End with the answer in \boxed{}."

Row = tuple[str, dict[str, Any]]  # where it stands, for messages, and its fields


class MathScorerSettings(ScorerSettings):
    """How `math_verify` compares."""

    time_limit_s: float = Field(5.0, gt=0, le=60, description="Seconds `math_verify` may take.")
    num_children: int | None = Field(
        None, ge=1, le=64, description="Processes of `math_verify`; None: one for each CPU."
    )


class MathSettings(MathScorerSettings, TaskSettings):
    """Parameters of the task `math`."""

    path: Path = Field(OWN_PROBLEMS, description="File of problems; the default is our own few.")
    eval_path: Path | None = Field(
        None, description="The file of eval problems; None sets `eval_fraction` of `path` aside."
    )
    eval_fraction: float = Field(
        0.1, ge=0, lt=1, description="Share of the problems set aside; at least one unless 0."
    )
    hub_id: str | None = Field(
        None, description="Dataset on the hub, splits `train` and `test`; None means the files."
    )
    num_train: int | None = Field(None, ge=1, description="First problems; None means all.")
    num_eval: int | None = Field(None, ge=0, description="First problems; None means all.")
    instruction: str = Field(
        INSTRUCTION, description="Put after each problem, a space between; empty adds nothing."
    )
    reward: str = Field(
        "math_verify",
        description="`math_verify`, `final_number`, `strict_format` or your `module:function`.",
    )


def build_math(settings: MathSettings) -> PromptTask:
    """Read the problems.

    Raises:
        TaskError: the data cannot be had, a line is not as expected, or `math-verify` is missing.
    """
    train, held_out = _both_splits(settings)
    return PromptTask(
        "math",
        _scorers(settings),
        train_prompts=[_prompt("train", problem, settings) for problem in train],
        eval_prompts=[_prompt("eval", problem, settings) for problem in held_out],
    )


def _scorers(settings: MathSettings) -> tuple[Scorer, ...]:
    if settings.reward != "math_verify":
        return make_scorers(settings.reward, settings.reward_time_limit_s)
    return (make_math_verify(settings), BUILT_IN["final_number"])


def make_math_verify(settings: MathScorerSettings) -> MathVerify:
    """Return the scorer `math_verify`.

    Raises:
        TaskError: `math-verify` is not installed.
    """
    return MathVerify(settings.time_limit_s, settings.num_children)


def _both_splits(settings: MathSettings) -> tuple[Iterable[Prompt], Iterable[Prompt]]:
    if settings.hub_id is not None:
        train = _problems(_hub_rows(settings.hub_id, "train"), settings.hub_id)
        held_out = _problems(_hub_rows(settings.hub_id, "test"), settings.hub_id)
    else:
        train = _problems(read_json_lines(settings.path), str(settings.path))
        if settings.eval_path is not None:
            rows = read_json_lines(settings.eval_path)
            held_out = _problems(rows, str(settings.eval_path))
        else:
            train, held_out = set_aside(train, settings.eval_fraction)
    return islice(train, settings.num_train), islice(held_out, settings.num_eval)


def _problems(rows: Iterable[Row], source: str) -> list[Prompt]:
    """Return the problems as prompts of no split yet."""
    problems = [_read(*row) for row in rows]
    if problems and all(problem.answer is None for problem in problems):
        raise TaskError(
            f"{source}: expected answers, or solutions with \\boxed{{}}; came none; "
            f"is this another data set?"
        )
    return problems


def _prompt(split: Split, problem: Prompt, settings: MathSettings) -> Prompt:
    return make_prompt(
        "math",
        split,
        problem.messages,
        problem.answer,
        instruction=settings.instruction,
        difficulty=problem.difficulty,
        meta=problem.meta,
    )


def _read(place: str, row: dict[str, Any]) -> Prompt:
    problem, level = row.get("problem"), row.get("level", "")
    answer, solution = row.get("answer"), row.get("solution")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = json.dumps(answer)
    has_answer = isinstance(answer, str) or (answer is None and isinstance(solution, str))
    if not (isinstance(problem, str) and has_answer):
        raise TaskError(
            f"{place}: expected `problem` and `solution` or `answer`, all text; came "
            f"{str(row)[:200]}; correct or remove the line"
        )
    kind = row.get("type", row.get("subject", ""))
    return make_prompt(
        "math",
        "train",
        ask(problem.strip()),
        marked_answer(str(solution))[0] if answer is None else str(answer),
        instruction="",
        difficulty=f"level {level}" if isinstance(level, int) else str(level).lower(),
        meta={"type": str(kind)} if kind else {},
    )


def _hub_rows(hub_id: str, source_split: str) -> Iterator[Row]:
    try:
        datasets = importlib.import_module("datasets")
        rows = datasets.load_dataset(hub_id, split=source_split)
    except Exception as error:  # the library raises many kinds: no network, no such dataset
        raise TaskError(
            f"math: expected the split `{source_split}` of `{hub_id}` from the hub; came "
            f"{type(error).__name__}: {error}; install `datasets` and connect, or set `path` to a "
            f"file of problems"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{hub_id} {source_split} row {number}", dict(row)
