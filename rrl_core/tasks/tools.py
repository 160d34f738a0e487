"""Arithmetic that is too large for the head, with tools: an episode is several turns.

The problems are those of `arithmetic`, with larger numbers; the tools are told in the system
message. The reward reads the last turn alone: what a tool said is no answer.
"""

from typing import Literal

from pydantic import Field

from rrl_core.tasks.arithmetic import ArithmeticSettings, expressions
from rrl_core.tasks.prompts import PromptTask, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Split
from rrl_core.tasks.sandbox.running import Limits
from rrl_core.tasks.scorers import BUILT_IN, make_scorers
from rrl_core.tasks.tool_calls import Tool, instruction
from rrl_core.tasks.tool_environment import Calculator, PythonTool, ToolEnvironment
from rrl_core.tasks.transcript import last_turn_scorers


class ToolsSettings(ArithmeticSettings):
    """Parameters of the task `tools`."""

    kind: Literal["chain_sum", "basic_arithmetic"] = Field(
        "basic_arithmetic", description="The generator: `chain_sum` adds and subtracts."
    )
    min_digits: int = Field(3, ge=1, le=12, description="Fewest digits of a problem's numbers.")
    max_digits: int = Field(5, ge=1, le=12, description="Most digits of a problem's numbers.")
    operators: tuple[Literal["+", "-", "*", "/"], ...] = Field(
        ("+", "-", "*"), min_length=1, description="Operators of `basic_arithmetic`."
    )
    reward: str = Field(
        "final_number",
        description="`final_number` or `strict_format`, of the last turn; your `module:function` "
        "gets the whole transcript.",
    )
    tools: tuple[Literal["calculator", "python"], ...] = Field(
        ("calculator",), min_length=1, description="What the policy may call."
    )
    max_turns: int = Field(4, ge=1, le=100, description="Most turns of the policy in an episode.")
    turn_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a turn; None: those of the whole episode."
    )
    reminder: str | None = Field(
        None,
        min_length=1,
        description="What the user says to a turn with neither a call nor `####`; None: nothing, "
        "the episode ends.",
    )
    time_limit_s: float = Field(2.0, gt=0, le=60, description="Most seconds of a program.")
    memory_mb: int = Field(256, ge=64, description="Most memory of a program.")
    allow_limits_only: bool = Field(
        False, description="Whether programs may run where they cannot be kept apart."
    )


def build_tools(settings: ToolsSettings) -> PromptTask:
    """Generate the problems and start the environment; equal settings give equal prompts.

    Raises:
        TaskError: settings contradict each other, allow too few distinct problems, or name `python`
            where programs cannot be kept apart.
    """
    tools = tuple(_tool(name, settings) for name in dict.fromkeys(settings.tools))
    scorers = make_scorers(settings.reward, settings.reward_time_limit_s)
    if settings.reward in BUILT_IN:
        scorers = last_turn_scorers(scorers)
    system = {"role": "system", "content": instruction(tools)}

    def prompt(split: Split, expression: str, answer: str, difficulty: str) -> Prompt:
        return make_prompt(
            "tools",
            split,
            (system, *ask(f"What is {expression}?")),
            answer,
            instruction=settings.instruction,
            difficulty=difficulty,
        )

    problems = expressions(settings, "tools")
    return PromptTask(
        "tools",
        scorers,
        train_prompts=[prompt("train", *problem) for problem in problems[settings.num_eval :]],
        eval_prompts=[prompt("eval", *problem) for problem in problems[: settings.num_eval]],
        environment=ToolEnvironment(
            tools, settings.max_turns, settings.turn_tokens, settings.reminder
        ),
    )


def _tool(name: str, settings: ToolsSettings) -> Tool:
    if name == "calculator":
        return Calculator()
    limits = Limits(settings.time_limit_s, settings.memory_mb)
    return PythonTool(limits, allow_limits_only=settings.allow_limits_only)
