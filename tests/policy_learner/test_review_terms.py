"""Attempts, reviews, second attempts and distilled samples: a term each, in one step."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from rrl_core.policy.adapters import adapter_parameters
from rrl_core.policy.learner import Learner, LearnerConfig, LearnerError, LearnSample
from rrl_core.policy.packing import pack
from rrl_core.policy.records import TERMS
from rrl_core.policy.samples import scored_branch
from tests.policy_learner.models import (
    ARCHITECTURES,
    alone_logprobs,
    gradient,
    llama,
    relative_error,
    trained,
)

LOSS = 1e-5  # absolute
GRADIENT = 1e-4  # relative
LOGPROB = 5e-5
KL_COEF = 0.1
CONFIG = LearnerConfig(
    correction="token_truncate", kl_coef=KL_COEF, max_grad_norm=None, micro_batch_tokens=40
)
PROMPT = (1, 2, 3, 4, 5)
REVIEWS = [(60, 61, 62, 258), (63, 258)]
SECOND_ATTEMPTS = [(10, 11, 15, 258), (10, 16)]
NUM_POLICY_SEQUENCES = 7
#         id, term, prompt, completion, advantage, weight
PLAN = [
    ("y0", "attempt", PROMPT, (10, 11, 12), 0.9, 1.0),
    ("y1", "attempt", PROMPT, (10, 20, 258), -0.4, 1.0),
    ("y2", "attempt", PROMPT, (21, 258), -0.5, 1.0),
    ("r0", "review", (*PROMPT, 10, 20, 258, 70, 71), REVIEWS[0], 0.5, 0.7),
    ("r1", "review", (*PROMPT, 10, 20, 258, 70, 71), REVIEWS[1], -0.5, 0.7),
    ("s0", "second_attempt", (*PROMPT, 80, *REVIEWS[0]), SECOND_ATTEMPTS[0], 0.5, 0.9),
    ("s1", "second_attempt", (*PROMPT, 80, *REVIEWS[1]), SECOND_ATTEMPTS[1], -0.5, 0.9),
    ("d0", "distill", PROMPT, SECOND_ATTEMPTS[0], 0.0, 0.8),
]
DISTILLED = PLAN[-1][0]


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def planned(policy, temperature=1.0):
    """Return the step's samples; the sampler was a little off, and saw the review."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for rollout_id, term, prompt_ids, completion_ids, advantage, weight in PLAN:
        sample = LearnSample(
            rollout_id, "g", prompt_ids, completion_ids, None, advantage,
            temperature=temperature, weight=weight, term=term,
        )  # fmt: skip
        with torch.no_grad():
            own = alone_logprobs(policy, sample)
        noise = torch.randn(own.shape, generator=generator) * 0.5
        samples.append(replace(sample, sampler_logprobs=tuple((own + noise).tolist())))
    return samples


def only(samples, term):
    """Give all other terms a weight of 0, which leaves the denominators alone."""
    return [s if s.term == term else replace(s, weight=0.0) for s in samples]


def without(samples, term):
    return [s for s in samples if s.term != term]


def stepped(policy, samples, config=CONFIG):
    """Return (result, gradient) of a step that leaves the policy as it was."""
    state = policy.adapter_state()
    result = Learner(policy, config).step(samples)
    found = gradient(policy).clone()
    policy.load_adapter_state(state)
    return result, found


def exact_logprobs(model, sample):
    """Return the completion's log-probs [T] of one sequence alone; the model is in float64."""
    input_ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits_TV = model(input_ids=input_ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV / sample.temperature, dim=-1)
    return logprobs_TV[torch.arange(len(sample.completion_ids)), list(sample.completion_ids)]


