"""What a step leaves out, refuses and remembers."""

from dataclasses import replace

import pytest
import torch

from rrl_core.policy.learner import Learner, LearnerConfig, LearnerError, LearnSample
from rrl_core.policy.model import ModelSpec, load_policy_model
from rrl_core.policy.optimizer import OptimizerStateError
from tests.policy_learner.models import (
    alone_logprobs,
    gpt2,
    gradient,
    llama,
    make_samples,
    relative_error,
    trained,
)

GRADIENT = 1e-4  # relative
LOGPROB = 5e-5  # absolute, nats
CONFIG = LearnerConfig(correction="none", micro_batch_tokens=30, learning_rate=1e-2)


def stepped(samples, config=CONFIG, policy=None):
    """Return (result, gradient) of one step of a new learner."""
    policy = policy or trained(llama())
    result = Learner(policy, config).step(samples)
    return result, gradient(policy)


def test_samples_without_advantage_are_not_run_and_stay_in_the_denominators():
    samples = make_samples()  # the two of group c have advantage 0
    quick, quick_gradient = stepped(samples)
    full, full_gradient = stepped(samples, replace(CONFIG, skip_zero_advantage=False))
    assert relative_error(quick_gradient, full_gradient) <= GRADIENT
    assert quick.loss == pytest.approx(full.loss, abs=1e-6)
    assert quick.num_sequences == full.num_sequences == 9
    assert quick.num_loss_tokens == full.num_loss_tokens == 27
    skipped = quick.samples[-1]
    assert (skipped.num_loss_tokens, skipped.policy_logprob_mean) == (1, None)
    assert full.samples[-1].policy_logprob_mean is not None


@pytest.mark.parametrize("skip_zero_advantage", [True, False])
def test_nothing_to_teach_changes_nothing(skip_zero_advantage):
    policy = trained(llama())
    config = replace(CONFIG, skip_zero_advantage=skip_zero_advantage, weight_decay=0.1)
    learner = Learner(policy, config)
    learner.step(make_samples())  # momentum that would carry the adapter on
    before, state = policy.adapter_digest(), learner.optimizer_state()
    result = learner.step([replace(s, advantage=0.0) for s in make_samples()])
    assert result.is_skipped
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert policy.adapter_digest() == before
    assert learner.optimizer_state() == state
    has_statistics = result.samples[0].entropy_mean is not None
    assert has_statistics is not skip_zero_advantage


def test_without_advantages_the_kl_term_still_teaches():
    samples = [replace(s, advantage=0.0) for s in make_samples()]
    result, _ = stepped(samples, replace(CONFIG, kl_coef=0.1))
    assert not result.is_skipped
    assert result.grad_norm > 0


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_geometric_mask"])
def test_a_sample_without_log_probs_leaves_a_corrected_loss_as_if_it_were_not_there(correction):
    samples = make_samples(trained(llama()), noise=0.3)
    config = replace(CONFIG, correction=correction)
    lacking = [replace(samples[0], sampler_logprobs=None), *samples[1:]]
    with_it, gradient_with = stepped(lacking, config)
    without, gradient_without = stepped(samples[1:], config)
    assert torch.equal(gradient_with, gradient_without)
    assert with_it.num_loss_tokens == without.num_loss_tokens
    assert with_it.samples[0].num_loss_tokens == 0
    assert with_it.samples[1:] == without.samples


def test_uncorrected_a_sample_without_log_probs_stays():
    samples = make_samples(trained(llama()))
    expected, gradient_expected = stepped(samples)
    samples[0] = replace(samples[0], sampler_logprobs=None)
    result, actual = stepped(samples)
    assert torch.equal(actual, gradient_expected)
    assert result.loss == expected.loss
    assert result.samples[0].mismatch_mean is None
    assert result.samples[0].importance_mean == 1.0
    assert result.samples[1].mismatch_mean is not None
    assert result.metrics["is/mismatch"] <= LOGPROB  # over the samples that have log-probs


def test_an_empty_completion_leaves_the_loss():
    samples = make_samples()
    empty = LearnSample("empty", "a", (1, 2), (), (), 1.0)
    with_it, gradient_with = stepped([empty, *samples])
    _, gradient_without = stepped(samples)
    assert torch.equal(gradient_with, gradient_without)
    assert with_it.samples[0].num_loss_tokens == 0
    assert with_it.num_sequences == 9


def test_no_samples_are_no_step():
    result, _ = stepped_empty()
    assert result.is_skipped
    assert result.metrics == {}


def stepped_empty():
    policy = trained(llama())
    return Learner(policy, CONFIG).step([]), policy


