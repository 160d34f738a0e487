"""What every sampler takes and gives: token ids in, token ids and their log-probs out.

One contract test (`tests/sampling/test_samplers.py`) holds for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rrl_core.tasks.protocol import Messages

if TYPE_CHECKING:
    from rrl_core.policy.model import Policy

FinishReason = Literal["stop", "length", "error"]
Speaker = Literal["assistant", "tool", "environment"]
Ending = Literal["answered", "max_turns", "max_tokens", "context", "environment_error"]
SyncMode = Literal["lora", "merged", "shared"]


@dataclass(frozen=True)
class SampleRequest:
    """One completion asked for: the given token ids and the seed of its draw.

    `max_tokens` is a limit of its own, below the one of `SamplingParams`; None: that one.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int | None = None

    def limit(self, params: "SamplingParams") -> int:
        """Return how many tokens it may have."""
        return params.max_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Temperature 0 is greedy; `top_p` 1, `top_k` 0 keep all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64


@dataclass(frozen=True)
class Turn:
    """A stretch of a response's tokens: one speaker's.

    `messages` are what was said. `status` is the finish reason of a turn that was sampled, of
    another that of the reply. `policy_version` sampled it; None: it was given.
    """

    speaker: Speaker
    first_token: int
    num_tokens: int
    messages: Messages
    status: str
    policy_version: int | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled completion, or the reason why there is none.

    `completion_ids` end with the end-of-sequence token when `finish_reason` is "stop".
    `sampler_logprobs` are natural logs under the tempered, full distribution, one per id; None
    where the engine gave none or they would mislead (greedy): `logprobs_reason` says why.
    `error` is set, and the ids are empty, exactly when `finish_reason` is "error".

    An episode of several turns (`episodes.py`) has `turns`: its ids are all that the policy was
    given and sampled after its prompt, the log-probs of given ones are 0. `ending` says why it
    ended; one that broke keeps its ids.
    """

    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    text: str
    logprobs_reason: str | None = None
    error: str | None = None
    turns: tuple[Turn, ...] = ()
    ending: Ending | None = None

    @property
    def num_sampled_tokens(self) -> int:
        """How many of the ids were sampled."""
        if not self.turns:
            return len(self.completion_ids)
        return sum(turn.num_tokens for turn in self.turns if turn.speaker == "assistant")


OnFinished = Callable[[int, Completion], None]  # told a request's place, and its completion


class SamplerError(RuntimeError):
    """The engine failed as a whole; nothing of the call may be used."""


class Sampler(Protocol):
    """A generator of completions under one loaded policy version."""

    engine: str
    sync: SyncMode
    context_tokens: int  # longest prompt + completion the engine holds

    def load_policy(self, policy: "Policy", version: int) -> None:
        """Make later calls sample from `policy`'s present weights, named `version`."""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first `load_policy`."""

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in order.

        A request that cannot be served (empty, or with its completion longer than the context)
        becomes a completion with `finish_reason` "error"; the others go on.

        `on_finished` is told each completion once, as soon as it is there; it has to be quick, as
        generation waits for it. What it was told counts for nothing when the call raises.

        Raises:
            SamplerError: the engine as a whole failed.
        """

    def sleep(self) -> None:
        """Free what the learner needs (GPU memory); a no-op where there is nothing to free."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Stop the engine."""