def by_hand(policy, samples, term, num_sequences=NUM_POLICY_SEQUENCES):
    """Return (loss, gradient) of one term in float64.

    Policy terms: (w/N) mean_t( -min(pi/mu, 2) A pi/pi_old + beta (e^d - 1 - d) ), d = log ref - log
    pi. Distilled: (w/N) mean_t( -log pi ).
    """
    model = copy.deepcopy(policy.model).double()
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        if sample.term != term:
            continue
        logprobs = exact_logprobs(model, sample)
        if term == "distill":
            total = total - sample.weight * logprobs.mean() / num_sequences
            continue
        with torch.no_grad(), model.disable_adapter():
            d = exact_logprobs(model, sample)
        d = d - logprobs
        now = logprobs.detach()
        off = torch.tensor(sample.sampler_logprobs, dtype=torch.float64)
        weights = (now - off).exp().clamp(max=2.0)
        gain = weights * sample.advantage * (logprobs - now).exp()
        per_token = KL_COEF * (d.exp() - 1 - d) - gain
        total = total + sample.weight * per_token.mean() / num_sequences
    model.zero_grad()
    total.backward()
    grads = [p.grad.flatten() for p in adapter_parameters(model).values()]
    return total.item(), torch.cat(grads).float()


@pytest.mark.parametrize("term", TERMS)
def test_a_term_alone_has_the_loss_and_gradient_of_its_formula(policy, term):
    samples = planned(policy, temperature=0.8)
    result, actual = stepped(policy, only(samples, term))
    loss, expected = by_hand(policy, samples, term)
    assert result.loss == pytest.approx(loss, abs=LOSS)
    assert relative_error(actual, expected) <= GRADIENT
    name = "distill/loss" if term == "distill" else f"policy/loss_{term}"
    assert result.metrics[name] == pytest.approx(result.policy_loss, abs=LOSS)


def test_the_step_is_the_sum_of_its_terms(policy):
    samples = planned(policy)
    result, actual = stepped(policy, samples)
    parts = [by_hand(policy, samples, term) for term in TERMS]
    assert result.loss == pytest.approx(sum(loss for loss, _ in parts), abs=LOSS)
    assert relative_error(actual, sum(part for _, part in parts)) <= GRADIENT
    assert result.loss == result.policy_loss + result.kl_loss
    names = [f"policy/loss_{term}" for term in TERMS[:3]]
    told_apart = [result.metrics[name] for name in [*names, "distill/loss"]]
    assert sum(told_apart) == pytest.approx(result.policy_loss, abs=LOSS)


@pytest.mark.parametrize("term", TERMS)
def test_a_weight_scales_its_term(term):
    policy = trained(llama())
    samples = only(planned(policy), term)
    _, once = stepped(policy, samples)
    _, thrice = stepped(policy, [replace(s, weight=3 * s.weight) for s in samples])
    assert relative_error(thrice, 3 * once) <= GRADIENT


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "sft", "raft"])
def test_distillation_is_the_same_under_every_objective(algorithm):
    # raft learns from 3 of the 7 and N stays 7: never the successes only
    policy = trained(llama())
    samples = planned(policy)
    config = replace(CONFIG, algorithm=algorithm, max_completion_tokens=9)
    result, actual = stepped(policy, only(samples, "distill"), config)
    loss, expected = by_hand(policy, samples, "distill")
    assert result.num_sequences == (3 if algorithm == "raft" else 7)
    assert result.loss == pytest.approx(loss, abs=LOSS)
    assert relative_error(actual, expected) <= GRADIENT


def test_raft_distills_where_nothing_did_better():
    policy = trained(llama())
    samples = [replace(s, advantage=0.0) for s in planned(policy)]
    result, actual = stepped(policy, samples, replace(CONFIG, algorithm="raft", kl_coef=0.0))
    assert result.num_sequences == 0
    assert relative_error(actual, by_hand(policy, samples, "distill")[1]) <= GRADIENT


def test_a_distilled_copy_changes_no_policy_term():
    policy = trained(llama())
    samples = planned(policy)
    copies = [replace(samples[-1], rollout_id=f"d{i}") for i in range(1, 6)]
    alone, expected = stepped(policy, without(samples, "distill"))
    unweighted = [replace(s, weight=0.0) for s in copies]
    result, actual = stepped(policy, [*without(samples, "distill"), *unweighted])
    assert torch.equal(actual, expected)
    assert result.loss == alone.loss
    result, actual = stepped(policy, [*without(samples, "distill"), *copies])
    _, distilled = stepped(policy, only([*samples[:-1], *copies], "distill"))
    assert relative_error(actual - distilled, expected) <= GRADIENT
    assert result.num_sequences == alone.num_sequences == NUM_POLICY_SEQUENCES
    assert result.num_loss_tokens == alone.num_loss_tokens == 20  # 8 + 6 + 6
    for term in TERMS[:3]:
        name = f"policy/loss_{term}"
        assert result.metrics[name] == pytest.approx(alone.metrics[name], abs=LOSS)


