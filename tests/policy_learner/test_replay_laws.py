"""What replay promises of old rollouts, through the real learner."""

from dataclasses import replace

import pytest
import torch

from rrl_core.algorithms.advantages import group_advantages
from rrl_core.policy.learner import Learner, LearnerConfig, LearnSample
from rrl_core.policy.logprobs import policy_logprobs
from rrl_core.policy.samples import scored_branch
from tests.policy_learner.models import (
    ARCHITECTURES,
    alone_logprobs,
    gradient,
    gradient_of,
    make_samples,
    relative_error,
    trained,
)

GRADIENT = 1e-4  # relative
CONFIG = LearnerConfig(correction="none", max_grad_norm=None, micro_batch_tokens=40)


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def sampled(policy, samples, config=CONFIG):
    """Store as the sampler's the log-probs that the learner itself would compute."""
    scores = policy_logprobs(
        policy,
        [scored_branch(s) for s in samples],
        max_tokens=config.micro_batch_tokens,
        share_prefix=config.packing,
    )
    return [
        replace(s, sampler_logprobs=tuple(row[: len(s.completion_ids)].tolist()))
        for s, row in zip(samples, scores.logprobs_BT, strict=True)
    ]


@pytest.mark.parametrize(
    ("algorithm", "is_prepared", "packing"),
    [
        ("grpo", False, True),
        ("grpo", True, True),
        ("dr_grpo", False, False),
        ("dapo", True, False),
        ("gspo", True, True),
    ],
)
def test_replay_from_the_same_policy_is_the_on_policy_loss_bit_for_bit(
    policy, algorithm, is_prepared, packing
):
    # mu = pi_old = pi_theta to the bit: log pi_old - log mu is 0, its exp 1, and 1 times the loss
    # is the loss. In another packing the same policy's log-probs differ by rounding, some 1e-6.
    config = replace(CONFIG, algorithm=algorithm, packing=packing, kl_coef=0.1)
    samples = sampled(policy, make_samples(temperature=0.8), config)
    start = policy.adapter_state()
    outcomes = []
    for correction in ("none", "token_truncate", "sequence_geometric_mask"):
        policy.load_adapter_state(start)
        learner = Learner(policy, replace(config, correction=correction))
        if is_prepared:
            learner.prepare(samples)
        result = replace(learner.step(samples), elapsed_s=0.0)
        assert {s.importance_mean for s in result.samples} == {1.0}
        outcomes.append((result, gradient(policy).clone(), policy.adapter_digest()))
    on_policy, expected, digest = outcomes[0]
    assert on_policy.grad_norm > 0
    for result, actual, reached in outcomes[1:]:
        assert result == on_policy
        assert torch.equal(actual, expected)
        assert reached == digest


def replayed_among_failures(policy):
    """Return seven fresh failures and a success of an older policy, with their advantages."""
    fresh = [LearnSample(f"f{i}", "g", (1, 2, 3), (10 + i, 258), None, 0.0) for i in range(7)]
    old = LearnSample("replayed", "g", (1, 2, 3), (40, 41, 258), None, 0.0)
    now = policy.adapter_state()
    [old] = sampled(trained(policy, seed=4), [old])
    policy.load_adapter_state(now)
    samples = [*sampled(policy, fresh), old]
    advantages = group_advantages([0.0] * 7 + [1.0], ["g"] * 8, "grpo")
    return [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]


def test_a_replayed_success_among_fresh_failures_teaches_with_advantage_2_4742(policy):
    # mean 1/8; std^2 = (7 (1/8)^2 + (7/8)^2) / 7 = 1/8, std 0.353553
    samples = replayed_among_failures(policy)
    *failures, old = samples
    assert old.advantage == pytest.approx(2.4742, abs=5e-5)  # 0.875 / (0.353553 + 1e-4)
    assert [s.advantage for s in failures] == pytest.approx([-0.35345] * 7, abs=5e-6)
    loss = torch.zeros(())
    for sample in samples:
        logprobs = alone_logprobs(policy, sample)
        now = logprobs.detach()
        weights = (now - torch.tensor(sample.sampler_logprobs)).exp().clamp(max=2.0)
        loss = loss - sample.advantage * (weights * (logprobs - now).exp()).mean() / 8
    expected = gradient_of(policy, loss)  # the last weights are those of the replayed success
    result = Learner(policy, replace(CONFIG, correction="token_truncate")).step(samples)
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    assert result.samples[-1].importance_mean == pytest.approx(weights.mean().item(), rel=1e-4)
    assert result.samples[-1].mismatch_mean > 0.1
    assert result.grad_norm > 0.01
    assert relative_error(gradient(policy), expected) <= GRADIENT


def test_the_replayed_success_itself_has_a_gradient_and_becomes_likelier(policy):
    # Among failures of weight 0 nothing else moves the adapter.
    *failures, old = replayed_among_failures(policy)
    samples = [*(replace(s, weight=0.0) for s in failures), old]
    with torch.no_grad():
        before = alone_logprobs(policy, old).sum().item()
    config = replace(CONFIG, correction="token_truncate", learning_rate=1e-3)
    result = Learner(policy, config).step(samples)
    assert result.num_sequences == 8
    assert result.grad_norm > 0.01
    assert float(gradient(policy).abs().max()) > 0
    with torch.no_grad():
        assert alone_logprobs(policy, old).sum().item() > before
