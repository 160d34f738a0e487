"""The policy's step: clipped ratios, corrections of old tokens, credit of given ideas.

step = rate / B * gradient of the sum over sequences, twice; B sequences a group
weight of a token = A * ratio unless clipped at 0.2; where it is old, times the product's
    `token_truncate` of `rrl_core.algorithms.corrections`
weight of a given idea = A_pre of `rrl_core.replay.credit`, times the product's weight of a given
    token, `rrl_core.algorithms.prefix_credit`
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.forgetting.advantages import gae_advantages, group_advantages
from benchmarks.studies.forgetting.arms import Arm
from benchmarks.studies.forgetting.critic import Critic
from benchmarks.studies.forgetting.layout import Layout
from benchmarks.studies.forgetting.memory import Memory, counts
from benchmarks.studies.forgetting.policy import (
    Policy,
    Sequences,
    entropy_gradient,
    log_gradient,
    token_chances,
)
from benchmarks.studies.forgetting.world import SAFE, Floats, Parts
from rrl_core.algorithms.corrections import sampler_correction
from rrl_core.algorithms.prefix_credit import prefix_credit
from rrl_core.replay.credit import prefix_advantage
from rrl_core.replay.schedule import anneal
from rrl_core.value.counts import success_rate

CLIP, EPOCHS = 0.2, 2
MAX_CORRECTION = 2.0


@dataclass(frozen=True)
class Batch:
    """What an iteration learns from."""

    iteration: int
    layout: Layout
    chances: Parts
    """Of the policy that sampled."""
    sequences: Sequences
    rewards_SQ: Floats


def learn(arm: Arm, policy: Policy, critic: Critic, memory: Memory, batch: Batch) -> None:
    """Take the steps of an iteration."""
    sequences, group_size = batch.sequences, batch.layout.group_size
    if arm.algorithm == "ppo":
        advantages = gae_advantages(sequences, batch.rewards_SQ, critic)
    else:
        advantages = group_advantages(sequences, batch.rewards_SQ, group_size)
    old = token_chances(batch.chances, sequences)
    given_SH = batch.layout.repeat(batch.layout.given_SG)
    used = sequences.is_used
    used = used._replace(idea=used.idea & (given_SH == SAFE))  # a given idea was not sampled
    factors = [u * c for u, c in zip(used, _corrections(memory, batch.layout, old), strict=True)]
    credit_SH = _credit(arm, memory, batch)
    left = anneal(batch.iteration, arm.settings.iterations) if arm.is_annealed else 1.0
    weight, idea_weight = arm.entropy * left, (arm.entropy + arm.kl) * left
    bonus = Parts(idea_weight * used.idea, weight * used.skill, weight * used.finish)
    rate = arm.rate / group_size / arm.temperature
    for _ in range(EPOCHS):
        chances = policy.chances(arm.temperature)
        now = token_chances(chances, sequences)
        ratios = [n / o for n, o in zip(now, old, strict=True)]
        columns = zip(advantages, ratios, factors, strict=True)
        weights = Parts(*(_clipped(a, ratio) * factor for a, ratio, factor in columns))
        given_weight_SH = _given_weights(arm, memory, batch.layout, now.idea, old.idea)
        weights = weights._replace(idea=weights.idea + credit_SH * given_weight_SH)
        policy.ascend(log_gradient(chances, sequences, weights), rate)
        if arm.entropy or arm.kl:  # the start policy is uniform: KL to it is minus the entropy
            policy.ascend(entropy_gradient(chances, sequences, bonus), rate)


def _clipped(advantages: Floats, ratios: Floats) -> Floats:
    """Return the derivative of PPO's clipped objective by each log-prob."""
    is_clipped = np.where(advantages > 0, ratios > 1 + CLIP, ratios < 1 - CLIP)
    return advantages * ratios * ~is_clipped


def _corrections(memory: Memory, layout: Layout, old: Parts) -> Parts:
    """Return the product's correction for the tokens of old successes, 1 for others."""
    corrections = Parts(*(np.ones_like(part) for part in old))
    seed, group = np.nonzero(layout.success_SG >= 0)
    if not len(seed):
        return corrections
    kept = (seed, layout.prompt_SG[seed, group], layout.success_SG[seed, group])
    place = group * layout.group_size  # the first sequence of the group
    num_drills = old.skill.shape[1] - old.idea.shape[1]
    places = (place, num_drills + place, place)
    old_BT = _logs(part[seed, at] for part, at in zip(old, places, strict=True))
    sampler_BT = _logs(part[kept] for part in memory.solved_chances)
    mask_BT = torch.ones_like(old_BT, dtype=torch.bool)
    weights_BT = sampler_correction(
        "token_truncate", old_BT, sampler_BT, mask_BT, MAX_CORRECTION
    ).weights_BT.numpy()
    corrections.idea[seed, places[0]] = weights_BT[:, 0]
    corrections.skill[seed, places[1]] = weights_BT[:, 1:-1]
    corrections.finish[seed, places[2]] = weights_BT[:, -1]
    return corrections


def _credit(arm: Arm, memory: Memory, batch: Batch) -> Floats:
    """Return A_pre of each given idea, [S, H]; 0 for others."""
    layout = batch.layout
    num_hard = layout.is_own_SH.shape[1]
    at = (np.arange(len(layout.prompt_SG))[:, None], layout.prompt_SG)
    rewards_SGB = batch.rewards_SQ[:, -num_hard:].reshape(*layout.prompt_SG.shape, -1)
    p_hat_SN = success_rate(*counts(memory.recent_SNU)) * arm.has_gates
    credit_SG = prefix_advantage(rewards_SGB.mean(-1), memory.recent_mean()[at], p_hat_SN[at])
    return layout.repeat(np.where(layout.given_SG == SAFE, 0.0, credit_SG))


def _given_weights(
    arm: Arm, memory: Memory, layout: Layout, now_SH: Floats, old_SH: Floats
) -> Floats:
    """Return what the product multiplies A_pre of each given idea by, [S, H]; 0 for others.

    An idea is a prefix of one token, by its probability now, before the iteration's steps, and when
    it was first sampled.
    """
    if arm.unit != "state":
        return np.zeros_like(now_SH)
    seed_S1, given_SH = np.arange(len(now_SH))[:, None], layout.repeat(layout.given_SG)
    sampled_SH = memory.chance_SNA[seed_S1, layout.repeat(layout.prompt_SG), given_SH]
    now_BT, old_BT, sampler_BT = (
        _logs([chances.reshape(-1)]) for chances in (now_SH, old_SH, sampled_SH)
    )
    is_given_BT = torch.from_numpy(given_SH.reshape(-1, 1) != SAFE)
    _, weights_BT = prefix_credit(
        now_BT, old_BT, sampler_BT, torch.ones(len(now_BT)), is_given_BT, arm.credit
    )
    weights_SH: Floats = weights_BT.numpy().reshape(now_SH.shape).astype(np.float64)
    return weights_SH


def _logs(parts: Iterable[Floats]) -> Tensor:
    """Return the logs of tokens' probabilities as columns of sequences, [B, T]."""
    columns = [part.reshape(len(part), -1) for part in parts]
    return torch.from_numpy(np.log(np.maximum(np.concatenate(columns, axis=1), 1e-300)))
