"""The policy's step: clipped ratios, corrections of old tokens, credit of given ideas.

step = rate / B * gradient of the sum over sequences, twice; B sequences a group
weight of a token = A * ratio unless clipped at 0.2; * min(pi_old / mu, 2) where it is old
weight of a given idea = A_pre of `rrl_core.replay.credit`
    direct:     * 1, until its ratio exceeds 1.4
    corrected:  * min(pi_old / mu, 2)
"""

from dataclasses import dataclass

import numpy as np

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
from rrl_core.replay.credit import prefix_advantage
from rrl_core.replay.schedule import anneal
from rrl_core.value.counts import success_rate

CLIP, EPOCHS = 0.2, 2
CREDIT_RATIO = 1.4
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
    credit_SH = _credit(arm, memory, batch, old.idea)
    left = anneal(batch.iteration, arm.settings.iterations) if arm.is_annealed else 1.0
    weight, idea_weight = arm.entropy * left, (arm.entropy + arm.kl) * left
    bonus = Parts(idea_weight * used.idea, weight * used.skill, weight * used.finish)
    rate = arm.rate / group_size / arm.temperature
    for _ in range(EPOCHS):
        chances = policy.chances(arm.temperature)
        ratios = [n / o for n, o in zip(token_chances(chances, sequences), old, strict=True)]
        columns = zip(advantages, ratios, factors, strict=True)
        weights = Parts(*(_clipped(a, ratio) * factor for a, ratio, factor in columns))
        is_credited_SH = (ratios[0] <= CREDIT_RATIO) | (arm.credit == "corrected")
        weights = weights._replace(idea=weights.idea + credit_SH * is_credited_SH)
        policy.ascend(log_gradient(chances, sequences, weights), rate)
        if arm.entropy or arm.kl:  # the start policy is uniform: KL to it is minus the entropy
            policy.ascend(entropy_gradient(chances, sequences, bonus), rate)


def _clipped(advantages: Floats, ratios: Floats) -> Floats:
    """Return the derivative of PPO's clipped objective by each log-prob."""
    is_clipped = np.where(advantages > 0, ratios > 1 + CLIP, ratios < 1 - CLIP)
    return advantages * ratios * ~is_clipped


def _corrections(memory: Memory, layout: Layout, old: Parts) -> Parts:
    """Return min(pi_old / mu, 2) for the tokens of old successes, 1 for others."""
    corrections = Parts(*(np.ones_like(part) for part in old))
    seed, group = np.nonzero(layout.success_SG >= 0)
    kept = (seed, layout.prompt_SG[seed, group], layout.success_SG[seed, group])
    place = group * layout.group_size  # the first sequence of the group
    num_drills = old.skill.shape[1] - old.idea.shape[1]
    places = (place, num_drills + place, place)
    columns = zip(corrections, old, memory.solved_chances, places, strict=True)
    for correction, chance, sampled, at in columns:
        correction[seed, at] = np.minimum(chance[seed, at] / sampled[kept], MAX_CORRECTION)
    return corrections


def _credit(arm: Arm, memory: Memory, batch: Batch, old_SH: Floats) -> Floats:
    """Return what the log-prob of each given idea is multiplied by, [S, H]; 0 for others."""
    layout = batch.layout
    if arm.credit == "none" or arm.unit != "state":
        return np.zeros_like(old_SH)
    at = (np.arange(len(old_SH))[:, None], layout.prompt_SG)
    rewards_SGB = batch.rewards_SQ[:, -old_SH.shape[1] :].reshape(*layout.prompt_SG.shape, -1)
    p_hat_SN = success_rate(*counts(memory.recent_SNU)) * arm.has_gates
    credit_SG = prefix_advantage(rewards_SGB.mean(-1), memory.recent_mean()[at], p_hat_SN[at])
    credit_SG = np.where(layout.given_SG == SAFE, 0.0, credit_SG)
    if arm.credit == "corrected":
        mu_SG = memory.chance_SNA[(*at, layout.given_SG)]
        old_SG = old_SH[:, :: layout.group_size]
        credit_SG = credit_SG * np.minimum(old_SG / mu_SG, MAX_CORRECTION)
    return np.repeat(credit_SG, layout.group_size, axis=1)
