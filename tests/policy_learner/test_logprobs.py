import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM

from rrl_core.policy import logprobs
from rrl_core.policy.adapters import LoraSettings
from rrl_core.policy.logprobs import (
    UnsupportedModelError,
    check_model,
    policy_logprobs,
    score_batch,
)
from rrl_core.policy.packing import Branch, pack
from tests.policy_learner.models import (
    ARCHITECTURES,
    VOCABULARY,
    alone_logprobs,
    gradient_of,
    in_memory,
    llama,
    make_samples,
    random_weights,
    relative_error,
    trained,
)

LOGPROB = 5e-5  # absolute, nats
GRADIENT = 1e-4  # relative

ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12).map(tuple)


@pytest.fixture(params=ARCHITECTURES, scope="module")
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def branches_of(temperature=1.0):
    return [Branch(s.prompt_ids, s.completion_ids, temperature) for s in make_samples()]


def unpadded(scores, branches):
    assert scores.loss_mask_BT.sum(dim=1).tolist() == [len(b.completion_ids) for b in branches]
    return scores.logprobs_BT[scores.loss_mask_BT]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [12, 25, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_log_probs_are_those_of_each_sequence_alone(
    policy, temperature, max_tokens, share_prefix
):
    branches = branches_of(temperature)
    with torch.no_grad():
        expected = torch.cat([alone_logprobs(policy, branch) for branch in branches])
    scores = policy_logprobs(policy, branches, max_tokens=max_tokens, share_prefix=share_prefix)
    torch.testing.assert_close(unpadded(scores, branches), expected, atol=LOGPROB, rtol=0)


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_gradients_are_those_of_each_sequence_alone(policy, temperature, share_prefix):
    branches = branches_of(temperature)
    weights = [
        torch.linspace(-1, 1, len(b.completion_ids)) + 0.3 * i for i, b in enumerate(branches)
    ]
    expected = gradient_of(
        policy,
        sum((w * alone_logprobs(policy, b)).sum() for w, b in zip(weights, branches, strict=True)),
    )
    packed = pack(branches, max_tokens=25, pad_token_id=256, share_prefix=share_prefix)
    assert len(packed) > 1
    loss = torch.zeros(())
    for batch in packed:
        scores = score_batch(policy, batch)
        for row, index in enumerate(batch.branches):
            num_tokens = len(weights[index])
            loss = loss + (weights[index] * scores.logprobs_BT[row, :num_tokens]).sum()
    assert relative_error(gradient_of(policy, loss), expected) <= GRADIENT


def test_entropies_are_those_of_the_tempered_distribution(policy):
    branch = Branch((1, 2, 3), (4, 5), temperature=0.7)
    logits = policy.model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0, 2:].detach()
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    scores = policy_logprobs(policy, [branch], max_tokens=100)
    torch.testing.assert_close(scores.entropy_BT[0], expected, atol=LOGPROB, rtol=0)


@settings(max_examples=15)
@given(prompt=ids, completion=ids, others=st.lists(st.builds(Branch, ids, ids), max_size=3))
def test_neighbours_and_padding_never_matter(policy, prompt, completion, others):
    branch = Branch(prompt, completion)
    alone = policy_logprobs(policy, [branch], max_tokens=100)
    among = policy_logprobs(policy, [*others, branch], max_tokens=200)
    width = len(completion)
    torch.testing.assert_close(
        among.logprobs_BT[-1, :width], alone.logprobs_BT[0], atol=LOGPROB, rtol=0
    )
    assert among.logprobs_BT[-1, width:].eq(0).all()
    assert not among.loss_mask_BT[-1, width:].any()


def test_a_completion_may_hold_the_pad_token_and_end_without_an_end_token(policy):
    branch = Branch((1, 2), (256, 258, 256))
    with torch.no_grad():
        expected = alone_logprobs(policy, branch)
    for neighbours in ([], [Branch((1, 2), (256, 3, 4, 5, 6, 7))]):
        scores = policy_logprobs(policy, [branch, *neighbours], max_tokens=100)
        torch.testing.assert_close(scores.logprobs_BT[0, :3], expected, atol=LOGPROB, rtol=0)


def test_the_head_gives_the_same_in_chunks_of_any_size(policy, monkeypatch):
    branches = branches_of()

    def scored():
        [batch] = pack(branches, max_tokens=1000, pad_token_id=256)
        scores = score_batch(policy, batch)
        return scores.logprobs_BT.detach(), gradient_of(policy, scores.logprobs_BT.square().sum())

    whole = scored()
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", {"cpu": 3 * VOCABULARY})
    chunked = scored()
    torch.testing.assert_close(chunked[0], whole[0], atol=LOGPROB, rtol=0)
    assert relative_error(chunked[1], whole[1]) <= GRADIENT


def test_the_reference_is_scored_inside_its_context(policy):
    branches = branches_of()
    with torch.no_grad(), policy.model.disable_adapter():
        expected = torch.cat([alone_logprobs(policy, branch) for branch in branches])
    with policy.reference():
        reference = unpadded(policy_logprobs(policy, branches, max_tokens=100), branches)
    own = unpadded(policy_logprobs(policy, branches, max_tokens=100), branches)
    torch.testing.assert_close(reference, expected, atol=LOGPROB, rtol=0)
    assert (own - reference).abs().max() > 0.01


def test_scoring_twice_gives_the_same_bits(policy):
    first, second = (policy_logprobs(policy, branches_of(), max_tokens=30) for _ in range(2))
    assert torch.equal(first.logprobs_BT, second.logprobs_BT)
    assert torch.equal(first.entropy_BT, second.entropy_BT)


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 256, "bos_token_id": 257,
    "eos_token_id": 258,
}  # fmt: skip


def test_a_model_that_rescales_its_logits_after_the_head_is_refused():
    base = GraniteForCausalLM(GraniteConfig(logits_scaling=4.0, **SMALL))
    with pytest.raises(UnsupportedModelError, match=r"GraniteForCausalLM.*got a difference of"):
        check_model(in_memory(random_weights(base)))


def test_an_adapter_on_the_head_is_refused():
    base = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL))
    policy = in_memory(base, LoraSettings(rank=4, target_modules=("q_proj", "lm_head")))
    with pytest.raises(UnsupportedModelError, match=r"frozen linear layer .* take the head out"):
        check_model(policy)


def test_sequences_beyond_the_attention_window_are_refused():
    policy = in_memory(MistralForCausalLM(MistralConfig(sliding_window=8, **SMALL)))
    check_model(policy)
    within, beyond = Branch((1,) * 5, (2, 3, 4, 5)), Branch((1,) * 5, (2, 3, 4, 5, 6))
    with torch.no_grad():
        expected = alone_logprobs(policy, within)
    scores = policy_logprobs(policy, [within], max_tokens=64)
    torch.testing.assert_close(scores.logprobs_BT[0], expected, atol=LOGPROB, rtol=0)
    with pytest.raises(UnsupportedModelError, match="window of 8 tokens, got 9"):
        policy_logprobs(policy, [beyond], max_tokens=64)


def test_bfloat16_log_probs_are_normalised_in_float32():
    policy = trained(llama())
    policy.model.to(torch.bfloat16)
    policy.dtype = torch.bfloat16
    check_model(policy)
    every_token = [Branch((1, 2, 3), (token,)) for token in range(VOCABULARY)]
    scores = policy_logprobs(policy, every_token, max_tokens=100)
    total = scores.logprobs_BT.double().exp().sum().item()
    assert total == pytest.approx(1.0, abs=1e-5)  # rounded to bfloat16 it would be off by 1e-3
