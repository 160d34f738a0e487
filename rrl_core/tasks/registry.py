"""Tasks by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rrl_core.tasks.arithmetic import ArithmeticSettings, build_arithmetic
from rrl_core.tasks.code import CodeSettings, build_code
from rrl_core.tasks.gsm8k import Gsm8kSettings, build_gsm8k
from rrl_core.tasks.jsonl import JsonlSettings, build_jsonl
from rrl_core.tasks.math_problems import MathSettings, build_math
from rrl_core.tasks.prompts import TaskSettings
from rrl_core.tasks.protocol import Task, TaskError
from rrl_core.tasks.reasoning import ReasoningSettings, build_reasoning
from rrl_core.tasks.tools import ToolsSettings, build_tools


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: its parameters and how it is built from them."""

    settings: type[TaskSettings]
    build: Callable[[Any], Task]


TASKS: Mapping[str, TaskKind] = {
    "arithmetic": TaskKind(ArithmeticSettings, build_arithmetic),
    "code": TaskKind(CodeSettings, build_code),
    "gsm8k": TaskKind(Gsm8kSettings, build_gsm8k),
    "jsonl": TaskKind(JsonlSettings, build_jsonl),
    "math": TaskKind(MathSettings, build_math),
    "reasoning_gym": TaskKind(ReasoningSettings, build_reasoning),
    "tools": TaskKind(ToolsSettings, build_tools),
}


def build_task(name: str, params: Mapping[str, Any]) -> Task:
    """Return the task `name` built with `params`.

    Raises:
        TaskError: no such task or parameter, a value out of range, or data not as expected.
    """
    if name not in TASKS:
        raise TaskError(f"expected a task among {', '.join(TASKS)}; came `{name}`")
    kind = TASKS[name]
    try:
        settings = kind.settings.model_validate(dict(params))
    except ValidationError as error:
        first = error.errors()[0]
        parameter = ".".join(map(str, first["loc"]))
        raise TaskError(
            f"task `{name}`, parameter `{parameter}`: {first['msg']}; came {first['input']!r}; "
            f"the parameters are {', '.join(kind.settings.model_fields)}"
        ) from error
    return kind.build(settings)
