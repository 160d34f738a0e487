"""Common to all tasks: how a problem becomes a prompt, and the two splits of a task."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from rrl_core.tasks.own_rewards import REWARD_LIMIT_S
from rrl_core.tasks.protocol import Environment, Prompt, Scorer, Split, TaskError, make_prompt_id

INSTRUCTION = "Think briefly if you need to. End with a line: #### <number>"


class ScorerSettings(BaseModel):
    """Parameters of a scorer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OwnRewardSettings(ScorerSettings):
    """How a user's own reward function is called."""

    reward_time_limit_s: float | None = Field(
        REWARD_LIMIT_S,
        gt=0,
        le=3600,
        description="Seconds your own reward may take for a completion, in a child process that is "
        "ended then; off: no limit, it is called in the process that trains.",
    )


class TaskSettings(OwnRewardSettings):
    """Parameters that every task has."""

    instruction: str = Field(
        INSTRUCTION, description="Put after each problem, a space between; empty adds nothing."
    )
    reward: str = Field(
        "final_number", description="`final_number`, `strict_format` or your `module:function`."
    )


class PromptTask:
    """A task whose prompts are all known beforehand.

    Repeated prompts of a split count once. No eval prompt asks what a train prompt asks. With
    `solution`, which gives a prompt's reference solution, it is a `SolvedTask`. `environment`
    answers the policy's turns; None: a rollout is one completion.
    """

    def __init__(
        self,
        name: str,
        scorers: Sequence[Scorer],
        train_prompts: Iterable[Prompt],
        eval_prompts: Iterable[Prompt],
        solution: Callable[[Prompt], str] | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.name = name
        if solution is not None:
            self.solution = solution
        self.scorers = scorers
        self.environment = environment
        self._prompts: Mapping[Split, Sequence[Prompt]] = {
            "train": _without_repeats(train_prompts),
            "eval": _without_repeats(eval_prompts),
        }
        self._refuse_overlap()
        if not self.prompts("train"):
            raise TaskError(f"task `{name}`: expected train prompts; came none; give it more data")

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of `split`."""
        return self._prompts[split]

    def _refuse_overlap(self) -> None:
        trained = {_content(prompt) for prompt in self.prompts("train")}
        both = [prompt for prompt in self.prompts("eval") if _content(prompt) in trained]
        if both:
            raise TaskError(
                f"task `{self.name}`: expected eval prompts that are not trained on; {len(both)} "
                f"stand in both splits, the first {both[0].messages[-1]['content'][:80]!r}; "
                f"remove them from one"
            )


def make_prompt(
    task: str,
    split: Split,
    messages: Sequence[Mapping[str, str]],
    answer: str | None,
    *,
    instruction: str,
    difficulty: str = "",
    meta: Mapping[str, str] | None = None,
) -> Prompt:
    """Return a prompt with its stable id, the instruction put after the last message."""
    *given, last = (dict(message) for message in messages)
    if instruction:
        last["content"] = f"{last['content']} {instruction}"
    asked = (*given, last)
    prompt_id = make_prompt_id(task, split, asked, answer)
    return Prompt(prompt_id, task, split, asked, answer, difficulty, meta or {})


def ask(question: str) -> tuple[Mapping[str, str]]:
    """Return the messages of a single question by the user."""
    return ({"role": "user", "content": question},)


def _without_repeats(prompts: Iterable[Prompt]) -> Sequence[Prompt]:
    return tuple({prompt.prompt_id: prompt for prompt in prompts}.values())


def _content(prompt: Prompt) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(tuple(sorted(message.items())) for message in prompt.messages)
