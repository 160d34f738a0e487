"""Episodes: every token the policy saw, each known to be sampled or given."""

from collections.abc import Callable, Sequence

import pytest

from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.sampling.episodes import Start, play
from rrl_core.sampling.fake import FakeSampler
from rrl_core.sampling.protocol import Completion, SampleRequest, SamplingParams, Turn
from rrl_core.sampling.transformers_engine import TransformersSampler
from rrl_core.tasks.protocol import Prompt, Reply
from rrl_core.tasks.tool_environment import Calculator, ToolEnvironment
from tests.policy_model.test_chat import CHATML

EOS = 258
ASKED = ({"role": "user", "content": "What is 6 * 7?"},)
PROMPT = Prompt("p1", "t", "train", ASKED, "42")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
RESULT = "\n<bos>tool\n42<eos>\n<bos>assistant\n"
ANSWER = "#### 42"
CONTEXT = 512


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=0)
    policy.tokenizer.chat_template = CHATML
    return policy


class Recording(FakeSampler):
    """Says what `say` returns for the number of the turn, and keeps what it was asked."""

    def __init__(self, policy: Policy, say: Callable[[int], str], context: int = CONTEXT) -> None:
        super().__init__(policy, context, self._say)
        self.calls: list[list[SampleRequest]] = []
        self._text_of = say
        self.load_policy(policy, 3)

    def generate(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[Completion]:
        self.calls.append(list(requests))
        return super().generate(requests, params)

    def _say(self, request: SampleRequest, params: SamplingParams) -> list[int]:
        return [*self._text_of(len(self.calls) - 1).encode(), EOS]


def one_call(turn: int) -> str:
    return CALL if turn == 0 else ANSWER


def tools(max_turns: int = 4, turn_tokens: int | None = None) -> ToolEnvironment:
    return ToolEnvironment([Calculator()], max_turns, turn_tokens)


def start(policy: Policy, given: str = "", turns: tuple[Turn, ...] = (), **facts: int) -> Start:
    ids = (*policy.encode(ASKED), *policy.tokenizer.encode(given))
    return Start(PROMPT, ASKED, SampleRequest(ids, facts.pop("seed", 11), **facts), turns)


def played(policy: Policy, say=one_call, environment=None, max_tokens: int = 200, **facts):
    sampler = Recording(policy, say, facts.pop("context", CONTEXT))
    begun = facts.pop("begun", None) or start(policy)
    environment = environment or tools(**facts)
    [episode] = play([begun], sampler, policy, environment, SamplingParams(max_tokens=max_tokens))
    return episode, sampler


def test_an_episode_is_all_tokens_the_sampler_was_given_and_gave(policy):
    episode, sampler = played(policy)
    prompt_ids = tuple(policy.encode(ASKED))
    said = [*CALL.encode(), EOS], policy.tokenizer.encode(RESULT), [*ANSWER.encode(), EOS]
    assert list(episode.completion_ids) == [i for ids in said for i in ids]
    # The second request is the first with the first turn and the reply behind it.
    [first], [second] = sampler.calls
    assert first.prompt_ids == prompt_ids
    assert second.prompt_ids == prompt_ids + tuple(said[0]) + tuple(said[1])
    assert prompt_ids + episode.completion_ids == (*second.prompt_ids, *said[2])
    whole = [*ASKED, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "42"},
             {"role": "assistant", "content": ANSWER}]  # fmt: skip
    rendered = policy.tokenizer.apply_chat_template(whole, tokenize=False)
    assert policy.tokenizer.decode(second.prompt_ids + tuple(said[2])) + "\n" == rendered


