"""GSM8K, grade-school word problems (Cobbe et al., arXiv 2110.14168), from a folder or the hub.

The test split is the eval split. The number of calculator notes (`<<...>>`) in the reference
solution, one a step, gives the difficulty.
"""

import importlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from rrl_core.tasks.jsonl import read_json_lines
from rrl_core.tasks.prompts import PromptTask, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Split, TaskError
from rrl_core.tasks.scorers import make_scorers

SOURCE_SPLIT: Mapping[Split, str] = {"train": "train", "eval": "test"}


class Gsm8kSettings(TaskSettings):
    """Parameters of the task `gsm8k`."""

    path: Path | None = Field(
        None, description="Folder with train.jsonl and test.jsonl; None means the hub."
    )
    hub_id: str = Field("openai/gsm8k", description="Dataset on the hub, used without `path`.")
    num_train: int | None = Field(None, ge=1, description="First problems; None means all.")
    num_eval: int | None = Field(None, ge=0, description="First problems; None means all.")


def build_gsm8k(settings: Gsm8kSettings) -> PromptTask:
    """Read the problems.

    Raises:
        TaskError: the data cannot be had or a row is not as expected.
    """
    scorers = make_scorers(settings.reward, settings.reward_time_limit_s)
    return PromptTask(
        "gsm8k",
        scorers,
        train_prompts=islice(_prompts(settings, "train"), settings.num_train),
        eval_prompts=islice(_prompts(settings, "eval"), settings.num_eval),
    )


def _prompts(settings: Gsm8kSettings, split: Split) -> Iterator[Prompt]:
    source_split = SOURCE_SPLIT[split]
    if settings.path is not None:
        rows = read_json_lines(settings.path / f"{source_split}.jsonl")
    else:
        rows = _hub_rows(settings.hub_id, source_split)
    for place, row in rows:
        question, solution = row.get("question"), row.get("answer")
        if not (isinstance(question, str) and isinstance(solution, str) and "####" in solution):
            raise TaskError(
                f"{place}: expected `question` and an `answer` with `#### <number>`; came "
                f"{str(row)[:200]}; is this GSM8K?"
            )
        yield make_prompt(
            "gsm8k",
            split,
            ask(question.strip()),
            solution.rpartition("####")[2].strip(),
            instruction=settings.instruction,
            difficulty=_difficulty(solution),
        )


def _hub_rows(hub_id: str, source_split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        datasets = importlib.import_module("datasets")
        rows = datasets.load_dataset(hub_id, "main", split=source_split)
    except Exception as error:  # the library raises many kinds: no network, no such dataset
        raise TaskError(
            f"gsm8k: expected the dataset `{hub_id}` from the hub; came {type(error).__name__}: "
            f"{error}; install `datasets` and connect, or set `path` to a folder with train.jsonl "
            f"and test.jsonl"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{hub_id} {source_split} row {number}", dict(row)


def _difficulty(solution: str) -> str:
    num_steps = solution.count("<<")
    if num_steps <= 2:
        return "1-2 steps"
    return "3-4 steps" if num_steps <= 4 else "5+ steps"
