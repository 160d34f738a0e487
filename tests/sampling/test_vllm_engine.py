"""The vLLM sampler beyond the contract: what it does with what the engine gives or fails at."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rrl_core.policy.fetch import ModelNotFoundError, find_model
from rrl_core.policy.model import ModelSpec, load_policy_model
from rrl_core.sampling import (
    SampleRequest,
    SamplerError,
    SamplerSettings,
    SamplingParams,
    vllm_engine,
)
from rrl_core.sampling.vllm_engine import TRUNCATED_REASON, VllmSampler, engine_logprobs
from tests.sampling.test_samplers import PARITY_TOLERANCE, Case, largest_gap


def given(*logprobs: float) -> list[dict[int, SimpleNamespace]]:
    """What vLLM returns for the tokens 0, 1, 2 …"""
    return [{token: SimpleNamespace(logprob=value)} for token, value in enumerate(logprobs)]


def test_logprobs_of_the_sampled_tokens_are_taken() -> None:
    assert engine_logprobs((0, 1), given(-0.5, -1.5), SamplingParams()) == ((-0.5, -1.5), None)


@pytest.mark.parametrize(
    ("logprobs", "params", "reason"),
    [
        (None, SamplingParams(), "gave None for 2 tokens"),
        (given(-0.5), SamplingParams(), "gave 1 for 2 tokens"),
        (given(-0.5, -float("inf")), SamplingParams(), "not finite"),
        (given(-0.5, float("nan")), SamplingParams(), "not finite"),
        (given(-0.5, -1.5), SamplingParams(temperature=0), "greedy"),
        (given(-0.5, -1.5), SamplingParams(top_p=0.9), TRUNCATED_REASON),
        (given(-0.5, -1.5), SamplingParams(top_k=5), TRUNCATED_REASON),
    ],
)
def test_missing_or_misleading_logprobs_become_none_with_a_reason(
    logprobs: list[dict[int, SimpleNamespace]] | None, params: SamplingParams, reason: str
) -> None:
    got, why = engine_logprobs((0, 1), logprobs, params)
    assert got is None
    assert reason in (why or "")


def test_vllm_is_imported_only_when_an_engine_starts() -> None:
    top_level = ast.parse(Path(vllm_engine.__file__).read_text()).body
    imports = [
        ast.unparse(node) for node in top_level if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not [line for line in imports if "vllm" in line]


def test_a_request_that_the_engine_drops_is_a_failed_completion() -> None:
    sampler = VllmSampler.__new__(VllmSampler)
    dropped = SimpleNamespace(finish_reason="abort", token_ids=[], logprobs=None)
    completion = sampler._completion(dropped, SamplingParams())
    assert (completion.finish_reason, completion.completion_ids) == ("error", ())
    assert "'abort'" in (completion.error or "")


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)
    settings = SamplerSettings(context_tokens=128, enforce_eager=True, seed_mode="batch")
    sampler = VllmSampler(policy, settings)
    yield Case(policy, sampler, -1, None)
    sampler.close()
    sampler.close()


@pytest.mark.vllm
def test_batch_seeds_reproduce_a_call_and_differ_between_calls(case: Case) -> None:
    case.sampler.load_policy(case.policy, 0)
    params = SamplingParams(max_tokens=8)
    first = [SampleRequest((65, 66), 100 + i) for i in range(4)]
    second = [SampleRequest((65, 66), 200 + i) for i in range(4)]
    once = case.sampler.generate(first, params)
    assert case.sampler.generate(second, params) != once
    assert case.sampler.generate(first, params) == once


@pytest.mark.vllm
def test_an_engine_that_fails_is_a_sampler_error(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    case.sampler.load_policy(case.policy, 0)
    monkeypatch.setattr(case.sampler._llm, "enqueue", fail)
    with pytest.raises(SamplerError, match="failed on 1 requests: out of memory"):
        case.sampler.generate([SampleRequest((65,), 0)], SamplingParams())


@pytest.mark.vllm
def test_a_prefix_cache_that_stays_is_a_sampler_error(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.sampler.load_policy(case.policy, 0)
    monkeypatch.setattr(case.sampler._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(SamplerError, match="prefix cache of older weights"):
        case.sampler.load_policy(case.policy, 1)
    assert case.sampler.policy_version == -1
    with pytest.raises(SamplerError, match="call load_policy"):
        case.sampler.generate([SampleRequest((65,), 0)], SamplingParams())


@pytest.mark.vllm
def test_a_policy_over_another_base_model_is_refused(case: Case) -> None:
    other = load_policy_model(ModelSpec("tiny", dtype="bfloat16", device="cpu"), seed=1)
    with pytest.raises(SamplerError, match="make a new sampler"):
        case.sampler.load_policy(other, 1)


@pytest.mark.vllm
def test_a_running_engine_leaves_torch_as_it_was_and_reports_no_usage(case: Case) -> None:
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.vllm
def test_nothing_is_written_to_stdout() -> None:
    code = (
        "from rrl_core.policy.model import *\nfrom rrl_core.sampling import *\n"
        "policy = load_policy_model(ModelSpec('tiny', device='cpu'), 0)\n"
        "settings = SamplerSettings(context_tokens=64, enforce_eager=True)\n"
        "sampler = make_sampler('vllm', policy, settings)\nsampler.load_policy(policy, 0)\n"
        "sampler.generate([SampleRequest((65,), 0)], SamplingParams())\nsampler.close()\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == ""


@pytest.mark.vllm
def test_an_engine_that_cannot_start_says_so() -> None:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)
    with pytest.raises(SamplerError, match="did not start"):
        VllmSampler(policy, SamplerSettings(max_num_seqs=0))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [False, True], ids=["start", "trained"])
def test_a_real_model_scores_like_the_trainer(is_trained: bool) -> None:
    try:
        find_model("smollm2-135m")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    policy = load_policy_model(ModelSpec("smollm2-135m", device="cpu"), seed=1)
    if is_trained:
        state = policy.adapter_state()
        generator = torch.Generator().manual_seed(7)
        for name in state:
            if "lora_B" in name:
                state[name] = torch.randn(state[name].shape, generator=generator) * 0.01
        policy.load_adapter_state(state)
    sampler = VllmSampler(policy, SamplerSettings(context_tokens=256, enforce_eager=True))
    sampler.load_policy(policy, 0)
    for temperature in (1.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=16)
        assert largest_gap(Case(policy, sampler, -1, None), params) <= PARITY_TOLERANCE
    sampler.close()