def test_every_turn_is_known_with_its_speaker_tokens_and_version(policy):
    episode, _ = played(policy)
    first, reply, last = episode.turns
    num_call, num_reply = len(CALL) + 1, len(RESULT.replace("<eos>", "e").replace("<bos>", "b"))
    assert (first.speaker, first.first_token, first.num_tokens) == ("assistant", 0, num_call)
    assert (reply.speaker, reply.first_token, reply.num_tokens) == ("tool", num_call, num_reply)
    assert (last.first_token, last.num_tokens) == (num_call + num_reply, len(ANSWER) + 1)
    assert [t.policy_version for t in episode.turns] == [3, None, 3]
    assert [t.status for t in episode.turns] == ["stop", "ok", "stop"]
    assert reply.messages == ({"role": "tool", "content": "42"},)
    assert episode.num_sampled_tokens == num_call + len(ANSWER) + 1
    logprobs = episode.sampler_logprobs
    assert len(logprobs) == len(episode.completion_ids)
    given = logprobs[num_call : num_call + num_reply]
    assert set(given) == {0.0}
    assert all(logprob < 0 for logprob in logprobs[:num_call] + logprobs[num_call + num_reply :])
    assert (episode.ending, episode.finish_reason) == ("answered", "stop")
    assert episode.text == f"{CALL}\ntool\n42\nassistant\n{ANSWER}"


def test_a_wrong_call_is_answered_and_the_episode_goes_on(policy):
    episode, _ = played(policy, lambda turn: "<tool_call>{</tool_call>" if turn == 0 else ANSWER)
    assert [t.status for t in episode.turns] == ["stop", "tool_error", "stop"]
    assert episode.turns[1].messages[0]["content"].startswith("error: expected JSON")
    assert episode.ending == "answered"


def test_the_most_turns_end_an_episode(policy):
    episode, sampler = played(policy, lambda turn: CALL, max_turns=2, max_tokens=400)
    assert [t.speaker for t in episode.turns] == ["assistant", "tool", "assistant"]
    assert (episode.ending, episode.finish_reason) == ("max_turns", "length")
    assert len(sampler.calls) == 2
    answered, _ = played(policy, one_call, max_turns=2)
    assert answered.ending == "answered"


def test_a_turn_is_cut_at_its_own_limit_and_at_that_of_all_turns(policy):
    cut, sampler = played(policy, turn_tokens=20)
    assert [t.num_tokens for t in cut.turns] == [20]
    assert (cut.ending, cut.finish_reason) == ("max_tokens", "length")
    # 5 of all tokens are left for the second turn, and none where the first takes them all.
    num_call = len(CALL) + 1
    cut, sampler = played(policy, max_tokens=num_call + 5)
    assert [t.num_tokens for t in cut.turns if t.speaker == "assistant"] == [num_call, 5]
    assert [r.max_tokens for [r] in sampler.calls] == [num_call + 5, 5]
    full, _ = played(policy, max_tokens=num_call)
    assert [t.speaker for t in full.turns] == ["assistant"]
    assert (full.ending, full.finish_reason) == ("max_tokens", "length")


def test_a_full_context_ends_an_episode(policy):
    prompt, call, reply = (
        len(policy.encode(ASKED)),
        len(CALL) + 1,
        len(policy.tokenizer.encode(RESULT)),
    )
    # No room for a token after the reply: the policy never sees it.
    context = prompt + call + reply
    whole, _ = played(policy, max_tokens=call, context=context)
    none, _ = played(
        policy, context=context, begun=start(policy, max_tokens=call + 9), turn_tokens=call
    )
    assert whole.ending == "max_tokens"
    assert [t.speaker for t in none.turns] == ["assistant"]
    assert (none.ending, none.finish_reason) == ("context", "length")
    # Room for three: the second turn is cut there.
    three, _ = played(policy, context=context + 3, turn_tokens=call)
    assert [t.num_tokens for t in three.turns] == [call, reply, 3]
    assert (three.ending, three.finish_reason) == ("context", "length")


def test_a_prompt_that_does_not_fit_is_refused_as_ever(policy):
    episode, _ = played(policy, context=len(policy.encode(ASKED)) + 10, max_tokens=20)
    assert episode.finish_reason == "error"
    assert episode.turns == ()
    assert "shorten the prompt" in episode.error


def test_an_environment_that_fails_costs_its_episode_and_keeps_its_tokens(policy):
    class Failing:
        name, version, max_turns, turn_tokens = "failing", "1", 3, None

        def reply(self, prompt, conversation):
            raise OSError

    episode, _ = played(policy, environment=Failing())
    assert (episode.ending, episode.finish_reason) == ("environment_error", "error")
    assert "environment `failing`" in episode.error
    assert len(episode.completion_ids) == len(CALL) + 1


