"""What a tool said between two turns is seen and never learned from."""

import math
from dataclasses import replace

import pytest
import torch

from rrl_core.algorithms.reduce import Denominators
from rrl_core.policy.learner import Learner, LearnerConfig, LearnerError
from rrl_core.policy.logprobs import score_batch
from rrl_core.policy.loss import Fixed, StepDenominators, batch_loss
from rrl_core.policy.packing import pack
from rrl_core.policy.samples import num_trained_tokens, scored_branch
from tests.policy_learner.models import (
    alone_logprobs,
    gradient,
    gradient_of,
    llama,
    make_samples,
    relative_error,
    trained,
)
from tests.policy_learner.test_ppo import CONFIG as PPO
from tests.policy_learner.test_ppo import new_learner, rewarded

LOSS = 1e-5  # absolute
GRADIENT = 1e-4  # relative
CONFIG = LearnerConfig(
    correction="token_truncate", max_completion_tokens=10, max_grad_norm=None, micro_batch_tokens=20
)
# Of the nine samples: two of several turns, whose middle was given, and one of which all was.
MASKS = {
    0: (True, False, False, True, True),
    6: (True, True, False, False, False, True, False, True),
    8: (False,),
}


@pytest.fixture
def policy():
    return trained(llama())


def episodes(policy):
    """Nine samples, three of them masked; where masked, the sampler log-probs are 0 as stored."""
    samples = make_samples(policy, temperature=0.8, noise=0.5)
    for index, mask in MASKS.items():
        kept = zip(samples[index].sampler_logprobs, mask, strict=True)
        logprobs = tuple(logprob if is_kept else 0.0 for logprob, is_kept in kept)
        samples[index] = replace(samples[index], loss_mask=mask, sampler_logprobs=logprobs)
    return samples


def mask_of(sample):
    return sample.loss_mask or (True,) * len(sample.completion_ids)


def plain_loss(policy, samples, algorithm):
    """Return the loss as loops over sampled tokens, token by token."""
    in_loss = [s for s in samples if any(mask_of(s))]
    num_tokens = sum(sum(mask_of(s)) for s in samples)
    total = torch.zeros(())
    for sample in in_loss:
        logprobs, mask = alone_logprobs(policy, sample), mask_of(sample)
        divisor = {
            "grpo": sum(mask) * len(in_loss),
            "dr_grpo": CONFIG.max_completion_tokens * len(in_loss),
            "dapo": num_tokens,
        }[algorithm]
        for t, is_trained in enumerate(mask):
            if not is_trained:
                continue
            ratio = (logprobs[t] - logprobs[t].detach()).exp()
            weight = (logprobs[t].detach() - sample.sampler_logprobs[t]).exp().clamp(max=2.0)
            total = total - weight * ratio * sample.advantage / divisor
    return total


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_loss_and_gradient_are_those_of_the_sampled_tokens(policy, algorithm):
    samples = episodes(policy)
    plain = plain_loss(policy, samples, algorithm)
    expected = gradient_of(policy, plain)
    result = Learner(policy, replace(CONFIG, algorithm=algorithm)).step(samples)
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    # 5 + 3 + 2 + 2 and 2 + 2 + 8 and 2 + 1 tokens, without the masked 2, 4 and 1.
    assert result.num_loss_tokens == 27 - 7
    assert result.num_sequences == 8
    assert [s.num_loss_tokens for s in result.samples] == [3, 3, 2, 2, 2, 2, 4, 2, 0]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "sft"])
def test_the_gradient_of_a_masked_token_is_exactly_zero(policy, algorithm):
    samples = episodes(policy)
    config = replace(CONFIG, algorithm=algorithm, kl_coef=0.3)
    lengths = [num_trained_tokens(s) for s in samples]
    counts = Denominators.of_lengths(lengths, 10)
    batches = pack([scored_branch(s) for s in samples], max_tokens=64, pad_token_id=256)
    for batch in batches:
        rows = [samples[i] for i in batch.branches]
        scores = score_batch(policy, batch)
        logprobs_BT = scores.logprobs_BT.detach().requires_grad_()
        old_BT = logprobs_BT.detach()
        fixed = Fixed(old_BT, old_BT - 0.1, torch.tensor([1.0 + i for i in range(len(rows))]))
        scored = replace(scores, logprobs_BT=logprobs_BT)
        losses, kl_loss, _ = batch_loss(
            rows, scored, fixed, StepDenominators(counts, counts), config
        )
        sum(losses.values(), kl_loss).backward()
        for sample, grad_T in zip(rows, logprobs_BT.grad, strict=True):
            for t, is_trained in enumerate(mask_of(sample)):
                assert (grad_T[t].item() != 0.0) == is_trained, (sample.rollout_id, t)
            assert not grad_T[len(sample.completion_ids) :].any()


