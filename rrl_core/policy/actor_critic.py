"""What a critic adds to a step: the advantage of every token before it, and the critic's own step.

Our choices:
1. Old values, advantages and returns are those of the critic before the iteration's first step.
   Advantages are whitened over the tokens of all samples that were judged together.
2. The value loss has the reduction and the denominators of the policy term; a sample's weight
   multiplies it, corrections for the sampler do not.
3. Given tokens of a continuation have no value loss, not even with prefix credit: they were chosen
   because they proved worth it, so what follows them says too much of the states before. Nor have
   those that a tool or an environment said between two turns: they are no steps of the policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rrl_core.algorithms.gae import explained_variance, gae, value_loss, whiten
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.reduce import Denominators, reduce_loss
from rrl_core.policy.critic import Critic
from rrl_core.policy.loss import check_gradient, check_loss
from rrl_core.policy.packing import Branch, pack
from rrl_core.policy.records import LearnerConfig, LearnSample
from rrl_core.policy.samples import padded, trained_tokens

_UNREAD = 0  # the last token of a packed completion is a target and never run


@dataclass(frozen=True)
class Estimate:
    """What is known of a sample's T tokens before the iteration's first step: float32, on the CPU.

    `values_T`: V of the state before each token. `returns_T`: what it should have been.
    `advantages_T`: whitened.
    """

    values_T: Tensor
    returns_T: Tensor
    advantages_T: Tensor


def estimate(
    critic: Critic, samples: Sequence[LearnSample], config: LearnerConfig
) -> dict[str, Estimate]:
    """Judge samples with the critic as it is.

    Args:
        critic: is not changed.
        samples: with a reward and a completion each.
        config: of the learner.

    Returns:
        The estimate of each sample by rollout id.
    """
    if not samples:
        return {}
    values = critic.values(
        [_judged(s) for s in samples],
        max_tokens=config.micro_batch_tokens,
        share_prefix=config.packing,
    )
    lengths = [len(s.completion_ids) for s in samples]
    rewards_BT = torch.zeros((len(samples), max(lengths)))
    mask_BT = padded([_trained(s) for s in samples], rewards_BT.bool())
    for row, sample in enumerate(samples):
        assert sample.reward is not None
        rewards_BT[row, int(mask_BT[row].nonzero()[-1])] = sample.reward
    values_BT = padded([v[:n] for v, n in zip(values, lengths, strict=True)], rewards_BT)
    bootstrap_B = torch.tensor(
        [float(v[-1]) if s.is_truncated else 0.0 for v, s in zip(values, samples, strict=True)]
    )
    advantages_BT, returns_BT = gae(
        rewards_BT, values_BT, bootstrap_B, mask_BT, config.gamma, config.lam
    )
    advantages_BT = whiten(advantages_BT, mask_BT)
    return {
        s.rollout_id: Estimate(values_BT[row, :n], returns_BT[row, :n], advantages_BT[row, :n])
        for row, (s, n) in enumerate(zip(samples, lengths, strict=True))
    }


def fit_critic(
    critic: Critic,
    samples: Sequence[LearnSample],
    estimates: Mapping[str, Estimate],
    denominators: Denominators,
    config: LearnerConfig,
) -> dict[str, float]:
    """Take one step of the critic on the value loss of the samples.

    Returns:
        "value_loss" (not weighted by `vf_coef`), "critic/grad_norm" (before clipping), and, where
        the returns differ, "explained_variance" of the old values.

    Raises:
        LearnerError: the loss or gradient of a sample is not finite; nothing was changed.
    """
    total = 0.0
    branches = [_fitted(s) for s in samples]
    with critic.gradients():
        for batch in pack(
            branches,
            max_tokens=config.micro_batch_tokens,
            pad_token_id=critic.pad_token_id,
            share_prefix=config.packing,
        ):
            rows = [samples[i] for i in batch.branches]
            values_BT, mask_BT = critic.batch_values(batch)
            mask_BT = mask_BT & padded([_trained(s) for s in rows], mask_BT)
            known = [estimates[s.rollout_id] for s in rows]
            old_BT = padded([e.values_T for e in known], values_BT.detach())
            returns_BT = padded([e.returns_T for e in known], values_BT.detach())
            loss_BT = value_loss(values_BT, old_BT, returns_BT, mask_BT, config.value_clip)
            loss_BT = loss_BT * old_BT.new_tensor([[s.weight] for s in rows])
            check_loss(rows, loss_BT)
            loss = reduce_loss(
                loss_BT, mask_BT, denominators, ALGORITHMS[config.algorithm].reduction
            )
            (config.vf_coef * loss).backward()  # type: ignore[no-untyped-call]
            check_gradient(rows, critic.parameters.values())
            total += loss.item()
    metrics = {"value_loss": total, "critic/grad_norm": critic.update(config.max_grad_norm)}
    judged = [(estimates[s.rollout_id], _trained(s)) for s in samples]
    explained = explained_variance(
        torch.cat([e.values_T[mask_T] for e, mask_T in judged]),
        torch.cat([e.returns_T[mask_T] for e, mask_T in judged]),
    )
    return metrics if explained is None else metrics | {"explained_variance": explained}


def _trained(sample: LearnSample) -> Tensor:
    return torch.tensor(trained_tokens(sample), dtype=torch.bool)


def _fitted(sample: LearnSample) -> Branch:
    return Branch(sample.prompt_ids + sample.prefix_ids, sample.completion_ids)


def _judged(sample: LearnSample) -> Branch:
    """Return the branch whose values are needed: one more where the completion was cut off."""
    extra = (_UNREAD,) * sample.is_truncated
    return Branch(sample.prompt_ids + sample.prefix_ids, sample.completion_ids + extra)