def test_each_turn_of_an_episode_has_a_seed_of_its_own(policy):
    _, sampler = played(policy, lambda turn: CALL if turn < 2 else ANSWER, max_tokens=400)
    seeds = [request.seed for [request] in sampler.calls]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3


def test_those_that_go_on_advance_together(policy):
    sampler = Recording(policy, lambda turn: "")
    sampler._script = lambda request, params: [
        *(CALL if request.seed % 2 and len(sampler.calls) == 1 else ANSWER).encode(), EOS
    ]  # fmt: skip
    starts = [start(policy, seed=seed) for seed in (1, 2, 3)]
    episodes = play(starts, sampler, policy, tools(), SamplingParams(max_tokens=200))
    assert [len(call) for call in sampler.calls] == [3, 2]
    assert [len(episode.turns) for episode in episodes] == [3, 1, 3]


def given_turn(speaker, first, num, *messages) -> Turn:
    return Turn(speaker, first, num, messages, "ok")


def test_given_tokens_are_gone_on_with_in_the_middle_of_a_turn(policy):
    given = CALL[:30]
    begun = start(policy, given, (given_turn("assistant", 0, 30),), max_tokens=100)
    episode, sampler = played(policy, lambda t: CALL[30:] if t == 0 else ANSWER, begun=begun)
    assert sampler.calls[0][0].prompt_ids == begun.request.prompt_ids
    # The whole call is read, and its result is given; only what is new is in the tokens.
    assert [t.speaker for t in episode.turns] == ["assistant", "tool", "assistant"]
    assert episode.turns[0].num_tokens == len(CALL) - 30 + 1
    assert episode.turns[1].messages[0]["content"] == "42"
    assert episode.text == f"{CALL}\ntool\n42\nassistant\n{ANSWER}"


def test_given_tokens_may_hold_turns_and_count_as_such(policy):
    call, reply = [*CALL.encode(), EOS], policy.tokenizer.encode(RESULT)
    ids = (*policy.encode(ASKED), *call, *reply)
    turns = (
        given_turn("assistant", 0, len(call)),
        given_turn("tool", len(call), len(reply), {"role": "tool", "content": "42"}),
    )
    begun = Start(PROMPT, ASKED, SampleRequest(ids, 5, 200), turns)
    episode, _ = played(policy, lambda turn: ANSWER, begun=begun)
    assert [t.speaker for t in episode.turns] == ["assistant"]
    assert episode.text == f"{CALL}\ntool\n42\nassistant\n{ANSWER}"
    last, _ = played(policy, lambda turn: CALL, begun=begun, max_turns=2)
    assert (last.ending, len(last.turns)) == ("max_turns", 1)
    # Where they end with a turn the environment answers first.
    begun = Start(PROMPT, ASKED, SampleRequest(ids[: -len(reply)], 5, 200), turns[:1])
    episode, sampler = played(policy, lambda turn: ANSWER, begun=begun)
    assert [t.speaker for t in episode.turns] == ["tool", "assistant"]
    assert sampler.calls[0][0].prompt_ids == ids
    assert episode.text == f"{CALL}\ntool\n42\nassistant\n{ANSWER}"


def test_an_episode_of_the_real_sampler_is_the_same_every_time(policy):
    class Guessing:
        name, version, max_turns, turn_tokens = "guessing", "1", 2, 12

        def reply(self, prompt, conversation):
            return Reply(({"role": "user", "content": f"{len(conversation)}?"},))

    policy.eos_token_ids = frozenset({EOS, *range(ord("A"), ord("Z") + 1)})
    try:
        sampler = TransformersSampler(policy, CONTEXT, 16)
        sampler.load_policy(policy, 0)
        starts = [start(policy, seed=seed) for seed in range(12)]
        params = SamplingParams(max_tokens=24)
        first = play(starts, sampler, policy, Guessing(), params)
        assert first == play(starts, sampler, policy, Guessing(), params)
        [alone] = play(starts[:1], sampler, policy, Guessing(), params)
        assert alone.completion_ids == first[0].completion_ids
        assert {e.ending for e in first} >= {"max_tokens", "max_turns"}
        assert all(len(e.sampler_logprobs) == len(e.completion_ids) for e in first)
    finally:
        policy.eos_token_ids = frozenset({EOS})