def test_what_stands_at_masked_tokens_changes_no_bit(policy):
    samples = episodes(policy)
    first = Learner(policy, CONFIG).step(samples)
    expected = gradient(policy).clone()
    other = trained(llama())
    for index, mask in MASKS.items():
        pairs = zip(samples[index].sampler_logprobs, mask, strict=True)
        logprobs = tuple(logprob if is_kept else -37.0 for logprob, is_kept in pairs)
        samples[index] = replace(samples[index], sampler_logprobs=logprobs)
    second = Learner(other, CONFIG).step(samples)
    assert replace(first, elapsed_s=0.0) == replace(second, elapsed_s=0.0)
    assert torch.equal(gradient(other), expected)


def test_packed_and_padded_are_the_same(policy):
    samples = episodes(policy)
    packed = Learner(policy, CONFIG).step(samples)
    expected, other = gradient(policy).clone(), trained(llama())
    padded = Learner(other, replace(CONFIG, packing=False)).step(samples)
    assert packed.loss == pytest.approx(padded.loss, abs=LOSS)
    assert relative_error(gradient(other), expected) <= GRADIENT


def test_a_distilled_episode_teaches_its_own_turns(policy):
    samples = make_samples(policy)
    mask = (True, False, True, True, False)
    target = replace(
        samples[0], rollout_id="d", term="distill", sampler_logprobs=None, loss_mask=mask
    )
    others = [replace(s, advantage=0.0) for s in samples]
    # -(1 / N) (1 / 3) sum over three tokens, N = 9 sequences of policy terms.
    logprobs = alone_logprobs(policy, samples[0])
    plain = -(logprobs[0] + logprobs[2] + logprobs[3]) / 3 / 9
    expected = gradient_of(policy, plain)
    result = Learner(policy, CONFIG).step([*others, target])
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert result.samples[-1].num_loss_tokens == 3


def test_credit_of_a_prefix_goes_to_its_sampled_tokens(policy):
    [sample, *others] = make_samples(policy)[:4]
    given, mask = sample.completion_ids[:3], (True, False, True)
    continued = replace(
        sample, prefix_ids=given, completion_ids=sample.completion_ids[3:], advantage=0.0,
        sampler_logprobs=sample.sampler_logprobs[3:], prefix_advantage=0.5, prefix_mask=mask,
    )  # fmt: skip
    logprobs = alone_logprobs(policy, sample)
    plain = -0.5 * (logprobs[0] + logprobs[2]) / 2 / 4
    expected = gradient_of(policy, plain)
    others = [replace(s, advantage=0.0) for s in others]
    result = Learner(policy, CONFIG).step([continued, *others])
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT


def test_under_a_critic_given_tokens_are_no_steps(policy):
    """An advantage goes from the last token before them to the first behind: A = R - V."""
    samples = rewarded()
    masked = [replace(s, loss_mask=MASKS.get(i)) for i, s in enumerate(samples[:8])]
    learner = new_learner(policy, replace(PPO, lam=1.0))
    result = learner.step(masked)
    advantages, returns = [], []
    for sample in masked:
        known = learner._estimates[sample.rollout_id]
        mask_T = torch.tensor(mask_of(sample))
        assert not known.advantages_T[~mask_T].any()
        returns.append(known.returns_T[mask_T])
        advantages.append(known.returns_T[mask_T] - known.values_T[mask_T])
        if not sample.is_truncated:  # gamma and lambda are 1: every return is the reward
            assert torch.allclose(returns[-1], torch.full_like(returns[-1], sample.reward))
    raw_N = torch.cat(advantages).double()
    whitened_N = torch.cat(
        [learner._estimates[s.rollout_id].advantages_T[torch.tensor(mask_of(s))] for s in masked]
    )
    expected_N = (raw_N - raw_N.mean()) / (raw_N.std() + 1e-4)
    assert torch.allclose(whitened_N.double(), expected_N, atol=LOSS)
    errors_N = raw_N.square()
    assert result.metrics["value_loss"] == pytest.approx(float(errors_N.mean()), rel=GRADIENT)
    assert result.num_loss_tokens == len(raw_N)
    assert math.isfinite(result.metrics["explained_variance"])


def test_a_mask_of_another_length_is_refused(policy):
    [sample, *_] = make_samples(policy)
    with pytest.raises(LearnerError, match="one entry of `loss_mask` per token, got 1 for 5"):
        Learner(policy, CONFIG).step([replace(sample, loss_mask=(True,))])
    with pytest.raises(LearnerError, match="`prefix_mask` per token, got 1 for 0"):
        Learner(policy, CONFIG).step([replace(sample, prefix_mask=(True,))])
