"""What a task is: prompts with stable ids, scorers that judge completions, and maybe turns.

This package imports no torch: tasks are text in, numbers out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

Split = Literal["train", "eval"]
ScoreStatus = Literal["ok", "timeout", "unscorable", "scorer_error"]
ReplyStatus = Literal["ok", "tool_error", "timeout", "environment_error"]


SUCCESS = 0.999  # a reward of so much counts as solved, as in `rrl_core.replay.outcomes`


class TaskError(ValueError):
    """The task's data or parameters are not as expected; the message says what to do."""


Messages = tuple[Mapping[str, str], ...]  # of a chat: each has a role and a content


@dataclass(frozen=True)
class Prompt:
    """One problem: chat messages for the policy, a reference answer for the scorer."""

    prompt_id: str
    task: str
    split: Split
    messages: Messages
    answer: str | None
    difficulty: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """One judgement: `value` is a finite number exactly when `status` is "ok", else None.

    `components` are the parts of the value by name; `feedback` never tells the reference answer.
    """

    value: float | None
    status: ScoreStatus = "ok"
    components: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""


@dataclass(frozen=True)
class Judgement:
    """A score, and how long the scorer took to give it."""

    score: Score
    elapsed_ms: float


class Scorer(Protocol):
    """A named, versioned judge of one completion. A new version is a new judge."""

    name: str
    version: str

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` as an answer to `prompt`."""


@runtime_checkable
class ParallelScorer(Scorer, Protocol):
    """A scorer that waits, as for a child process: it may be asked from several threads.

    Each completion is judged as if it were alone, within limits of its own.
    """

    num_parallel: int  # completions that it judges at a time


@dataclass(frozen=True)
class RolloutFacts:
    """What a reward may know of a rollout beside its text; None where it is not known.

    `num_tokens` counts the response, given tokens included; `max_tokens` is its limit; `novelty` is
    that of `rrl_core.exploration`, in [0, 1].
    """

    num_tokens: int | None = None
    max_tokens: int | None = None
    novelty: float | None = None


@runtime_checkable
class FactScorer(Scorer, Protocol):
    """A scorer that makes its judgement of another one's and of facts of the rollout."""

    outcome: Scorer  # judges the text alone
    needs_novelty: bool

    def judge_outcome(self, outcome: Score, completion: str, facts: RolloutFacts) -> Score:
        """Judge a completion that `outcome` is the score of, given its facts."""


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn of the policy's.

    `messages` are what the policy is given before its next turn; none: the episode is over.
    `status` is "ok", or says what was wrong with what the policy asked for; "environment_error":
    the environment itself failed, and the episode is no fault of the policy's.
    """

    messages: Messages = ()
    status: ReplyStatus = "ok"


class Environment(Protocol):
    """What goes on between the turns of the policy. A new version is another environment.

    `max_turns` counts the policy's turns in an episode; `turn_tokens` bounds each of them, None:
    only the episode as a whole is bounded.
    """

    name: str
    version: str
    max_turns: int
    turn_tokens: int | None

    def reply(self, prompt: Prompt, conversation: Messages) -> Reply:
        """Answer the last of the policy's turns: the same for the same arguments, and in time.

        `conversation` is what was said after the prompt; its last message is the policy's. It is
        asked from several threads at once.
        """


class Task(Protocol):
    """Prompts of two splits and scorers of their completions; the first scorer is the reward.

    It may have an `environment` too (see `environment_of`): then a rollout has several turns.
    """

    name: str
    scorers: Sequence[Scorer]

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of `split`, in a fixed order, with ids that never change."""


@runtime_checkable
class SolvedTask(Task, Protocol):
    """A task that knows a solution of each of its prompts."""

    def solution(self, prompt: Prompt) -> str:
        """Return a completion that its reward counts as solved."""


def environment_of(task: Task) -> Environment | None:
    """Return what answers the policy's turns; None where a rollout is one completion."""
    environment: Environment | None = getattr(task, "environment", None)
    return environment


_as_json = json.JSONEncoder(ensure_ascii=False).encode


def make_prompt_id(
    task: str, split: str, messages: Sequence[Mapping[str, str]], answer: str | None
) -> str:
    """Return the stable id of a prompt: a hash of what it asks and what it expects."""
    content = _as_json([task, split, [dict(m) for m in messages], answer])
    return "p-" + hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:20]