def test_a_distilled_sample_sees_its_prompt_and_itself():
    policy = trained(llama())
    samples = planned(policy)
    packed = pack([scored_branch(s) for s in samples], max_tokens=1000, pad_token_id=256)
    distilled = [s.term for s in samples].index("distill")
    seen = set()
    for batch in packed:
        for row, target in zip(batch.token_row_K, batch.token_target_K, strict=True):
            if batch.branches[row] == distilled:
                predictor = int(batch.predictors_N[batch.target_predictor_M[target]])
                line, node = divmod(predictor, batch.input_ids_RT.shape[1])
                is_visible = batch.is_visible_RTT[line, node]
                seen.add(tuple(batch.input_ids_RT[line, is_visible].tolist()))
    completion = samples[distilled].completion_ids
    assert seen == {PROMPT + completion[:t] for t in range(len(completion))}


@pytest.mark.parametrize("packing", [True, False])
def test_a_distilled_sample_is_told_of_given_its_prompt_alone(packing):
    policy = trained(llama())
    samples = planned(policy)
    result, _ = stepped(policy, samples, replace(CONFIG, packing=packing))
    by_id = {s.rollout_id: s for s in result.samples}
    with torch.no_grad():
        alone = alone_logprobs(policy, samples[-1]).mean().item()
    stats = by_id[DISTILLED]
    assert stats.num_loss_tokens == 4
    assert stats.policy_logprob_mean == pytest.approx(alone, abs=LOGPROB)
    assert by_id["s0"].policy_logprob_mean != pytest.approx(alone, abs=1e-2)
    given = {"rollout_id", "num_loss_tokens", "policy_logprob_mean"}
    assert {name for name, value in vars(stats).items() if value is not None} == given
    assert by_id["r0"].kl_mean > 0


@pytest.mark.parametrize("correction", ["none", "token_truncate", "sequence_geometric_mask"])
def test_what_the_sampler_thought_of_a_distilled_sample_does_not_matter(correction):
    policy = trained(llama())
    config = replace(CONFIG, correction=correction)
    *others, distilled = planned(policy)
    result, expected = stepped(policy, [*others, distilled], config)
    for change in (
        {"sampler_logprobs": None},
        {"sampler_logprobs": (-30.0, -1e-9, -9.0, -0.1), "advantage": -7.0},
    ):
        changed, actual = stepped(policy, [*others, replace(distilled, **change)], config)
        assert torch.equal(actual, expected)
        assert replace(changed, elapsed_s=0.0) == replace(result, elapsed_s=0.0)


def test_on_policy_metrics_hold_no_distilled_token():
    policy = trained(llama())
    samples = planned(policy)
    with_it, _ = stepped(policy, samples)
    without_it, _ = stepped(policy, without(samples, "distill"))
    distill = {name for name in with_it.metrics if name.startswith("distill/")}
    assert distill == {"distill/loss", "distill/count", "distill/token_share"}
    for name in set(with_it.metrics) - distill:
        assert with_it.metrics[name] == pytest.approx(without_it.metrics[name], abs=LOGPROB), name


def test_metrics_tell_the_terms_apart():
    policy = trained(llama())
    result, _ = stepped(policy, planned(policy))
    metrics = result.metrics
    assert metrics["distill/count"] == 1.0
    assert metrics["distill/token_share"] == 4 / 24
    for name, column in (("kl/ref", "kl_mean"), ("explore/entropy", "entropy_mean")):
        for term, ids in (("attempt", "y"), ("review", "r"), ("second_attempt", "s")):
            own = [s for s in result.samples if s.rollout_id[0] == ids]
            total = sum(getattr(s, column) * s.num_loss_tokens for s in own)
            mean = total / sum(s.num_loss_tokens for s in own)
            assert metrics[f"{name}_{term}"] == pytest.approx(mean)
        assert f"{name}_distill" not in metrics


def test_attempts_alone_have_the_metrics_they_always_had():
    policy = trained(llama())
    result, _ = stepped(policy, planned(policy)[:3])
    assert not [name for name in result.metrics if "attempt" in name or "distill" in name]


# ---- equal outcomes, splits, several steps


