"""Advantages of every token of an iteration.

GRPO:  A = (R - mean) / (std + 0.01) within a group, std with n - 1, for all its tokens
PPO:   GAE with gamma 1 and lambda 0.95 by the small value model, divided by
       (rms of the first tokens' advantages + 0.01)
"""

import numpy as np

from benchmarks.studies.forgetting.critic import Critic
from benchmarks.studies.forgetting.policy import Sequences
from benchmarks.studies.forgetting.world import Floats, Parts

EPSILON = 0.01
GAE_LAMBDA = 0.95


def group_advantages(sequences: Sequences, rewards_SQ: Floats, group_size: int) -> Parts:
    """Return GRPO's advantages, one for all tokens of a sequence."""
    rewards_SGB = rewards_SQ.reshape(len(rewards_SQ), -1, group_size)
    centred_SGB = rewards_SGB - rewards_SGB.mean(-1, keepdims=True)
    advantage_SGB = centred_SGB / (rewards_SGB.std(-1, ddof=1, keepdims=True) + EPSILON)
    advantage_SQ = advantage_SGB.reshape(rewards_SQ.shape)
    advantage_SH = advantage_SQ[:, -sequences.prompt_SH.shape[1] :]
    return Parts(advantage_SH, advantage_SQ[..., None], advantage_SH)


def gae_advantages(sequences: Sequences, rewards_SQ: Floats, critic: Critic) -> Parts:
    """Return PPO's advantages, one for each token."""
    is_used = sequences.is_used
    num_hard = sequences.prompt_SH.shape[1]
    state_SQJ = critic.state_values(sequences)  # J = L + 1: before each skill and the finish token
    is_drill_SQ = np.arange(rewards_SQ.shape[1]) < rewards_SQ.shape[1] - num_hard
    after_SQL = state_SQJ[..., 1:].copy()
    after_SQL[..., -1] = np.where(is_drill_SQ, rewards_SQ, after_SQL[..., -1])
    delta_SQL = (after_SQL - state_SQJ[..., :-1]) * is_used.skill
    rewards_SH, state_SHJ = rewards_SQ[:, -num_hard:], state_SQJ[:, -num_hard:]
    finish_SH = (rewards_SH - state_SHJ[..., -1]) * is_used.finish
    after_SH = np.where(is_used.finish, state_SHJ[..., 0], rewards_SH)  # SAFE ends at once
    idea_SH = after_SH - critic.prompt_values()[sequences.contexts.idea]
    ahead_SQ = np.pad(finish_SH, ((0, 0), (rewards_SQ.shape[1] - num_hard, 0)))
    skill_SQL = np.empty_like(delta_SQL)
    for position in reversed(range(delta_SQL.shape[-1])):
        ahead_SQ = delta_SQL[..., position] + GAE_LAMBDA * ahead_SQ
        skill_SQL[..., position] = ahead_SQ
    idea_SH = idea_SH + GAE_LAMBDA * ahead_SQ[:, -num_hard:] * is_used.finish
    scale_S = np.sqrt((idea_SH**2).mean(-1)) + EPSILON
    return Parts(
        idea_SH / scale_S[:, None], skill_SQL / scale_S[:, None, None], finish_SH / scale_S[:, None]
    )
