"""Loss, gradient, statistics and metrics of a step against the same numbers computed plainly."""

from dataclasses import fields, replace

import pytest
import torch

from rrl_core.policy.learner import Learner, LearnerConfig, SampleStats
from storage.schemas import LEARNED_SAMPLES
from tests.policy_learner.models import (
    ARCHITECTURES,
    alone_logprobs,
    gradient,
    gradient_of,
    llama,
    make_samples,
    relative_error,
    trained,
)

LOSS = 1e-5  # absolute
LOGPROB = 5e-5
GRADIENT = 1e-4  # relative
MAX_TOKENS = 10  # the constant length of dr_grpo
CONFIG = LearnerConfig(
    correction="none", max_completion_tokens=MAX_TOKENS, max_grad_norm=None, micro_batch_tokens=20
)


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def plain_loss(policy, samples, config, old=None, reference=None):
    """Return the step's loss as loops over samples and tokens: what the formulas say."""
    low, high = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}[config.algorithm]
    num_tokens = sum(len(s.completion_ids) for s in samples)
    total = torch.zeros(())
    for index, sample in enumerate(samples):
        logprobs = alone_logprobs(policy, sample)
        before = logprobs.detach() if old is None else old[index]
        length = len(sample.completion_ids)
        divisor = {
            "grpo": length * len(samples),
            "dr_grpo": MAX_TOKENS * len(samples),
            "dapo": num_tokens,
        }[config.algorithm]
        for t in range(length):
            ratio = (logprobs[t] - before[t]).exp()
            gain = min(ratio * sample.advantage, ratio.clamp(1 - low, 1 + high) * sample.advantage)
            if config.correction == "token_truncate":
                gain = gain * (before[t] - sample.sampler_logprobs[t]).exp().clamp(max=2.0)
            term = -gain
            if reference is not None:
                d = reference[index][t] - logprobs[t]
                term = term + config.kl_coef * (d.exp() - 1 - d)
            total = total + sample.weight * term / divisor
    return total


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_loss_and_gradient_are_those_of_the_formulas(policy, algorithm, correction):
    samples = make_samples(policy, temperature=0.8, noise=0.5)
    samples[1] = replace(samples[1], weight=0.5)
    config = replace(CONFIG, algorithm=algorithm, correction=correction)
    plain = plain_loss(policy, samples, config)
    expected = gradient_of(policy, plain)
    result = Learner(policy, config).step(samples)
    assert result.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert result.grad_norm == pytest.approx(float(expected.norm()), rel=GRADIENT)


def test_the_kl_term_has_the_same_reduction_and_its_weight(policy):
    samples = make_samples(policy)
    samples[1] = replace(samples[1], weight=0.5)
    with torch.no_grad(), policy.model.disable_adapter():
        reference = [alone_logprobs(policy, sample) for sample in samples]
    config = replace(CONFIG, kl_coef=0.3)
    plain = plain_loss(policy, samples, config, reference=reference)
    without = plain_loss(policy, samples, CONFIG)
    expected = gradient_of(policy, plain)
    result = Learner(policy, config).step(samples)
    assert result.kl_loss == pytest.approx((plain - without).item(), abs=LOSS)
    assert result.policy_loss == pytest.approx(without.item(), abs=LOSS)
    assert result.loss == result.policy_loss + result.kl_loss
    assert relative_error(gradient(policy), expected) <= GRADIENT


def test_the_second_step_of_an_iteration_uses_the_prepared_old_policy(policy):
    samples = make_samples(policy)
    with torch.no_grad():
        old = [alone_logprobs(policy, sample) for sample in samples]
    learner = Learner(policy, replace(CONFIG, learning_rate=3e-2))
    learner.prepare(samples)
    first = learner.step(samples)
    plain = plain_loss(policy, samples, CONFIG, old=old)
    expected = gradient_of(policy, plain)
    second = learner.step(samples)
    assert first.metrics["clip/frac_high"] == 0.0
    assert second.metrics["clip/frac_high"] > 0.0
    assert second.loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT


@pytest.mark.parametrize("correction", ["none", "token_truncate", "sequence_geometric_mask"])
def test_on_policy_samples_have_weight_one_and_the_on_policy_loss(policy, correction):
    # loss = -(1/9) sum A = -(1.5 - 3 * 0.5 + 0.7 + 0.7 - 1.4) / 9 = 0
    samples = make_samples(policy)
    uncorrected = gradient_of(policy, plain_loss(policy, samples, CONFIG))
    result = Learner(policy, replace(CONFIG, correction=correction)).step(samples)
    assert result.loss == pytest.approx(0.0, abs=LOSS)
    assert relative_error(gradient(policy), uncorrected) <= GRADIENT
    assert result.metrics["is/ess"] == pytest.approx(1.0, abs=1e-6)
    assert result.metrics["is/mismatch"] <= LOGPROB
    assert result.metrics["is/frac_truncated"] == 0.0
    assert result.metrics["is/mass_below_0.1"] == 0.0


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_the_split_into_micro_batches_changes_nothing(algorithm):
    outcomes = []
    for packing in (True, False):
        for micro_batch_tokens in (1, 16, 40, 1000):
            policy = trained(llama())
            config = replace(
                CONFIG, algorithm=algorithm, correction="token_truncate", packing=packing,
                micro_batch_tokens=micro_batch_tokens, kl_coef=0.1,
            )  # fmt: skip
            samples = make_samples(policy, noise=0.5)
            result = Learner(policy, config).step(samples)
            outcomes.append((result, gradient(policy)))
    first, expected = outcomes[0]
    for result, actual in outcomes[1:]:
        assert relative_error(actual, expected) <= GRADIENT
        assert result.loss == pytest.approx(first.loss, abs=LOSS)
        assert result.metrics == pytest.approx(first.metrics, abs=LOGPROB)
        assert [s.rollout_id for s in result.samples] == [s.rollout_id for s in first.samples]


def test_statistics_of_a_sample_are_means_over_its_tokens(policy):
    samples = make_samples(policy, temperature=0.7, noise=0.8)
    with torch.no_grad():
        logprobs = alone_logprobs(policy, samples[0])
        with policy.model.disable_adapter():
            d = alone_logprobs(policy, samples[0]) - logprobs
    mismatch = logprobs - torch.tensor(samples[0].sampler_logprobs)
    config = replace(CONFIG, correction="token_truncate", kl_coef=0.1, kl_estimator="k1")
    result = Learner(policy, config).step(samples)
    stats = result.samples[0]
    assert stats.num_loss_tokens == 5
    assert stats.policy_logprob_mean == pytest.approx(logprobs.mean().item(), abs=LOGPROB)
    assert stats.mismatch_mean == pytest.approx(mismatch.abs().mean().item(), abs=LOGPROB)
    assert stats.mismatch_max == pytest.approx(mismatch.abs().max().item(), abs=LOGPROB)
    assert stats.importance_mean == pytest.approx(
        mismatch.exp().clamp(max=2).mean().item(), abs=LOGPROB * 2
    )
    assert stats.frac_truncated == (mismatch.exp() > 2).double().mean().item()
    assert stats.kl_mean == pytest.approx((d.exp() - 1 - d).mean().item(), rel=1e-3)  # k3 always
    assert stats.ratio_mean == 1.0
    assert stats.frac_clipped == 0.0
    means = [s.kl_mean * s.num_loss_tokens for s in result.samples]
    assert result.metrics["kl/ref"] == pytest.approx(sum(means) / result.num_loss_tokens)
    means = [s.entropy_mean * s.num_loss_tokens for s in result.samples]
    assert result.metrics["explore/entropy"] == pytest.approx(sum(means) / result.num_loss_tokens)


def test_statistics_are_the_columns_of_learned_samples():
    given = {"run_id", "iteration", "step"}
    columns = {column.name for column in LEARNED_SAMPLES.columns}
    assert {field.name for field in fields(SampleStats)} == columns - given
    nullable = {column.name for column in LEARNED_SAMPLES.columns if column.nullable}
    assert {f.name for f in fields(SampleStats) if f.default is None} == nullable