def test_divergence_from_the_reference_is_zero_at_the_start_also_of_a_trained_adapter(tmp_path):
    (tmp_path / "adapter.safetensors").write_bytes(trained(llama()).adapter_bytes())
    spec = ModelSpec("tiny", device="cpu", start_adapter=tmp_path / "adapter.safetensors")
    policy = load_policy_model(spec, seed=0)
    learner = Learner(policy, replace(CONFIG, kl_coef=0.1))
    first = learner.step(make_samples())
    second = learner.step(make_samples())
    assert first.metrics["kl/ref"] == 0.0
    assert first.kl_loss == 0.0
    assert second.metrics["kl/ref"] > 0.0


def test_learning_makes_good_completions_likelier_and_bad_ones_less():
    policy = llama()
    learner = Learner(policy, CONFIG)
    samples = make_samples()
    good, bad = samples[0], samples[6]
    with torch.no_grad():
        before = [alone_logprobs(policy, s).sum().item() for s in (good, bad)]
        base = policy.model.get_base_model().get_input_embeddings().weight.clone()
    for _ in range(5):
        learner.step(samples)
    with torch.no_grad():
        after = [alone_logprobs(policy, s).sum().item() for s in (good, bad)]
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1] - 0.5
    assert torch.equal(policy.model.get_base_model().get_input_embeddings().weight, base)


def test_gradients_are_clipped_after_their_norm_is_taken():
    free, unclipped = stepped(make_samples(), replace(CONFIG, max_grad_norm=None))
    held, clipped = stepped(make_samples(), replace(CONFIG, max_grad_norm=free.grad_norm / 4))
    assert held.grad_norm == free.grad_norm
    torch.testing.assert_close(clipped, unclipped / 4, atol=0, rtol=1e-4)


# ---- one run is every run


def test_the_same_steps_give_the_same_bits():
    outcomes = []
    for _ in range(2):
        policy = trained(llama())
        learner = Learner(policy, replace(CONFIG, correction="token_truncate", kl_coef=0.05))
        samples = make_samples(policy, noise=0.3)
        results = [replace(learner.step(samples), elapsed_s=0.0) for _ in range(3)]
        outcomes.append((results, policy.adapter_digest(), learner.optimizer_state()))
    assert outcomes[0] == outcomes[1]


def test_a_resumed_learner_continues_bit_for_bit():
    samples = make_samples()
    policy = llama()
    learner = Learner(policy, CONFIG)
    learner.step(samples)
    adapter, state = policy.adapter_bytes(), learner.optimizer_state()
    straight = replace(learner.step(samples), elapsed_s=0.0)

    resumed_policy = llama()
    resumed = Learner(resumed_policy, CONFIG)
    resumed_policy.load_adapter_bytes(adapter)
    resumed.load_optimizer_state(state)
    assert resumed.optimizer_state() == state
    assert replace(resumed.step(samples), elapsed_s=0.0) == straight
    assert resumed_policy.adapter_digest() == policy.adapter_digest()
    assert resumed.optimizer_state() == learner.optimizer_state()


def test_without_its_state_the_optimizer_would_go_elsewhere():
    samples = make_samples()
    policy, other = llama(), llama()
    learner = Learner(policy, CONFIG)
    learner.step(samples)
    other.load_adapter_bytes(policy.adapter_bytes())
    learner.step(samples)
    Learner(other, CONFIG).step(samples)
    assert other.adapter_digest() != policy.adapter_digest()


def test_the_state_of_a_new_optimizer_can_be_loaded():
    learner = Learner(llama(), CONFIG)
    learner.load_optimizer_state(learner.optimizer_state())
    learner.step(make_samples())
    assert learner.optimizer_state() != Learner(llama(), CONFIG).optimizer_state()


@pytest.mark.parametrize("data", [b"", b"not safetensors at all", b"\x00" * 64])
def test_damaged_optimizer_states_are_refused(data):
    with pytest.raises(OptimizerStateError, match=f"got {len(data)} bytes"):
        Learner(llama(), CONFIG).load_optimizer_state(data)


def test_the_optimizer_state_of_another_adapter_is_refused_and_changes_nothing():
    llama_learner, gpt2_learner = Learner(llama(), CONFIG), Learner(gpt2(), CONFIG)
    llama_learner.step(make_samples())
    gpt2_learner.step(make_samples())
    before = gpt2_learner.optimizer_state()
    with pytest.raises(OptimizerStateError, match="saved with another model"):
        gpt2_learner.load_optimizer_state(llama_learner.optimizer_state())
    assert gpt2_learner.optimizer_state() == before
    larger = load_policy_model(ModelSpec("tiny", device="cpu"), seed=0)  # rank 16, not 4
    with pytest.raises(OptimizerStateError, match="other LoRA settings"):
        Learner(larger, CONFIG).load_optimizer_state(llama_learner.optimizer_state())


