"""The contract of every sampler; the vLLM ones run with `-m vllm`."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.sampling import (
    Completion,
    Sampler,
    SampleRequest,
    SamplerError,
    SamplerSettings,
    SamplingParams,
    make_sampler,
)

CONTEXT_TOKENS = 96
# Several end-of-sequence tokens, so common that some completions stop and some don't.
EOS_TOKEN_IDS = frozenset({258, *range(ord("A"), ord("Z") + 1)})
PARITY_TOLERANCE = 1e-4  # nats per token
PARAMS = SamplingParams(max_tokens=16)


@dataclass
class Case:
    """A sampler that has just loaded `policy` as version 0, and how it was before any load."""

    policy: Policy
    sampler: Sampler
    version_before_load: int
    error_before_load: SamplerError | None


@pytest.fixture(
    scope="module",
    params=[
        "fake",
        "transformers",
        pytest.param("vllm-merged", marks=pytest.mark.vllm),
        pytest.param("vllm-lora", marks=pytest.mark.vllm),
    ],
)
def started(request: pytest.FixtureRequest) -> Iterator[Case]:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)
    policy.eos_token_ids = EOS_TOKEN_IDS
    name, _, sync = request.param.partition("-")
    settings = SamplerSettings(
        context_tokens=CONTEXT_TOKENS, max_num_seqs=32, sync=sync or "auto", enforce_eager=True
    )
    sampler = make_sampler(name, policy, settings)
    version, error = sampler.policy_version, None
    try:
        sampler.generate([SampleRequest((65,), 0)], PARAMS)
    except SamplerError as raised:
        error = raised
    yield Case(policy, sampler, version, error)
    sampler.close()


@pytest.fixture
def case(started: Case) -> Iterator[Case]:
    state = started.policy.adapter_state()
    started.sampler.load_policy(started.policy, 0)
    yield started
    started.policy.load_adapter_state(state)


def requests_for(policy: Policy, num: int) -> list[SampleRequest]:
    """Prompts of different lengths, each with its own seed."""
    texts = ["1", "What is 2 + 3?", "longer than one block of vLLM's prefix cache", "x y"]
    prompts = [tuple(policy.tokenizer.encode(text)) for text in texts]
    return [SampleRequest(prompts[i % len(prompts)], seed=1000 + i) for i in range(num)]


def change_weights(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(7)
    state = policy.adapter_state()
    for name, tensor in state.items():
        if "lora_B" in name:
            state[name] = torch.randn(tensor.shape, generator=generator) * 0.3
    policy.load_adapter_state(state)


def ids_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.completion_ids for completion in completions]


def test_nothing_is_sampled_before_a_policy_is_loaded(started: Case) -> None:
    assert started.version_before_load == -1
    assert "load_policy" in str(started.error_before_load)


def test_completions_come_in_the_order_of_the_requests_and_do_not_depend_on_their_batch(
    case: Case,
) -> None:
    requests = requests_for(case.policy, 8)
    together = case.sampler.generate(requests, PARAMS)
    alone = [case.sampler.generate([request], PARAMS)[0] for request in requests]
    assert ids_of(together) == ids_of(alone)


def test_every_id_has_a_finite_logprob(case: Case) -> None:
    for completion in case.sampler.generate(requests_for(case.policy, 8), PARAMS):
        assert completion.sampler_logprobs is not None
        assert completion.logprobs_reason is None
        assert len(completion.sampler_logprobs) == len(completion.completion_ids) > 0
        assert all(-100 < logprob <= 0 for logprob in completion.sampler_logprobs)


def test_equal_seeds_give_equal_completions(case: Case) -> None:
    requests = requests_for(case.policy, 8)
    first = case.sampler.generate(requests, PARAMS)
    assert ids_of(first) == ids_of(case.sampler.generate(requests, PARAMS))


def test_samples_of_one_prompt_differ_by_their_seeds(case: Case) -> None:
    prompt_ids = requests_for(case.policy, 1)[0].prompt_ids
    completions = case.sampler.generate([SampleRequest(prompt_ids, i) for i in range(8)], PARAMS)
    assert len(set(ids_of(completions))) > 4


def test_seeds_of_63_bits_are_taken(case: Case) -> None:
    requests = [SampleRequest((65, 66), 2**63 - 1), SampleRequest((65, 66), 2**62)]
    first, second = ids_of(case.sampler.generate(requests, PARAMS))
    assert first != second


def test_an_over_long_prompt_costs_one_failure_and_shifts_nothing(case: Case) -> None:
    requests = requests_for(case.policy, 6)
    expected = ids_of(case.sampler.generate(requests, PARAMS))
    too_long = SampleRequest((65,) * (CONTEXT_TOKENS - PARAMS.max_tokens + 1), seed=1)
    empty = SampleRequest((), seed=1)
    with_failures = [*requests[:2], too_long, *requests[2:4], empty, *requests[4:]]
    got = case.sampler.generate(with_failures, PARAMS)
    assert [c.finish_reason == "error" for c in got] == [
        False, False, True, False, False, True, False, False,
    ]  # fmt: skip
    assert got[2].error is not None
    assert f"{CONTEXT_TOKENS}" in got[2].error
    assert got[2].completion_ids == ()
    assert got[2].sampler_logprobs is None
    assert [c.completion_ids for c in got if c.error is None] == expected


def test_each_completion_is_told_once_as_soon_as_it_is_there(case: Case) -> None:
    requests = [SampleRequest((65,) * CONTEXT_TOKENS, 0), *requests_for(case.policy, 24)]
    expected = case.sampler.generate(requests, PARAMS)
    told: list[tuple[int, Completion]] = []
    got = case.sampler.generate(requests, PARAMS, lambda *one: told.append(one))
    assert got == expected
    assert sorted(place for place, _ in told) == list(range(len(requests)))
    assert [got[place] for place, _ in told] == [completion for _, completion in told]
    lengths = [len(completion.completion_ids) for _, completion in told]
    assert lengths[0] == 0  # the one that does not fit
    assert len(set(lengths)) > 3
    if case.sampler.engine != "fake":  # which draws one after the other
        assert lengths == sorted(lengths)  # the short ones wait for no long one


def test_what_goes_wrong_in_who_is_told_is_no_failure_of_the_engine(case: Case) -> None:
    def stumble(place: int, completion: Completion) -> None:
        raise LookupError("stumbled")

    with pytest.raises(LookupError, match="stumbled"):
        case.sampler.generate(requests_for(case.policy, 4)[:1], PARAMS, stumble)


def test_prompt_and_completion_may_fill_the_context(case: Case) -> None:
    longest = SampleRequest((97,) * (CONTEXT_TOKENS - PARAMS.max_tokens), seed=1)
    assert case.sampler.generate([longest], PARAMS)[0].error is None


def test_only_failures_or_nothing_at_all_is_an_answer_too(case: Case) -> None:
    assert case.sampler.generate([], PARAMS) == []
    assert [c.finish_reason for c in case.sampler.generate([SampleRequest((), 0)], PARAMS)] == [
        "error"
    ]


def test_a_completion_ends_at_its_first_eos_or_at_its_length(case: Case) -> None:
    completions = case.sampler.generate(requests_for(case.policy, 32), PARAMS)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        *before, last = completion.completion_ids
        assert not EOS_TOKEN_IDS & set(before)
        if completion.finish_reason == "stop":
            assert last in EOS_TOKEN_IDS
        else:
            assert last not in EOS_TOKEN_IDS
            assert len(completion.completion_ids) == PARAMS.max_tokens


def test_one_token_is_the_shortest_completion(case: Case) -> None:
    completions = case.sampler.generate(requests_for(case.policy, 4), SamplingParams(max_tokens=1))
    assert [len(c.completion_ids) for c in completions] == [1] * 4


def test_text_is_the_decoded_ids(case: Case) -> None:
    for completion in case.sampler.generate(requests_for(case.policy, 4), PARAMS):
        assert completion.text == case.policy.decode(completion.completion_ids)


def test_greedy_has_no_logprobs_and_no_seed(case: Case) -> None:
    requests = [SampleRequest((65, 66, 67), seed) for seed in range(3)]
    completions = case.sampler.generate(requests, SamplingParams(temperature=0, max_tokens=8))
    assert len(set(ids_of(completions))) == 1
    for completion in completions:
        assert completion.sampler_logprobs is None
        assert "greedy" in (completion.logprobs_reason or "")


def test_a_policy_version_is_the_one_loaded_last_and_its_weights_decide(case: Case) -> None:
    requests = requests_for(case.policy, 8)
    before = ids_of(case.sampler.generate(requests, PARAMS))
    assert case.sampler.policy_version == 0
    change_weights(case.policy)
    case.sampler.load_policy(case.policy, 7)
    assert case.sampler.policy_version == 7
    assert ids_of(case.sampler.generate(requests, PARAMS)) != before


def test_going_back_to_old_weights_gives_the_old_completions(case: Case) -> None:
    requests = requests_for(case.policy, 8)
    start = case.policy.adapter_state()
    before = ids_of(case.sampler.generate(requests, PARAMS))
    change_weights(case.policy)
    case.sampler.load_policy(case.policy, 1)
    case.sampler.generate(requests, PARAMS)
    case.policy.load_adapter_state(start)
    case.sampler.load_policy(case.policy, 2)
    assert ids_of(case.sampler.generate(requests, PARAMS)) == before


def test_sleep_and_wake_change_nothing(case: Case) -> None:
    requests = requests_for(case.policy, 4)
    before = ids_of(case.sampler.generate(requests, PARAMS))
    case.sampler.sleep()
    case.sampler.wake()
    assert ids_of(case.sampler.generate(requests, PARAMS)) == before


def test_the_random_state_of_the_process_is_left_alone(case: Case) -> None:
    before = torch.get_rng_state()
    case.sampler.load_policy(case.policy, 1)
    case.sampler.generate(requests_for(case.policy, 4), PARAMS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-1),
        SamplingParams(temperature=0.001),
        SamplingParams(temperature=float("nan")),
        SamplingParams(top_p=0),
        SamplingParams(top_k=-1),
        SamplingParams(max_tokens=0),
    ],
)
def test_parameters_out_of_bounds_are_refused(case: Case, params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="expected"):
        case.sampler.generate(requests_for(case.policy, 1), params)


def trainer_logprobs(
    policy: Policy, requests: list[SampleRequest], completions: list[Completion], temperature: float
) -> list[list[float]]:
    """Score every completion with one padded forward pass, as a learner would."""
    rows = [r.prompt_ids + c.completion_ids for r, c in zip(requests, completions, strict=True)]
    longest = max(map(len, rows))
    ids_BT = torch.tensor([row + (policy.pad_token_id,) * (longest - len(row)) for row in rows])
    mask_BT = torch.tensor([[i < len(row) for i in range(longest)] for row in rows]).long()
    with torch.no_grad():
        logits_BTV = policy.model(input_ids=ids_BT, attention_mask=mask_BT).logits.float()
    logprobs_BTV = (logits_BTV / temperature).log_softmax(-1)
    taken_BT = logprobs_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
    return [
        taken_BT[b, len(r.prompt_ids) - 1 : len(rows[b]) - 1].tolist()
        for b, r in enumerate(requests)
    ]


def largest_gap(case: Case, params: SamplingParams) -> float:
    requests = requests_for(case.policy, 32)
    completions = case.sampler.generate(requests, params)
    trainer = trainer_logprobs(case.policy, requests, completions, params.temperature)
    gaps = [
        abs(ours - theirs)
        for row, completion in zip(trainer, completions, strict=True)
        for ours, theirs in zip(row, completion.sampler_logprobs or (), strict=True)
    ]
    return max(gaps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("is_trained", [False, True], ids=["start", "trained"])
def test_sampler_and_trainer_agree_on_every_logprob(
    case: Case, temperature: float, is_trained: bool
) -> None:
    if case.sampler.engine == "fake":
        pytest.skip("no model to agree with")
    if is_trained:
        change_weights(case.policy)
        case.sampler.load_policy(case.policy, 1)
    params = SamplingParams(temperature=temperature, max_tokens=32)
    assert largest_gap(case, params) <= PARITY_TOLERANCE


def test_top_k_1_is_greedy_and_never_gives_misleading_logprobs(case: Case) -> None:
    if case.sampler.engine == "fake":
        pytest.skip("no distribution to cut")
    requests = requests_for(case.policy, 4)
    cut = case.sampler.generate(requests, SamplingParams(top_k=1, max_tokens=8))
    greedy = case.sampler.generate(requests, SamplingParams(temperature=0, max_tokens=8))
    assert ids_of(cut) == ids_of(greedy)
    for completion in cut:
        if completion.sampler_logprobs is None:
            assert "truncated" in (completion.logprobs_reason or "")
        else:  # of the full distribution: the truncated one would give log 1 = 0
            assert max(completion.sampler_logprobs) < -0.1