@pytest.mark.parametrize("skip_zero_advantage", [True, False])
def test_equal_outcomes_without_a_distilled_sample_are_no_step(skip_zero_advantage):
    policy = trained(llama())
    before = policy.adapter_digest()
    config = replace(CONFIG, kl_coef=0.0, skip_zero_advantage=skip_zero_advantage)
    samples = [replace(s, advantage=0.0) for s in without(planned(policy), "distill")]
    result = Learner(policy, config).step(samples)
    assert result.is_skipped
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert all(map(math.isfinite, result.metrics.values()))
    assert policy.adapter_digest() == before


@pytest.mark.parametrize("skip_zero_advantage", [True, False])
def test_where_all_second_attempts_succeed_distillation_alone_teaches(skip_zero_advantage):
    policy = trained(llama())
    config = replace(CONFIG, kl_coef=0.0, skip_zero_advantage=skip_zero_advantage)
    samples = [replace(s, advantage=0.0) for s in planned(policy)]
    result, actual = stepped(policy, samples, config)
    assert not result.is_skipped
    assert relative_error(actual, by_hand(policy, samples, "distill")[1]) <= GRADIENT
    assert all(map(math.isfinite, [result.loss, result.grad_norm, *result.metrics.values()]))
    assert result.metrics["distill/token_share"] == 4 / 24
    assert result.num_sequences == NUM_POLICY_SEQUENCES


def test_the_split_into_micro_batches_changes_no_term():
    policy = trained(llama())
    samples = planned(policy)
    first, expected = stepped(policy, samples)
    for packing, micro_batch_tokens in ((True, 1), (True, 1000), (False, 16), (False, 1000)):
        config = replace(CONFIG, packing=packing, micro_batch_tokens=micro_batch_tokens)
        result, actual = stepped(policy, samples, config)
        assert relative_error(actual, expected) <= GRADIENT
        assert result.loss == pytest.approx(first.loss, abs=LOSS)
        assert result.metrics == pytest.approx(first.metrics, abs=LOGPROB)


def test_in_a_later_step_distillation_has_neither_ratio_nor_clip():
    policy = trained(llama())
    samples = [replace(s, advantage=1.0) for s in planned(policy)]
    learner = Learner(policy, replace(CONFIG, correction="none", kl_coef=0.0, learning_rate=3e-2))
    learner.prepare(samples)
    for _ in range(3):
        moved = learner.step(samples)
    _, expected = by_hand(policy, samples, "distill")
    learner.step(only(samples, "distill"))
    assert moved.metrics["clip/frac_high"] > 0.5
    assert moved.samples[-1].ratio_mean is None
    assert relative_error(gradient(policy), expected) <= GRADIENT


# ---- refusals


def test_distilled_samples_need_sequences_to_be_divided_by():
    policy = trained(llama())
    before = policy.adapter_digest()
    *others, distilled = planned(policy)
    learner = Learner(policy, CONFIG)
    lacking = [replace(s, sampler_logprobs=None) for s in others]  # they leave a corrected loss
    for samples in ([distilled], [*lacking, distilled]):
        with pytest.raises(LearnerError, match="rollout d0: expected sequences of policy terms"):
            learner.step(samples)
    assert policy.adapter_digest() == before


@pytest.mark.parametrize("index", [3, 5, 7])
def test_a_critic_learns_from_attempts_only(index):
    policy = trained(llama())
    samples = [replace(s, reward=0.0) for s in planned(policy)]
    config = replace(CONFIG, algorithm="ppo")
    with pytest.raises(LearnerError, match=f"under `ppo`, .* {samples[index].term},"):
        Learner(policy, config).step([*samples[:3], samples[index]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"term": "control"}, "attempt, review, second_attempt, distill, got 'control'"),
        ({"term": "distill", "prefix_ids": (60,)}, "no given tokens in a distilled sample, got 1"),
        ({"term": "distill", "prefix_advantage": 0.5}, "got 0 with advantage 0.5"),
    ],
)
def test_a_sample_of_no_such_term_is_refused(change, message):
    policy = trained(llama())
    samples = planned(policy)
    samples[0] = replace(samples[0], **change)
    with pytest.raises(LearnerError, match=f"rollout y0: expected .*{message}"):
        Learner(policy, CONFIG).step(samples)
