"""Advantages of single tokens from a critic's values, and the loss that fits the values.

Sources: GAE (arXiv 1506.02438, eq. 16), PPO (arXiv 1707.06347, eq. 9 and 11-12), the clipped value
loss of PPO's first implementation (openai/baselines). V_t is the value of the state before token t:
the prompt and the tokens before it. For the trained tokens 0..n-1 of a completion:

    delta_t = r_t + gamma V_{t+1} - V_t          V_n = V(s_T) if truncated, else 0
    A_t = delta_t + gamma lambda A_{t+1}         A_n = 0
    R_t = A_t + V_t
    value loss_t = max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2)

Differs from the sources in:
1. A completion that was cut off is not over: what would have followed is worth V(s_T).
2. A masked token is no time step: the chain goes from the trained token before it to the one after.
3. `whiten` treats the advantages of a batch as `advantages.py` treats those of a group: centred,
   divided by std + 1e-4 (n - 1), exactly 0 where all are equal or there is only one.
"""

import torch
from torch import Tensor

from rrl_core.algorithms.advantages import STD_EPSILON, has_signal


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    bootstrap_values_B: Tensor,
    loss_mask_BT: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Estimate the advantage of every token and the return that its value should have been.

    Args:
        rewards_BT: [B, T] float, what each token earned; the completion's reward stands at its last
            trained token.
        values_BT: [B, T] float, V_t of the state before token t.
        bootstrap_values_B: [B] float, V(s_T) after the last token; 0 where the completion ended.
        loss_mask_BT: [B, T] bool, True = trained on. What stands elsewhere, NaN included, changes
            nothing.
        gamma: discount per token, 0..1.
        lam: lambda, 0..1: 1 trusts the rewards, 0 the values.

    Returns:
        [B, T] float32 advantages and [B, T] float32 returns, detached, both 0 where masked.
    """
    rewards_BT = torch.where(loss_mask_BT, rewards_BT.detach().double(), 0.0)
    values_BT = torch.where(loss_mask_BT, values_BT.detach().double(), 0.0)
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = bootstrap_values_B.detach().double()
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(values_BT.shape[1])):
        is_step_B, value_B = loss_mask_BT[:, t], values_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        advantages_BT[:, t] = torch.where(is_step_B, advantage_B, 0.0)
        next_advantage_B = torch.where(is_step_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(is_step_B, value_B, next_value_B)
    return advantages_BT.float(), (advantages_BT + values_BT).float()


def whiten(advantages_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Centre the advantages of a batch and divide them by their std + 1e-4.

    Args:
        advantages_BT: [B, T] float.
        loss_mask_BT: [B, T] bool, True = trained on: mean and std are over these tokens.

    Returns:
        [B, T] float32, 0 where masked; all exactly 0 where they are equal or there is only one.
    """
    kept_N = advantages_BT[loss_mask_BT].double()
    whitened_BT = torch.zeros_like(advantages_BT, dtype=torch.float32)
    if has_signal(kept_N):
        scaled_N = (kept_N - kept_N.mean()) / (kept_N.std(correction=1) + STD_EPSILON)
        whitened_BT[loss_mask_BT] = scaled_N.float()
    return whitened_BT


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    loss_mask_BT: Tensor,
    clip: float | None = 0.2,
) -> Tensor:
    """Compute the squared error of every token's value, not below that of the clipped value.

    Args:
        values_BT: [B, T] float; the gradient flows through it.
        old_values_BT: [B, T] float, the values before the iteration's first step.
        returns_BT: [B, T] float, from `gae`.
        loss_mask_BT: [B, T] bool, True = trained on.
        clip: how far a value may move from the old one and still lower its loss, in units of
            reward; None: any distance.

    Returns:
        [B, T] float32, 0 where masked. A value outside the clip has no gradient where the clipped
        one is farther from the return.
    """
    values_BT = torch.where(loss_mask_BT, values_BT.float(), 0.0)
    old_values_BT = torch.where(loss_mask_BT, old_values_BT.float(), 0.0)
    returns_BT = torch.where(loss_mask_BT, returns_BT.float(), 0.0)
    loss_BT = (values_BT - returns_BT).square()
    if clip is None:
        return loss_BT
    clipped_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    return torch.maximum(loss_BT, (clipped_BT - returns_BT).square())


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 = the values say all, 0 = no more than a constant.

    None where the returns [N] are all equal: there is nothing to explain.
    """
    if not has_signal(returns_N):
        return None
    values_N, returns_N = values_N.double(), returns_N.double()
    return 1.0 - float((returns_N - values_N).var() / returns_N.var())
