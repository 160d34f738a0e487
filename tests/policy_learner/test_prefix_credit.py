"""Given tokens of a replayed state: masked in the policy term, credited by a term of their own."""

from dataclasses import replace

import pytest
import torch

from rrl_core.policy.learner import Learner, LearnerConfig, LearnerError
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
CONFIG = LearnerConfig(correction="none", max_grad_norm=None, micro_batch_tokens=24)


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def continuations(policy, num_given=2, **changes):
    """Cut each sample's completion: its first tokens are given, by a sampler of another mind."""
    found = []
    for sample in make_samples(policy, noise=1.0):
        given, rest = sample.completion_ids[:num_given], sample.completion_ids[num_given:]
        if rest:
            found.append(
                replace(
                    sample, prefix_ids=given, completion_ids=rest,
                    sampler_logprobs=None,
                    prefix_logprobs=sample.sampler_logprobs[:num_given], **changes,
                )
            )  # fmt: skip
    return found


def whole(sample):
    """The same tokens as one completion of the prompt alone."""
    ids = sample.prefix_ids + sample.completion_ids
    return replace(sample, completion_ids=ids, prefix_ids=(), prefix_logprobs=None)


def plain_loss(policy, samples, weights):
    """-(1/N) sum_i [ mean_t A_i ratio_t  +  A_pre mean_t w_t log pi(prefix_t) ], token by token."""
    total = torch.zeros(())
    for sample, weights_T in zip(samples, weights, strict=True):
        logprobs = alone_logprobs(policy, whole(sample))
        num_given = len(sample.prefix_ids)
        own, given = logprobs[num_given:], logprobs[:num_given]
        total = total - sample.advantage * (own - own.detach()).exp().mean() / len(samples)
        credit = (torch.tensor(weights_T) * given).mean()
        total = total - sample.prefix_advantage * credit / len(samples)
    return total


def test_a_masked_prefix_gets_no_gradient(policy):
    samples = continuations(policy)
    plain = plain_loss(policy, samples, [[0.0, 0.0]] * len(samples))
    expected = gradient_of(policy, plain)
    result = Learner(policy, CONFIG).step(samples)
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert result.samples[0].prefix_weight_mean is None


@pytest.mark.parametrize("credit", ["none", "direct", "corrected"])
def test_loss_and_gradient_are_those_of_the_formula(policy, credit):
    samples = continuations(policy, prefix_advantage=0.7)
    samples[0] = replace(samples[0], prefix_advantage=0.0)
    assert len({s.prefix_logprobs for s in samples}) == len(samples)
    weights = []
    for sample in samples:
        old = alone_logprobs(policy, whole(sample)).detach()[: len(sample.prefix_ids)]
        sampler = torch.tensor(sample.prefix_logprobs)
        weights.append(
            {
                "none": [0.0] * len(old),
                "direct": [1.0] * len(old),  # pi = pi_old: every ratio is 1
                "corrected": (old - sampler).exp().clamp(max=2.0).tolist(),
            }[credit]
        )
    if credit == "corrected":
        flat = [weight for row in weights for weight in row]
        assert min(flat) < 0.5
        assert flat.count(2.0) > 0
    plain = plain_loss(policy, samples, weights)
    expected = gradient_of(policy, plain)
    result = Learner(policy, replace(CONFIG, prefix_credit=credit)).step(samples)
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    stats = result.samples[1]
    assert stats.num_loss_tokens == len(samples[1].completion_ids)
    assert stats.prefix_weight_mean == pytest.approx(sum(weights[1]) / 2, abs=1e-4)


def test_a_token_that_has_moved_enough_gets_no_more_direct_credit(policy):
    # Taken again and again, some ratios pass 1.4; their weights are then 0, and no others.
    samples = [replace(s, advantage=0.0) for s in continuations(policy, prefix_advantage=1.0)]
    learner = Learner(policy, replace(CONFIG, learning_rate=5e-3))
    learner.prepare(samples)

    def given_logprobs():
        with torch.no_grad():
            return [alone_logprobs(policy, whole(s))[: len(s.prefix_ids)] for s in samples]

    old, seen = given_logprobs(), set()
    for _ in range(8):
        ratios = [(now - was).exp() for now, was in zip(given_logprobs(), old, strict=True)]
        result = learner.step(samples)
        weights = [s.prefix_weight_mean for s in result.samples]
        assert weights == [(ratio <= 1.4).double().mean().item() for ratio in ratios]
        seen |= set(weights)
    assert {0.0, 1.0} < seen


def test_credit_raises_the_probability_of_the_prefix(policy):
    samples = [replace(s, advantage=0.0) for s in continuations(policy, prefix_advantage=1.0)]

    def mean_logprob():
        with torch.no_grad():
            rows = [alone_logprobs(policy, whole(s))[: len(s.prefix_ids)] for s in samples]
        return float(torch.cat(rows).mean())

    before = mean_logprob()
    Learner(policy, replace(CONFIG, learning_rate=1e-2)).step(samples)
    assert mean_logprob() > before + 1e-3


def test_without_credit_and_advantage_nothing_is_learned(policy):
    samples = [replace(s, advantage=0.0) for s in continuations(policy, prefix_advantage=1.0)]
    assert Learner(policy, replace(CONFIG, prefix_credit="none")).step(samples).is_skipped


def test_corrected_credit_without_stored_logprobs_is_refused(policy):
    [sample, *_] = continuations(policy, prefix_advantage=1.0)
    learner = Learner(policy, replace(CONFIG, prefix_credit="corrected"))
    with pytest.raises(LearnerError, match="stored sampler log-probs"):
        learner.step([replace(sample, prefix_logprobs=None)])
    with pytest.raises(LearnerError, match="0 or more"):
        learner.step([replace(sample, prefix_advantage=-1.0)])
