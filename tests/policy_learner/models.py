"""Policies and samples made for tests, and log-probs computed the slow, obvious way."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rrl_core.policy.adapters import LoraSettings, adapter_parameters, attach_adapter
from rrl_core.policy.learner import LearnSample
from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.policy.packing import Branch

VOCABULARY = 259  # of tiny and of the GPT-2


def in_memory(base: PreTrainedModel, lora: LoraSettings | None = None) -> Policy:
    """Return a policy of a model that has no tokenizer."""
    lora = lora or LoraSettings(rank=4)
    return Policy(
        model=attach_adapter(base, lora, seed=0),
        tokenizer=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        lora=lora,
        base_digest="",
        model_path=None,
        context_tokens=base.config.max_position_embeddings,
        eos_token_ids=frozenset({258}),
        pad_token_id=256,
    )


def random_weights(base: PreTrainedModel, std: float = 0.15) -> PreTrainedModel:
    """Make every matrix large enough that context and positions matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(base.named_parameters()):
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return base


def llama() -> Policy:
    return load_policy_model(ModelSpec("tiny", device="cpu", lora=LoraSettings(rank=4)), seed=0)


def gpt2() -> Policy:
    """Return a GPT-2: learned absolute positions, Conv1D layers, dropout in its configuration."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128,
        bos_token_id=257, eos_token_id=258,
    )  # fmt: skip
    return in_memory(random_weights(GPT2LMHeadModel(config)))


ARCHITECTURES: dict[str, Callable[[], Policy]] = {"llama": llama, "gpt2": gpt2}


def trained(policy: Policy, seed: int = 3, std: float = 0.1) -> Policy:
    """Give the adapter weights that change the policy: fresh ones do not."""
    generator = torch.Generator().manual_seed(seed)
    policy.load_adapter_state(
        {
            name: torch.randn(tensor.shape, generator=generator) * std
            for name, tensor in policy.adapter_state().items()
        }
    )
    return policy


def alone_logprobs(policy: Policy, sample: LearnSample | Branch) -> Tensor:
    """Return the completion's log-probs [T]: one sequence, no mask, all logits; differentiable."""
    input_ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits_TV = policy.model(input_ids=input_ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV.float() / sample.temperature, dim=-1)
    return logprobs_TV.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]


def gradient(policy: Policy) -> Tensor:
    """Return the adapter's gradient as one vector."""
    return torch.cat([p.grad.flatten() for p in adapter_parameters(policy.model).values()])


def gradient_of(policy: Policy, loss: Tensor) -> Tensor:
    """Return d loss / d adapter as one vector."""
    policy.model.zero_grad()
    loss.backward()
    return gradient(policy).clone()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# Three groups: shared beginnings, one completion the prefix of another, repeats, uneven lengths.
GROUPS = {
    "a": ((1, 2, 3, 4, 5), [(10, 11, 12, 13, 258), (10, 11, 14), (20, 258), (10, 11)]),
    "b": ((6, 7), [(30, 258), (30, 258), (31, 32, 33, 34, 35, 36, 37, 38)]),
    "c": ((1, 2, 3, 8, 9, 10, 11, 12), [(256, 258), (40,)]),
}
ADVANTAGES = {"a": [1.5, -0.5, -0.5, -0.5], "b": [0.7, 0.7, -1.4], "c": [0.0, 0.0]}


def make_samples(
    policy: Policy | None = None, temperature: float = 1.0, noise: float = 0.0
) -> list[LearnSample]:
    """Return nine samples in three groups; sampler log-probs are the policy's own plus noise."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for group_id, (prompt_ids, completions) in GROUPS.items():
        for index, completion_ids in enumerate(completions):
            branch = Branch(prompt_ids, completion_ids, temperature)
            logprobs = None
            if policy is not None:
                with torch.no_grad():
                    exact = alone_logprobs(policy, branch)
                drawn = torch.randn(exact.shape, generator=generator) * noise
                logprobs = tuple((exact + drawn).tolist())
            samples.append(
                LearnSample(
                    rollout_id=f"{group_id}{index}",
                    group_id=group_id,
                    prompt_ids=prompt_ids,
                    completion_ids=completion_ids,
                    sampler_logprobs=logprobs,
                    advantage=ADVANTAGES[group_id][index],
                    temperature=temperature,
                )
            )
    return samples
