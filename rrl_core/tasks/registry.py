"""Tasks and scorers by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from rrl_core.tasks.arithmetic import ArithmeticSettings, build_arithmetic
from rrl_core.tasks.code import CodeScorerSettings, CodeSettings, build_code, make_code_tests
from rrl_core.tasks.gsm8k import Gsm8kSettings, build_gsm8k
from rrl_core.tasks.jsonl import JsonlSettings, build_jsonl
from rrl_core.tasks.math_problems import (
    MathScorerSettings,
    MathSettings,
    build_math,
    make_math_verify,
)
from rrl_core.tasks.own import load_task
from rrl_core.tasks.prompts import OwnRewardSettings, ScorerSettings, TaskSettings
from rrl_core.tasks.protocol import Scorer, Task, TaskError
from rrl_core.tasks.reasoning import (
    ReasoningScorerSettings,
    ReasoningSettings,
    build_reasoning,
    make_generator_scorer,
)
from rrl_core.tasks.scorers import BUILT_IN, make_reward
from rrl_core.tasks.tools import ToolsSettings, build_tools
from rrl_core.tasks.writing import WritingSettings, build_writing


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: its parameters and how it is built from them."""

    settings: type[TaskSettings]
    build: Callable[[Any], Task]


@dataclass(frozen=True)
class ScorerKind:
    """A kind of scorer: its parameters, how it is made, and the task whose parameters these are.

    `task` None: they mean the same in every task.
    """

    settings: type[ScorerSettings]
    make: Callable[[Any], Scorer]
    task: str | None = None


def _ready(scorer: Scorer) -> Callable[[Any], Scorer]:
    return lambda _: scorer


TASKS: Mapping[str, TaskKind] = {
    "arithmetic": TaskKind(ArithmeticSettings, build_arithmetic),
    "code": TaskKind(CodeSettings, build_code),
    "gsm8k": TaskKind(Gsm8kSettings, build_gsm8k),
    "jsonl": TaskKind(JsonlSettings, build_jsonl),
    "math": TaskKind(MathSettings, build_math),
    "reasoning_gym": TaskKind(ReasoningSettings, build_reasoning),
    "tools": TaskKind(ToolsSettings, build_tools),
    "writing": TaskKind(WritingSettings, build_writing),
}
SCORERS: Mapping[str, ScorerKind] = {
    **{name: ScorerKind(ScorerSettings, _ready(scorer)) for name, scorer in BUILT_IN.items()},
    "code_tests": ScorerKind(
        CodeScorerSettings, partial(make_code_tests, is_partial=False), "code"
    ),
    "code_tests_share": ScorerKind(
        CodeScorerSettings, partial(make_code_tests, is_partial=True), "code"
    ),
    "math_verify": ScorerKind(MathScorerSettings, make_math_verify, "math"),
    "reasoning_gym": ScorerKind(ReasoningScorerSettings, make_generator_scorer, "reasoning_gym"),
}
_Settings = TypeVar("_Settings", bound=ScorerSettings)


def build_task(name: str, params: Mapping[str, Any]) -> Task:
    """Return the task `name`, one of `TASKS` or a user's `module:name`, built with `params`.

    Raises:
        TaskError: no such task or parameter, a value out of range, or data not as expected.
    """
    if ":" in name:
        return load_task(name, params, TASKS)
    if name not in TASKS:
        raise TaskError(
            f"expected a task among {', '.join(TASKS)} or your `module:name`; came `{name}`"
        )
    kind = TASKS[name]
    return kind.build(_validated(kind.settings, params, f"task `{name}`"))


def scorer_kind(name: str) -> ScorerKind:
    """Return the kind of the scorer `name`: one of `SCORERS`, or a user's `module:function`.

    Raises:
        TaskError: there is no such scorer.
    """
    if name in SCORERS:
        return SCORERS[name]
    if ":" not in name:
        raise TaskError(
            f"expected a scorer among {', '.join(SCORERS)}, or `module:function`; came `{name}`"
        )
    return ScorerKind(OwnRewardSettings, lambda s: make_reward(name, s.reward_time_limit_s))


def build_scorer(name: str, params: Mapping[str, Any]) -> Scorer:
    """Return the scorer `name` made with `params`, without a task.

    Raises:
        TaskError: no such scorer or parameter, a value out of range, or it cannot be made here.
    """
    kind = scorer_kind(name)
    return kind.make(_validated(kind.settings, params, f"scorer `{name}`"))


def _validated(settings: type[_Settings], params: Mapping[str, Any], what: str) -> _Settings:
    try:
        return settings.model_validate(dict(params))
    except ValidationError as error:
        first = error.errors()[0]
        parameter = ".".join(map(str, first["loc"]))
        known = ", ".join(settings.model_fields) or "none"
        raise TaskError(
            f"{what}, parameter `{parameter}`: {first['msg']}; came {first['input']!r}; "
            f"the parameters are {known}"
        ) from error