# ---- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "at least one prompt token"),
        ({"completion_ids": (1,) * 5000}, "at most 2048 tokens with its prompt, got 5005"),
        ({"sampler_logprobs": (-1.0,)}, "got 1 for 5"),
        ({"sampler_logprobs": (float("-inf"),) * 5}, "finite sampler log-probs"),
        ({"temperature": 0.0}, "temperature above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature above 0, got nan"),
        ({"advantage": float("nan")}, "got advantage nan"),
        ({"weight": float("inf")}, "weight inf"),
        ({"reward": float("nan")}, "finite reward, got nan"),
    ],
)
def test_a_malformed_sample_is_refused_by_name(change, message):
    samples = make_samples()
    samples[0] = replace(samples[0], **change)
    with pytest.raises(LearnerError, match=f"rollout a0: expected .*{message}"):
        stepped(samples)


def test_a_rollout_given_twice_is_refused():
    with pytest.raises(LearnerError, match="every rollout once, got 10 samples"):
        stepped([*make_samples(), make_samples()[3]])


def test_preparing_a_sample_of_several_steps_scores_it_once_and_skips_what_is_not_run():
    policy = llama()
    learner = Learner(policy, replace(CONFIG, learning_rate=3e-2))
    samples = make_samples()
    learner.prepare([*samples, *samples])
    learner.step(samples)
    twice = learner.step(samples)
    learner.prepare(samples)
    again = learner.step(samples)
    assert twice.samples[0].ratio_mean != pytest.approx(1.0, abs=1e-3)
    assert again.samples[0].ratio_mean == pytest.approx(1.0, abs=1e-5)


def test_a_step_on_partly_prepared_samples_is_refused():
    learner = Learner(llama(), CONFIG)
    samples = make_samples()
    learner.prepare(samples[:4])
    with pytest.raises(LearnerError, match="9 of which 5 are not, such as b0"):
        learner.step(samples)


def test_a_loss_that_is_not_finite_names_its_rollout_and_changes_nothing():
    policy = trained(gpt2())
    with torch.no_grad():  # only the longest sequence reaches position 9
        policy.model.get_base_model().transformer.wpe.weight[8] = float("nan")
    before = policy.adapter_digest()
    samples = [s for s in make_samples() if s.group_id != "c"]
    longest = LearnSample("long", "d", (1, 2), (3,) * 9, None, 1.0)
    with pytest.raises(LearnerError, match="rollout long: expected a finite loss"):
        stepped([*samples, longest], replace(CONFIG, packing=False), policy)
    assert policy.adapter_digest() == before


def test_a_gradient_that_is_not_finite_names_its_rollouts_and_changes_nothing():
    policy = trained(llama())
    learner = Learner(policy, replace(CONFIG, micro_batch_tokens=1))
    before, state = policy.adapter_digest(), learner.optimizer_state()
    samples = make_samples()
    samples[2] = replace(samples[2], advantage=1e38)
    with pytest.raises(LearnerError, match=r"finite gradient, .* of rollouts a2;"):
        learner.step(samples)
    assert policy.adapter_digest() == before
    assert learner.optimizer_state() == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "reinforce"}, "dapo, dr_grpo, grpo, gspo, ppo, raft, sft, got 'reinforce'"),
        ({"kl_estimator": "k4"}, "k1, k2, k3, got 'k4'"),
        ({"correction": "half"}, "got 'half'"),
        ({"correction_cap": 1.0}, "`correction_cap` to be above 1, got 1.0"),
        ({"dual_clip": 0.5}, "`dual_clip` to be above 1, or None, got 0.5"),
        ({"kl_coef": -0.1}, "`kl_coef` to be 0 or more, got -0.1"),
        ({"gamma": 0.0}, "`gamma` to be above 0 and at most 1, got 0.0"),
        ({"lam": 1.1}, "`lam` to be between 0 and 1, got 1.1"),
        ({"vf_coef": 0.0}, "`vf_coef` to be positive, got 0.0"),
        ({"value_clip": 0.0}, "`value_clip` to be positive, or None, got 0.0"),
        ({"critic_learning_rate": 0.0}, "`critic_learning_rate` to be positive, got 0.0"),
        ({"critic_warmup": -1}, "`critic_warmup` to be 0 or more, got -1"),
        ({"max_completion_tokens": 0}, "`max_completion_tokens` to be positive, got 0"),
    ],
)
def test_settings_outside_their_bounds_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_the_clip_range_is_the_algorithms_own_unless_given():
    assert replace(CONFIG, algorithm="dapo").clip_range == (0.2, 0.28)
    assert replace(CONFIG, algorithm="dapo", clip_high=0.5).clip_range == (0.2, 0.5)
    assert replace(CONFIG, algorithm="gspo").clip_range == (3e-4, 4e-4)
    assert CONFIG.clip_range == (0.2, 0.2)
