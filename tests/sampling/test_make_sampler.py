"""Choosing a sampler by name, and the fake one's script."""

import math

import pytest

import rrl_core.sampling as sampling
from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.sampling import SampleRequest, SamplerSettings, SamplingParams, make_sampler
from rrl_core.sampling.fake import FakeSampler


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)


@pytest.mark.parametrize(("is_installed", "expected"), [(True, "vllm"), (False, "transformers")])
def test_auto_is_vllm_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool, expected: str
) -> None:
    monkeypatch.setattr(sampling, "find_spec", lambda _: object() if is_installed else None)
    assert sampling.resolve_sampler_name("auto") == expected


def test_vllm_by_name_where_it_is_missing_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    monkeypatch.setattr(sampling, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="use sampler 'transformers'"):
        make_sampler("vllm", policy)


def test_an_unknown_sampler_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="got 'sglang'"):
        make_sampler("sglang", policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["transformers", "fake"])
def test_the_context_is_at_most_the_models(policy: Policy, name: str) -> None:
    small = make_sampler(name, policy, SamplerSettings(context_tokens=100))
    large = make_sampler(name, policy, SamplerSettings(context_tokens=10**6))
    assert (small.context_tokens, large.context_tokens) == (100, 2048)


def test_a_script_says_what_the_fake_completes(policy: Policy) -> None:
    answers = {0: [52, 50, 258, 52], 1: [52, 50], 2: list(range(48, 58))}
    sampler = FakeSampler(policy, 64, script=lambda request, params: answers[request.seed])
    sampler.load_policy(policy, 0)
    completions = sampler.generate(
        [SampleRequest((65,), seed) for seed in range(3)], SamplingParams(max_tokens=4)
    )
    assert [c.completion_ids for c in completions] == [(52, 50, 258), (52, 50), (48, 49, 50, 51)]
    assert [c.finish_reason for c in completions] == ["stop", "length", "length"]
    assert [c.text for c in completions] == ["42", "42", "0123"]


def test_the_fakes_logprobs_are_those_of_its_uniform_draw(policy: Policy) -> None:
    sampler = FakeSampler(policy, 64)
    sampler.load_policy(policy, 0)
    (completion,) = sampler.generate([SampleRequest((65,), 0)], SamplingParams(max_tokens=8))
    # Ten digits, blank, minus, hash, point and the end of sequence: 15 tokens.
    assert set(completion.sampler_logprobs or ()) == {-math.log(15)}
