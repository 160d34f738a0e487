"""What a record of a foreign file says, in our words, before it becomes rows.

Invariant: None stands for what the file does not say; nothing is made up here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]  # role and content, in this order


class RecordError(ValueError):
    """A record that cannot become a rollout; `kind` is the short name of why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Turn:
    """One call of the engine: the token ids it was given, and those it sampled.

    `logprobs` are natural logs, one for each sampled token, or None for the `reason`. `text` is the
    response up to the end of this turn.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    text: str
    reason: str | None = None


@dataclass(slots=True)
class Sample:
    """One response to one prompt.

    `scores` holds reward columns by name as the file has them, the main one first; `parts` goes
    into the main one's components. `group` is a name that the file gives to rollouts which were
    compared with each other; `task` one that it gives to a problem, under which prompts may still
    differ; without both the group is guessed. `turns` are calls of the engine in their order.
    """

    messages: Sequence[Message]
    completion: str
    answer: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    policy_version: int | None = None
    group: str | None = None
    task: str | None = None
    turns: Sequence[Turn] = ()
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
