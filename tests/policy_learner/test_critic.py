"""The critic: its values, and that it and the policy never touch each other."""

from dataclasses import replace

import pytest
import torch

from rrl_core.policy.adapters import AdapterError, active_adapter, adapter_parameters
from rrl_core.policy.critic import CRITIC, Critic, CriticError
from rrl_core.policy.learner import Learner, LearnerConfig
from rrl_core.policy.model import ModelSpec, load_policy_model
from rrl_core.policy.packing import Branch, pack
from tests.policy_learner.models import (
    ARCHITECTURES,
    GROUPS,
    gpt2,
    gradient,
    llama,
    make_samples,
    relative_error,
    trained,
)

VALUE = 2e-5  # absolute
GRADIENT = 1e-4  # relative
BRANCHES = [Branch(prompt, ids) for prompt, group in GROUPS.values() for ids in group]
CONFIG = LearnerConfig(algorithm="ppo", critic_warmup=0, correction="none", learning_rate=1e-2)


def new_critic(policy, seed=0):
    return Critic(policy, learning_rate=1e-2, seed=seed)


def grown(critic, seed=4, std=0.1):
    """Give the critic weights whose values depend on every part of it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in critic.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return critic


def alone_values(policy, critic, branch):
    """Return V of the states before each token and after the last one [T + 1]: one sequence."""
    hidden = policy.model(
        input_ids=torch.tensor([branch.prompt_ids + branch.completion_ids]),
        output_hidden_states=True,
    ).hidden_states[-1][0, len(branch.prompt_ids) - 1 :]
    parameters = critic.parameters
    return hidden.float() @ parameters["head.weight"] + parameters["head.bias"]


def critic_gradient(critic):
    return torch.cat([p.grad.flatten() for p in critic.parameters.values()])


@pytest.fixture(params=ARCHITECTURES)
def policy(request):
    return trained(ARCHITECTURES[request.param]())


def test_a_new_critic_says_nothing_and_leaves_the_policy_as_it_was(policy):
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        logits, adapter = policy.model(ids).logits, policy.adapter_bytes()
        critic = new_critic(policy)
        assert torch.equal(policy.model(ids).logits, logits)
    assert policy.adapter_bytes() == adapter
    assert all(p.requires_grad for p in adapter_parameters(policy.model).values())
    assert not any(values.any() for values in critic.values(BRANCHES, max_tokens=64))
    own = {id(p) for p in adapter_parameters(policy.model).values()}
    assert not own & {id(p) for p in critic.parameters.values()}


def test_values_are_those_of_each_sequence_run_alone(policy):
    critic = grown(new_critic(policy))
    found = critic.values(BRANCHES, max_tokens=20)
    with torch.no_grad(), active_adapter(policy.model, CRITIC):
        for branch, values in zip(BRANCHES, found, strict=True):
            expected = alone_values(policy, critic, branch)[:-1]
            torch.testing.assert_close(values, expected, atol=VALUE, rtol=0)
    assert float(torch.cat(found).std()) > 100 * VALUE  # the test could fail


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 30, 1000])
def test_neither_packing_nor_the_split_changes_a_value(share_prefix, max_tokens):
    critic = grown(new_critic(llama()))
    expected = torch.cat(critic.values(BRANCHES, max_tokens=64))
    found = critic.values(BRANCHES, max_tokens=max_tokens, share_prefix=share_prefix)
    torch.testing.assert_close(torch.cat(found), expected, atol=VALUE, rtol=0)


def test_gradients_are_those_of_each_sequence_run_alone(policy):
    critic = grown(new_critic(policy))
    with critic.gradients():
        sum(alone_values(policy, critic, b)[:-1].square().sum() for b in BRANCHES).backward()
    expected = critic_gradient(critic)
    with critic.gradients():
        for batch in pack(BRANCHES, max_tokens=30, pad_token_id=policy.pad_token_id):
            values_BT, mask_BT = critic.batch_values(batch)
            lengths = [len(BRANCHES[i].completion_ids) for i in batch.branches]
            assert mask_BT.sum(dim=1).tolist() == lengths
            values_BT.square().sum().backward()
    assert relative_error(critic_gradient(critic), expected) <= GRADIENT
    assert all(p.grad.any() for p in critic.parameters.values())


def test_steps_of_the_critic_leave_adapter_gradient_and_policy_untouched(policy):
    learner = Learner(policy, replace(CONFIG, algorithm="grpo"))
    learner.step(make_samples())  # leaves a gradient behind
    critic = grown(new_critic(policy))
    adapter, own_gradient = policy.adapter_bytes(), gradient(policy)
    before = critic.digest()
    with critic.gradients():
        for batch in pack(BRANCHES, max_tokens=30, pad_token_id=policy.pad_token_id):
            critic.batch_values(batch)[0].square().sum().backward()
    critic.update(1.0)
    assert critic.digest() != before
    assert policy.adapter_bytes() == adapter
    assert torch.equal(gradient(policy), own_gradient)
    assert policy.model.active_adapter == "default"


def test_steps_of_the_policy_leave_the_critic_and_its_gradient_untouched(policy):
    critic = grown(new_critic(policy))
    with critic.gradients():
        for batch in pack(BRANCHES, max_tokens=30, pad_token_id=policy.pad_token_id):
            critic.batch_values(batch)[0].square().sum().backward()
    state, own_gradient = critic.to_bytes(), critic_gradient(critic)
    adapter = policy.adapter_digest()
    Learner(policy, replace(CONFIG, algorithm="grpo", kl_coef=0.1)).step(make_samples())
    assert policy.adapter_digest() != adapter
    assert critic.to_bytes() == state
    assert torch.equal(critic_gradient(critic), own_gradient)


def test_a_critic_does_not_change_what_the_policy_learns():
    outcomes = []
    for with_critic in (False, True):
        policy = trained(llama())
        if with_critic:
            grown(new_critic(policy))
        learner = Learner(policy, replace(CONFIG, algorithm="grpo", kl_coef=0.1))
        result = replace(learner.step(make_samples()), elapsed_s=0.0)
        outcomes.append((result, policy.adapter_bytes(), learner.optimizer_state()))
        merged = dict(policy.merged_weights())
        assert not any("lora" in name or CRITIC in name for name in merged)
    assert outcomes[0] == outcomes[1]


def test_a_critic_is_drawn_from_its_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    digests = [new_critic(llama(), seed).digest() for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_second_critic_of_a_policy_is_refused():
    policy = llama()
    new_critic(policy)
    with pytest.raises(AdapterError, match="without an adapter 'critic'"):
        new_critic(policy)


def test_values_of_a_bfloat16_policy_are_float32():
    policy = load_policy_model(ModelSpec("tiny", dtype="bfloat16", device="cpu"), seed=0)
    critic = grown(new_critic(policy))
    assert {p.dtype for p in critic.parameters.values()} == {torch.float32}
    values = torch.cat(critic.values(BRANCHES, max_tokens=64))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


# ---- bytes


def stepped(critic):
    with critic.gradients():
        for batch in pack(BRANCHES, max_tokens=30, pad_token_id=256):
            (critic.batch_values(batch)[0] - 1).square().sum().backward()
    critic.update(1.0)


def test_a_critic_read_back_goes_on_bit_for_bit():
    critic = new_critic(llama())
    stepped(critic)
    critic.num_iterations = 5
    data = critic.to_bytes()
    again = new_critic(llama(), seed=9)
    again.from_bytes(data)
    assert again.to_bytes() == data
    assert again.num_iterations == 5
    stepped(critic)
    stepped(again)
    assert again.to_bytes() == critic.to_bytes() != data


@pytest.mark.parametrize("cut", [0, 40, -1])
def test_damaged_bytes_are_refused_and_change_nothing(cut):
    critic = new_critic(llama())
    data = critic.to_bytes()[:cut]
    before = critic.to_bytes()
    with pytest.raises(CriticError, match=f"got {len(data)} bytes that are not"):
        critic.from_bytes(data)
    assert critic.to_bytes() == before


def test_a_critic_of_another_model_is_refused_and_changes_nothing():
    critic, other = new_critic(llama()), new_critic(gpt2())
    before = critic.to_bytes()
    with pytest.raises(AdapterError, match="another base model"):
        critic.from_bytes(other.to_bytes())
    assert critic.to_bytes() == before
