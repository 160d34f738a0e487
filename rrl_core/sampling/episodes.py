"""Episodes: the policy's turns, and between them what an environment says.

An episode is one response: its token ids are all that came after the prompt, in the order the
policy saw them, each turn exactly as it was sampled. So a response of several turns is cut,
continued, replayed, reviewed, packed and learned from as any other; `turns` says which of its
tokens were sampled, by which policy version, and the others are masked in the loss. (Imported
conversations are kept as one rollout per call of the engine, since that is what files hold; here a
rollout is what is scored, so that groups, budgets and places count episodes.)

All episodes of a batch advance together: each turn is one call of the sampler for those that go on.

Our choices:
1. The seed of the first turn is the request's own, those of later turns follow from it.
2. An episode ends with a turn of the policy's. A reply that leaves no room for another turn is left
   out: the policy never saw it. What ended so, or at a limit, is truncated (`length`).
3. A response that goes on from given tokens goes on with their turn; where they end a turn, the
   environment answers first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rrl_core.policy.model import Policy
from rrl_core.sampling.protocol import (
    Completion,
    Ending,
    Sampler,
    SampleRequest,
    SamplingParams,
    Speaker,
    Turn,
)
from rrl_core.seeds import derive_seed
from rrl_core.tasks.protocol import Environment, Messages, Prompt, Reply
from rrl_core.tasks.replies import reply_all
from rrl_core.tasks.transcript import ASSISTANT, transcript


@dataclass(frozen=True)
class Start:
    """Where an episode begins.

    `asked` are the messages that the request's ids are made of; the last of these ids are those of
    the `given` turns, whose first tokens count from the end of the prompt. The request's limit, and
    that of `SamplingParams`, is on the tokens sampled in all turns.
    """

    prompt: Prompt
    asked: Messages
    request: SampleRequest
    given: tuple[Turn, ...] = ()


def play(
    starts: Sequence[Start],
    sampler: Sampler,
    policy: Policy,
    environment: Environment,
    params: SamplingParams,
) -> list[Completion]:
    """Return the completed episode of each start, in order.

    Args:
        starts: where they begin.
        sampler: samples every turn, under the policy it has loaded.
        policy: its tokenizer reads turns and writes replies.
        environment: answers the turns.
        params: how turns are drawn.

    Raises:
        SamplerError: the engine as a whole failed; nothing of the call may be used.
    """
    rules = _Rules(policy, environment, sampler.context_tokens)
    episodes = [_Episode(start, rules, start.request.limit(params)) for start in starts]
    _answer([e for e in episodes if e.is_answered_first], environment)
    while open_episodes := [e for e in episodes if e.is_open]:
        said = sampler.generate([e.request() for e in open_episodes], params)
        for episode, completion in zip(open_episodes, said, strict=True):
            episode.add_turn(completion, sampler.policy_version)
        _answer([e for e in open_episodes if e.is_open], environment)
    return [e.completion() for e in episodes]


def _answer(episodes: Sequence["_Episode"], environment: Environment) -> None:
    prompts, conversations = [e.prompt for e in episodes], [e.conversation for e in episodes]
    replies = reply_all(environment, prompts, conversations)
    for episode, reply in zip(episodes, replies, strict=True):
        episode.add_reply(reply)


@dataclass(frozen=True)
class _Rules:
    """What all episodes of a batch share."""

    policy: Policy
    environment: Environment
    context_tokens: int


class _Episode:
    """An episode as far as it went: `limit` tokens at most are sampled."""

    def __init__(self, start: Start, rules: _Rules, limit: int) -> None:
        self.prompt = start.prompt
        self.ending: Ending | None = None
        self._failed: Completion | None = None
        self._start = start
        self._rules = rules
        self._limit = limit
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._logprobs_reason: str | None = None
        self._turns: list[Turn] = []
        num_given = sum(turn.num_tokens for turn in start.given)
        self._given_ids = start.request.prompt_ids[len(start.request.prompt_ids) - num_given :]
        self._num_turns = sum(turn.speaker == ASSISTANT for turn in start.given)
        self._said = [self._given_message(turn) for turn in start.given]
        is_begun = bool(start.given) and start.given[-1].speaker == ASSISTANT
        self.is_answered_first = is_begun and self._given_ids[-1] in rules.policy.eos_token_ids
        self._begun: tuple[int, ...] = ()  # given tokens of the turn that is gone on with
        if is_begun and not self.is_answered_first:
            self._begun = self._given_ids[start.given[-1].first_token :]
            self._num_turns -= 1
            self._said.pop()

    @property
    def is_open(self) -> bool:
        return self.ending is None and self._failed is None

    @property
    def conversation(self) -> Messages:
        """What was said after the prompt."""
        return tuple(message for messages in self._said for message in messages)

    @property
    def _num_tokens(self) -> int:
        return len(self._start.request.prompt_ids) + len(self._ids)

    @property
    def _num_left(self) -> int:
        own = (turn.num_tokens for turn in self._turns if turn.speaker == ASSISTANT)
        return self._limit - sum(own)

    def request(self) -> SampleRequest:
        """Return the request of the next turn."""
        first, turn_tokens = self._start.request, self._rules.environment.turn_tokens
        number = sum(turn.speaker == ASSISTANT for turn in self._turns)
        seed = derive_seed(first.seed, "turn", number) if number else first.seed
        limit = self._num_left
        if turn_tokens is not None:
            limit = min(limit, max(1, turn_tokens - len(self._begun)))
        if self._turns or self._start.given:  # a prompt that does not fit is refused
            limit = max(1, min(limit, self._rules.context_tokens - self._num_tokens))
        return SampleRequest(first.prompt_ids + tuple(self._ids), seed, limit)

    def add_turn(self, said: Completion, policy_version: int) -> None:
        """Take up what was sampled."""
        if said.error is not None:
            self._failed = said
            return
        ids = said.completion_ids
        message = {"role": ASSISTANT, "content": self._rules.policy.decode(self._begun + ids)}
        self._add(
            Turn(
                "assistant", len(self._ids), len(ids), (message,), said.finish_reason,
                policy_version,
            ),
            ids,
            said.sampler_logprobs,
        )  # fmt: skip
        self._logprobs_reason = self._logprobs_reason or said.logprobs_reason
        self._num_turns += 1
        self._begun = ()
        if said.finish_reason == "length":
            is_full = self._num_tokens >= self._rules.context_tokens
            self.ending = "context" if is_full else "max_tokens"

    def add_reply(self, reply: Reply) -> None:
        """Take up what the environment said; it may end the episode."""
        if reply.status == "environment_error":
            self.ending = "environment_error"
        elif not reply.messages:
            self.ending = "answered"
        elif self._num_turns >= self._rules.environment.max_turns:
            self.ending = "max_turns"
        elif self._num_left < 1:
            self.ending = "max_tokens"
        else:
            asked = (*self._start.asked, *self.conversation)
            ids = self._rules.policy.encode_reply(asked, reply.messages)
            if self._num_tokens + len(ids) >= self._rules.context_tokens:
                self.ending = "context"
                return
            is_tool = all(message["role"] == "tool" for message in reply.messages)
            speaker: Speaker = "tool" if is_tool else "environment"
            turn = Turn(speaker, len(self._ids), len(ids), reply.messages, reply.status)
            self._add(turn, ids, (0.0,) * len(ids))

    def completion(self) -> Completion:
        """Return the episode as the response it is."""
        if self._failed is not None:
            return self._failed
        has_logprobs = self._logprobs_reason is None
        completion = Completion(
            completion_ids=tuple(self._ids),
            sampler_logprobs=tuple(self._logprobs) if has_logprobs else None,
            finish_reason="stop" if self.ending == "answered" else "length",
            text=transcript(self.conversation),
            logprobs_reason=self._logprobs_reason,
            turns=tuple(self._turns),
            ending=self.ending,
        )
        if self.ending != "environment_error":
            return completion
        error = (
            f"expected a reply of environment `{self._rules.environment.name}` to turn "
            f"{self._num_turns}, it failed: a reply is messages with a role and a content"
        )
        return replace(completion, finish_reason="error", error=error)

    def _add(self, turn: Turn, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self._turns.append(turn)
        self._said.append(turn.messages)
        self._ids += ids
        self._logprobs += logprobs or (0.0,) * len(ids)

    def _given_message(self, turn: Turn) -> Messages:
        """Return what was said in a given turn; one of the policy's may be cut in its middle."""
        if turn.speaker != ASSISTANT:
            return turn.messages
        ids = self._given_ids[turn.first_token : turn.first_token + turn.num_tokens]
        return ({"role": ASSISTANT, "content": self._rules.policy.decode(ids)},)
