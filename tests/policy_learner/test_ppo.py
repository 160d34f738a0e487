"""PPO through the learner: advantages of tokens from a critic, and the critic's own learning."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from rrl_core.policy.adapters import active_adapter
from rrl_core.policy.critic import CRITIC
from rrl_core.policy.learner import Learner, LearnerConfig, LearnerError, LearnSample
from rrl_core.policy.optimizer import OptimizerStateError
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
from tests.policy_learner.test_critic import alone_values, critic_gradient, grown

LOSS = 2e-5
GRADIENT = 2e-4
CONFIG = LearnerConfig(
    algorithm="ppo", correction="none", max_grad_norm=None, micro_batch_tokens=24,
    learning_rate=1e-2, critic_learning_rate=1e-2, critic_warmup=0,
)  # fmt: skip
REWARDS = [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0, 1.0]
TRUNCATED = (1, 6)


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def rewarded(samples=None):
    """Give the samples rewards; two were cut off. Their group advantages must not matter."""
    return [
        replace(s, reward=reward, is_truncated=i in TRUNCATED, advantage=7.0)
        for i, (s, reward) in enumerate(zip(samples or make_samples(), REWARDS, strict=True))
    ]


def new_learner(policy, config=CONFIG):
    learner = Learner(policy, config)
    grown(learner.critic, std=0.05)
    return learner


def whole(sample):
    """Its given tokens as part of the prompt."""
    return replace(sample, prompt_ids=sample.prompt_ids + sample.prefix_ids, prefix_ids=())


def plain_targets(learner, samples, gamma=1.0, lam=1.0):
    """Return (values, whitened advantages, returns) of every sample, by float64 loops."""
    values, advantages = [], []
    with torch.no_grad(), active_adapter(learner.policy.model, CRITIC):
        judged = [alone_values(learner.policy, learner.critic, whole(s)).tolist() for s in samples]
    for sample, value in zip(samples, judged, strict=True):
        length = len(sample.completion_ids)
        following = [*value[1:length], value[length] if sample.is_truncated else 0.0]
        found, later = [0.0] * length, 0.0
        for t in reversed(range(length)):
            reward = sample.reward if t == length - 1 else 0.0
            later = reward + gamma * following[t] - value[t] + gamma * lam * later
            found[t] = later
        values.append(value[:length])
        advantages.append(found)
    flat = [a for row in advantages for a in row]
    mean = sum(flat) / len(flat)
    std = (sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)) ** 0.5
    returns = [
        [a + v for a, v in zip(*rows, strict=True)] for rows in zip(advantages, values, strict=True)
    ]
    whitened = [[(a - mean) / (std + 1e-4) for a in row] for row in advantages]
    return values, whitened, returns


def plain_policy_loss(policy, samples, advantages, old=None):
    """-(1/tokens) sum_i sum_t min(u A_it, clip(u) A_it)."""
    total, num_tokens = torch.zeros(()), sum(len(s.completion_ids) for s in samples)
    for index, (sample, row) in enumerate(zip(samples, advantages, strict=True)):
        logprobs = alone_logprobs(policy, whole(sample))
        before = logprobs.detach() if old is None else old[index]
        for t, advantage in enumerate(row):
            ratio = (logprobs[t] - before[t]).exp()
            gain = min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - sample.weight * gain / num_tokens
    return total


def plain_value_loss(learner, samples, old, returns):
    """(1/tokens) sum_i sum_t max((V - R)^2, (clipped V - R)^2)."""
    total, num_tokens = torch.zeros(()), sum(len(s.completion_ids) for s in samples)
    for sample, old_T, returns_T in zip(samples, old, returns, strict=True):
        values = alone_values(learner.policy, learner.critic, whole(sample))
        for t, (before, target) in enumerate(zip(old_T, returns_T, strict=True)):
            clipped = before + (values[t] - before).clamp(-0.2, 0.2)
            error = max((values[t] - target) ** 2, (clipped - target) ** 2)
            total = total + sample.weight * error / num_tokens
    return total


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95)])
def test_losses_and_gradients_are_those_of_the_formulas(policy, gamma, lam):
    samples = rewarded()
    samples[2] = replace(samples[2], weight=0.5)
    learner = new_learner(policy, replace(CONFIG, gamma=gamma, lam=lam))
    values, advantages, returns = plain_targets(learner, samples, gamma, lam)
    plain = plain_policy_loss(policy, samples, advantages)
    expected = gradient_of(policy, plain)
    with learner.critic.gradients():
        fit = plain_value_loss(learner, samples, values, returns)
        (0.5 * fit).backward()
    expected_of_critic = critic_gradient(learner.critic)
    result = learner.step(samples)
    assert result.policy_loss == pytest.approx(plain.item(), abs=LOSS)
    assert result.metrics["value_loss"] == pytest.approx(fit.item(), abs=LOSS)
    assert result.loss == pytest.approx(plain.item() + 0.5 * fit.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert relative_error(critic_gradient(learner.critic), expected_of_critic) <= GRADIENT
    norm = float(expected_of_critic.norm())
    assert result.metrics["critic/grad_norm"] == pytest.approx(norm, rel=GRADIENT)
    flat_values, flat_returns = (torch.tensor([*chain(*rows)]) for rows in (values, returns))
    explained = 1 - ((flat_returns - flat_values).var() / flat_returns.var()).item()
    assert result.metrics["explained_variance"] == pytest.approx(explained, abs=1e-4)


def test_later_steps_of_an_iteration_keep_the_targets_of_its_beginning(policy):
    samples = rewarded()
    learner = new_learner(policy, replace(CONFIG, learning_rate=3e-2, critic_learning_rate=3e-2))
    values, advantages, returns = plain_targets(learner, samples)
    with torch.no_grad():
        old = [alone_logprobs(policy, sample) for sample in samples]
    learner.prepare(samples)
    learner.step(samples)
    plain = plain_policy_loss(policy, samples, advantages, old)
    expected = gradient_of(policy, plain)
    with torch.no_grad(), active_adapter(policy.model, CRITIC):
        fit = plain_value_loss(learner, samples, values, returns)
    second = learner.step(samples)
    assert second.metrics["clip/frac_high"] > 0
    assert second.policy_loss == pytest.approx(plain.item(), abs=LOSS)
    assert second.metrics["value_loss"] == pytest.approx(fit.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert learner.critic.num_iterations == 1


def test_a_prepared_step_is_the_unprepared_one():
    outcomes = []
    for is_prepared in (False, True):
        policy = trained(llama())
        learner = new_learner(policy)
        learner.prepare(rewarded() if is_prepared else [])
        result = learner.step(rewarded())
        outcomes.append((result.loss, gradient(policy), learner.critic.num_iterations))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], abs=LOSS)
    assert relative_error(outcomes[0][1], outcomes[1][1]) <= GRADIENT
    assert outcomes[0][2] == outcomes[1][2] == 1


def test_neither_packing_nor_the_split_into_micro_batches_changes_anything():
    outcomes = []
    for packing in (True, False):
        for micro_batch_tokens in (1, 16, 1000):
            policy = trained(llama())
            learner = new_learner(
                policy,
                replace(CONFIG, packing=packing, micro_batch_tokens=micro_batch_tokens, lam=0.9),
            )
            result = learner.step(rewarded())
            outcomes.append((result, gradient(policy), critic_gradient(learner.critic)))
    first, expected, expected_of_critic = outcomes[0]
    for result, actual, actual_of_critic in outcomes[1:]:
        assert relative_error(actual, expected) <= GRADIENT
        assert relative_error(actual_of_critic, expected_of_critic) <= GRADIENT
        assert result.loss == pytest.approx(first.loss, abs=LOSS)
        assert result.metrics == pytest.approx(first.metrics, abs=1e-4)


def test_a_sample_that_leaves_the_loss_is_as_if_it_were_not_there():
    # corrected, a sample without log-probs has neither policy nor value loss; nor has an empty one
    config = replace(CONFIG, correction="token_truncate")
    samples = rewarded(make_samples(trained(llama()), noise=0.3))
    empty = LearnSample("empty", "a", (1, 2), (), (), 0.0, reward=1.0)
    outcomes = []
    for batch in ([empty, replace(samples[0], sampler_logprobs=None), *samples[1:]], samples[1:]):
        policy = trained(llama())
        learner = new_learner(policy, config)
        result = learner.step(batch)
        outcomes.append((gradient(policy), critic_gradient(learner.critic), result))
    (first, first_of_critic, result), (second, second_of_critic, alone) = outcomes
    assert torch.equal(first, second)
    assert torch.equal(first_of_critic, second_of_critic)
    assert result.metrics == alone.metrics
    assert [s.num_loss_tokens for s in result.samples[:2]] == [0, 0]


def test_truncation_decides_what_a_completion_without_reward_was_worth():
    # V = 0.6 everywhere, no reward: cut off, the return of every token is 0.6, ended it is 0
    sample = replace(make_samples()[0], reward=0.0)
    losses = []
    for is_truncated in (True, False):
        learner = Learner(llama(), CONFIG)
        with torch.no_grad():
            learner.critic.parameters["head.bias"].fill_(0.6)
        result = learner.step([replace(sample, is_truncated=is_truncated)])
        losses.append(result.metrics["value_loss"])
    assert losses == pytest.approx([0.0, 0.36], abs=LOSS)


# ---- given tokens of a continuation


def continuations(num_given=2, **changes):
    found = []
    for sample in rewarded():
        given, rest = sample.completion_ids[:num_given], sample.completion_ids[num_given:]
        if rest:
            found.append(replace(sample, prefix_ids=given, completion_ids=rest, **changes))
    return found


def test_given_tokens_have_neither_policy_nor_value_loss(policy):
    samples = continuations()
    learner = new_learner(policy)
    values, advantages, returns = plain_targets(learner, samples)
    plain = plain_policy_loss(policy, samples, advantages)
    expected = gradient_of(policy, plain)
    with learner.critic.gradients():
        (0.5 * plain_value_loss(learner, samples, values, returns)).backward()
    expected_of_critic = critic_gradient(learner.critic)
    result = learner.step(samples)
    assert result.policy_loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert relative_error(critic_gradient(learner.critic), expected_of_critic) <= GRADIENT


def test_credited_given_tokens_have_the_prefix_term_and_still_no_value_loss(policy):
    samples = continuations(prefix_advantage=0.7)
    learner = new_learner(policy)
    values, advantages, returns = plain_targets(learner, samples)
    plain = plain_policy_loss(policy, samples, advantages)
    for sample in samples:  # -(1/N) sum_i A_pre mean_t log pi(prefix_t)
        given = alone_logprobs(policy, replace(sample, completion_ids=sample.prefix_ids))
        plain = plain - 0.7 * given.mean() / len(samples)
    expected = gradient_of(policy, plain)
    with learner.critic.gradients():
        (0.5 * plain_value_loss(learner, samples, values, returns)).backward()
    expected_of_critic = critic_gradient(learner.critic)
    learner.prepare(samples)
    result = learner.step(samples)
    assert result.policy_loss == pytest.approx(plain.item(), abs=LOSS)
    assert relative_error(gradient(policy), expected) <= GRADIENT
    assert relative_error(critic_gradient(learner.critic), expected_of_critic) <= GRADIENT


# ---- over iterations


@pytest.mark.parametrize("num_steps", [1, 2])
def test_for_its_first_iterations_only_the_critic_learns(num_steps):
    policy = trained(llama())
    learner = Learner(policy, replace(CONFIG, critic_warmup=2, kl_coef=0.1))
    moved = []
    for _ in range(3):
        if num_steps > 1:
            learner.prepare(rewarded())
        for _ in range(num_steps):
            adapter, critic = policy.adapter_digest(), learner.critic.digest()
            result = learner.step(rewarded())
            moved.append((policy.adapter_digest() != adapter, learner.critic.digest() != critic))
            assert not result.is_skipped
            assert (result.grad_norm > 0) == moved[-1][0]
    assert moved == [(False, True)] * 2 * num_steps + [(True, True)] * num_steps


def test_the_critic_learns_what_completions_are_worth():
    learner = Learner(llama(), replace(CONFIG, critic_warmup=40, value_clip=None))
    results = [learner.step(rewarded()).metrics for _ in range(40)]
    assert results[0]["explained_variance"] == 0.0  # all values are 0 at first
    assert results[-1]["explained_variance"] > 0.5
    assert results[-1]["value_loss"] < results[0]["value_loss"] / 4


def test_equal_advantages_move_the_critic_and_not_the_policy():
    # a new critic says 0 everywhere and all are rewarded: every advantage is 1, whitened 0
    policy = trained(llama())
    before = policy.adapter_digest()
    result = Learner(policy, CONFIG).step(
        [replace(s, reward=1.0, is_truncated=False) for s in rewarded()]
    )
    assert policy.adapter_digest() == before
    assert result.metrics.keys() == {"value_loss", "critic/grad_norm"}  # nothing to explain
    assert result.metrics["value_loss"] == pytest.approx(1.0, abs=LOSS)
    assert result.metrics["critic/grad_norm"] > 0
    assert not result.is_skipped


def test_no_samples_are_no_step_and_no_iteration():
    learner = Learner(llama(), CONFIG)
    before = learner.optimizer_state()
    learner.prepare([])
    assert learner.step([]).is_skipped
    assert learner.optimizer_state() == before


# ---- one run is every run


def take(learner, num_iterations):
    outcomes = []
    for _ in range(num_iterations):
        learner.prepare(rewarded())
        outcomes += [replace(learner.step(rewarded()), elapsed_s=0.0) for _ in range(2)]
    return outcomes


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_resumed_learner_continues_bit_for_bit_also_within_the_warm_up(num_before):
    config = replace(CONFIG, critic_warmup=2, lam=0.95, kl_coef=0.05, max_grad_norm=1.0)
    policy = llama()
    learner = Learner(policy, config)
    take(learner, num_before)
    adapter, state = policy.adapter_bytes(), learner.optimizer_state()
    straight = take(learner, 3 - num_before)

    resumed_policy = llama()
    resumed = Learner(resumed_policy, replace(config, critic_seed=5))
    resumed_policy.load_adapter_bytes(adapter)
    resumed.load_optimizer_state(state)
    assert resumed.optimizer_state() == state
    assert take(resumed, 3 - num_before) == straight
    assert resumed_policy.adapter_digest() == policy.adapter_digest()
    assert resumed.optimizer_state() == learner.optimizer_state()
    assert straight[-1].grad_norm > 0  # the last iteration moved the policy


def test_a_run_may_go_on_under_an_algorithm_with_a_critic_and_without():
    plain = Learner(llama(), replace(CONFIG, algorithm="grpo"))
    plain.step(make_samples())
    with_critic = Learner(llama(), CONFIG)
    critic = with_critic.critic.to_bytes()
    with_critic.load_optimizer_state(plain.optimizer_state())
    assert with_critic.critic.to_bytes() == critic
    back = Learner(llama(), replace(CONFIG, algorithm="grpo"))
    back.load_optimizer_state(with_critic.optimizer_state())
    assert back.optimizer_state() == plain.optimizer_state()


def test_damaged_states_are_refused():
    learner = Learner(llama(), CONFIG)
    learner.step(rewarded())
    state = learner.optimizer_state()
    for data in (b"", state[:-1], learner.critic.to_bytes()):
        with pytest.raises(OptimizerStateError, match=f"got {len(data)} bytes"):
            learner.load_optimizer_state(data)


def test_a_sample_without_a_reward_is_refused_by_name():
    samples = rewarded()
    samples[3] = replace(samples[3], reward=None)
    learner = Learner(llama(), CONFIG)
    for take_them in (learner.step, learner.prepare):
        with pytest.raises(LearnerError, match="rollout a3: expected a reward"):
            take_them(samples)


def test_a_value_loss_that_is_not_finite_names_its_rollout_and_changes_nothing():
    policy = trained(llama())
    learner = new_learner(policy)
    samples = rewarded()
    samples[4] = replace(samples[4], reward=1e30)  # squared it is infinite in float32
    before = policy.adapter_digest(), learner.critic.digest()
    with pytest.raises(LearnerError, match="rollout b0: expected a finite loss"):
        learner.step(samples)
    assert (policy.adapter_digest(), learner.critic.digest()) == before
