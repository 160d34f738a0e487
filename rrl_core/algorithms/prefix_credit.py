"""Prefix credit: the given tokens of a replayed state, made likelier when they proved worth it.

Retrospective replay (arXiv 2504.14363) masks the given prefix of a replayed state: its tokens get
no gradient, so the policy learns to finish an idea and still never has it. Ours: where the
continuations do better than the prompt does by itself, the prefix gets

    loss_t = -A_pre w_t log pi_theta(y_t)        A_pre > 0, see `rrl_core.replay.credit`

with the weights, detached,

    direct:     w_t = 1 while pi_theta / pi_old <= 1.4, then 0: the token has moved enough
    corrected:  w_t = min(pi_old / mu, 2) from the stored log-probs mu of the sampler that wrote it
    none:       w_t = 0: the prefix stays masked

The mean is over all tokens of the prefix, those of weight 0 included.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rrl_core.algorithms.ratios import clamped_exp, masked_log_ratio

RATIO_LIMIT = 1.4  # of direct
WEIGHT_CAP = 2.0  # of corrected


def _none(policy_BT: Tensor, old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> Tensor:
    del old_BT, sampler_BT, mask_BT
    return torch.zeros_like(policy_BT)


def _direct(policy_BT: Tensor, old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> Tensor:
    del sampler_BT
    return (clamped_exp(masked_log_ratio(policy_BT, old_BT, mask_BT)) <= RATIO_LIMIT).float()


def _corrected(policy_BT: Tensor, old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> Tensor:
    del policy_BT
    return clamped_exp(masked_log_ratio(old_BT, sampler_BT, mask_BT)).clamp(max=WEIGHT_CAP)


PREFIX_CREDITS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "none": _none,
    "direct": _direct,
    "corrected": _corrected,
}


def prefix_credit(
    policy_BT: Tensor,
    old_BT: Tensor,
    sampler_BT: Tensor,
    advantages_B: Tensor,
    prefix_mask_BT: Tensor,
    credit: str,
) -> tuple[Tensor, Tensor]:
    """Return the prefix term of every token, and the weights in it.

    Args:
        policy_BT: [B, T] float, natural log-probs under the policy; the gradient flows through.
        old_BT: [B, T] float, under the policy before the update, detached.
        sampler_BT: [B, T] float, under the sampler that wrote the prefix; read by `corrected` only.
        advantages_B: [B] float32, A_pre of each row, 0 or more.
        prefix_mask_BT: [B, T] bool, True = a given token that gets credit.
        credit: a key of `PREFIX_CREDITS`.

    Returns:
        [B, T] float32 losses and [B, T] float32 weights, both 0 where masked.
    """
    weights_BT = PREFIX_CREDITS[credit](policy_BT.detach(), old_BT, sampler_BT, prefix_mask_BT)
    weights_BT = torch.where(prefix_mask_BT, weights_BT, 0.0)
    kept_BT = torch.where(prefix_mask_BT, policy_BT.float(), 0.0)
    return -advantages_B[:, None] * weights_BT * kept_BT, weights_BT
