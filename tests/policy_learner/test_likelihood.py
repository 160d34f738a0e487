"""Objectives without a ratio (sft, raft) and with one per sequence (gspo), through the learner."""

from dataclasses import replace

import pytest
import torch

from rrl_core.policy.learner import Learner, LearnerConfig
from tests.policy_learner.models import (
    ARCHITECTURES,
    alone_logprobs,
    gradient,
    gradient_of,
    make_samples,
    relative_error,
    trained,
)

LOSS = 1e-5
GRADIENT = 1e-4
CONFIG = LearnerConfig(correction="none", max_grad_norm=None, micro_batch_tokens=20)


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def mean_nll(policy, samples, num_sequences):
    terms = [-s.weight * alone_logprobs(policy, s).mean() for s in samples]
    return sum(terms) / num_sequences


@pytest.mark.parametrize("correction", ["none", "token_truncate", "sequence_geometric_mask"])
def test_sft_is_the_mean_negative_log_likelihood_of_every_sample(policy, correction):
    # advantages (two are 0) and missing log-probs of the sampler change nothing; weights do
    samples = make_samples(temperature=0.8)
    samples[1] = replace(samples[1], weight=0.5)
    plain = mean_nll(policy, samples, 9)
    expected = gradient_of(policy, plain)
    config = replace(CONFIG, algorithm="sft", correction=correction)
    result = Learner(policy, config).step(samples)
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert result.num_sequences == 9
    assert result.metrics["clip/frac_high"] == 0.0


def test_raft_is_sft_on_the_samples_that_did_better(policy):
    # advantages 1.5, -0.5 x 3 | 0.7, 0.7, -1.4 | 0, 0: a0, b0 and b1 stay
    samples = make_samples()
    better = [s for s in samples if s.advantage > 0]
    assert [s.rollout_id for s in better] == ["a0", "b0", "b1"]
    plain = mean_nll(policy, better, 3)
    expected = gradient_of(policy, plain)
    config = replace(CONFIG, algorithm="raft", correction="token_truncate")
    result = Learner(policy, config).step(samples)
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert result.num_sequences == 3
    lengths = [s.num_loss_tokens for s in result.samples]
    assert lengths == [5, 0, 0, 0, 2, 2, 0, 0, 0]


def test_raft_without_a_better_sample_changes_nothing(policy):
    samples = [replace(s, advantage=min(s.advantage, 0.0)) for s in make_samples()]
    before = policy.adapter_digest()
    assert Learner(policy, replace(CONFIG, algorithm="raft")).step(samples).is_skipped
    assert policy.adapter_digest() == before


def test_the_second_gspo_step_clips_whole_sequences(policy):
    samples = make_samples(policy)
    with torch.no_grad():
        old = [alone_logprobs(policy, s) for s in samples]
    # a wide clip, so that some sequences are inside and some are not
    config = replace(CONFIG, algorithm="gspo", learning_rate=3e-3, clip_low=0.1, clip_high=0.1)
    learner = Learner(policy, config)
    learner.prepare(samples)
    first = learner.step(samples)
    total = torch.zeros(())
    for sample, before in zip(samples, old, strict=True):
        ratio = (alone_logprobs(policy, sample) - before).mean().exp()
        gain = min(ratio * sample.advantage, ratio.clamp(0.9, 1.1) * sample.advantage)
        total = total - gain / 9
    expected = gradient_of(policy, total)
    second = learner.step(samples)
    assert first.loss == pytest.approx(0.0, abs=LOSS)  # -(1/9) sum A
    assert second.loss == pytest.approx(total.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    clipped = {s.frac_clipped for s in second.samples if s.frac_clipped is not None}
    assert clipped == {0.0, 1.0}


def test_the_first_gspo_step_is_the_sequence_mean_policy_gradient(policy):
    samples = make_samples()
    plain = sum(-s.advantage * alone_logprobs(policy, s).mean() for s in samples) / 9
    expected = gradient_of(policy, plain)
    Learner(policy, replace(CONFIG, algorithm="gspo")).step(samples)
    assert relative_error(gradient(policy), expected) <= GRADIENT
