"""The transformers sampler beyond the contract: the draw, learned positions, live weights."""

from pathlib import Path

import pytest
import torch

from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.sampling import SampleRequest, SamplerError, SamplingParams
from rrl_core.sampling.transformers_engine import TransformersSampler, draw_tokens
from tests.policy_model.models import gpt2_folder
from tests.sampling.test_samplers import (
    PARITY_TOLERANCE,
    Case,
    change_weights,
    ids_of,
    largest_gap,
    requests_for,
)

EXACT = 1e-6

# Probabilities 0.1, 0.2, 0.3, 0.4; cumulated 0.1, 0.3, 0.6, 1.
LOGITS_V = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def draw(uniforms: list[float], params: SamplingParams) -> tuple[list[int], list[float]]:
    logits_BV = LOGITS_V.expand(len(uniforms), -1)
    tokens_B, logprobs_B = draw_tokens(
        logits_BV, params, torch.tensor(uniforms, dtype=torch.float64)
    )
    return tokens_B.tolist(), logprobs_B.exp().tolist()


def test_a_uniform_number_picks_the_token_whose_share_it_falls_into() -> None:
    tokens, probs = draw([0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 1 - 2**-53], SamplingParams())
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    assert probs == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4], abs=EXACT)


def test_temperature_sharpens_the_distribution() -> None:
    # T = 0.5 squares the probabilities: 1, 4, 9, 16 of 30; cumulated 0.033, 0.167, 0.467, 1.
    tokens, probs = draw([0.03, 0.16, 0.46, 0.47], SamplingParams(temperature=0.5))
    assert tokens == [0, 1, 2, 3]
    assert probs == pytest.approx([1 / 30, 4 / 30, 9 / 30, 16 / 30], abs=EXACT)


def test_top_k_draws_from_the_k_likeliest_and_scores_under_all() -> None:
    # Left: 0.3 and 0.4, i.e. shares up to 3/7 = 0.4286 and 1.
    tokens, probs = draw([0.0, 0.42, 0.43, 0.99], SamplingParams(top_k=2))
    assert tokens == [2, 2, 3, 3]
    assert probs == pytest.approx([0.3, 0.3, 0.4, 0.4], abs=EXACT)


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    # 0.4 + 0.3 = 0.7 reach 0.5, 0.4 alone does not.
    assert draw([0.0, 0.42, 0.43, 0.99], SamplingParams(top_p=0.5))[0] == [2, 2, 3, 3]
    # 0.4 alone reaches 0.3.
    assert draw([0.0, 0.99], SamplingParams(top_p=0.3))[0] == [3, 3]


def test_top_p_is_taken_of_what_top_k_left() -> None:
    # top_k 3 leaves 0.4, 0.3, 0.2 of 0.9; 0.7/0.9 = 0.78 reach 0.75 without the third.
    params = SamplingParams(top_k=3, top_p=0.75)
    assert draw([0.0, 0.42, 0.43, 0.99], params)[0] == [2, 2, 3, 3]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits_BV = torch.tensor([[0.0, 0.0, -torch.inf]]).expand(2, -1)
    uniforms_B = torch.tensor([0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits_BV, SamplingParams(), uniforms_B)[0].tolist() == [1, 1]


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0)).tolist()
    tokens = torch.tensor(draw(uniforms, SamplingParams())[0])
    frequencies = torch.bincount(tokens, minlength=4) / len(uniforms)
    # Four standard deviations of a share of 0.4 among 20000: 4 * sqrt(0.24 / 20000) = 0.014.
    assert frequencies.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.014)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder: Path = gpt2_folder(tmp_path_factory.mktemp("models") / "gpt2")
    return load_policy_model(ModelSpec(str(folder), device="cpu"), seed=1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("is_trained", [False, True], ids=["start", "trained"])
def test_learned_positions_count_real_tokens_only(
    gpt2: Policy, temperature: float, is_trained: bool
) -> None:
    if is_trained:
        change_weights(gpt2)
    sampler = TransformersSampler(gpt2, context_tokens=128, max_num_seqs=32)
    sampler.load_policy(gpt2, 0)
    params = SamplingParams(temperature=temperature, max_tokens=32)
    assert largest_gap(Case(gpt2, sampler, -1, None), params) <= PARITY_TOLERANCE


@pytest.fixture
def sampler() -> TransformersSampler:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)
    sampler = TransformersSampler(policy, context_tokens=128, max_num_seqs=3)
    sampler.load_policy(policy, 0)
    return sampler


def test_weights_that_changed_since_loading_are_refused(sampler: TransformersSampler) -> None:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)
    sampler.load_policy(policy, 3)
    change_weights(policy)
    with pytest.raises(SamplerError, match="version 3, but they changed"):
        sampler.generate([SampleRequest((65,), 0)], SamplingParams())


def test_more_requests_than_sequences_side_by_side_change_nothing(
    sampler: TransformersSampler,
) -> None:
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), seed=1)
    wide = TransformersSampler(policy, context_tokens=128, max_num_seqs=64)
    wide.load_policy(policy, 0)
    requests, params = requests_for(policy, 8), SamplingParams(max_tokens=12)
    assert ids_of(sampler.generate(requests, params)) == ids_of(wide.generate(requests, params))
