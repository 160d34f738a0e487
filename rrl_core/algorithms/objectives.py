"""Policy-gradient objectives on per-token tensors, and the table of algorithms built from them.

Sources: PPO (arXiv 1707.06347, eq. 7), dual clip (arXiv 1912.09729, eq. 5), GRPO (arXiv
2402.03300), Dr. GRPO (arXiv 2503.20783), DAPO (arXiv 2503.14476). With u = pi / pi_old per token:

    J = min(u A, clip(u, 1 - low, 1 + high) A)          A < 0 and dual clip c:  J = max(J, c A)

The loss is -J. `reduce.py` divides; nothing here does.

Differs from the sources in: the log-ratio is clamped to +-20 before exp; KL to the reference is a
separate term (`kl.py`) with the same reduction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rrl_core.algorithms.ratios import clamped_exp, masked_log_ratio


@dataclass(frozen=True)
class Algorithm:
    """What tells one algorithm from another; everything else is shared.

    `divide_by_std`: of the group advantages. `reduction`: a key of `reduce.REDUCTIONS`.
    `clip_low`, `clip_high`: the source's clip range. `dynamic_sampling`: whether groups of equal
    rewards leave the batch before the step (`dapo.informative_rows`) instead of counting in it.
    """

    divide_by_std: bool
    reduction: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(divide_by_std=True, reduction="sequence_mean"),
    "dr_grpo": Algorithm(divide_by_std=False, reduction="constant_length"),
    "dapo": Algorithm(
        divide_by_std=True, reduction="token_mean", clip_high=0.28, dynamic_sampling=True
    ),
}


def clipped_surrogate(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped surrogate loss of every token.

    Args:
        policy_logprobs_BT: [B, T] float, natural logs; the gradient flows through it.
        old_logprobs_BT: [B, T] float, the trainer's log-probs before the iteration's first step.
        advantages_B: [B] float, positive = make more likely.
        loss_mask_BT: [B, T] bool, True = trained on.
        clip_low: how far the ratio may fall below 1, in [0, 1).
        clip_high: how far it may rise above 1, >= 0.
        dual_clip: c > 1, bound of the loss of a negative advantage at -c A; None: unbounded.

    Returns:
        [B, T] float32 loss (to be minimised), 0 where masked, and detached [B, T] tensors:
        "ratio", "is_clipped_low" (A < 0 and u < 1 - low), "is_clipped_high" (A > 0, u > 1 + high).
        A clipped token has no gradient.
    """
    advantages_B1 = advantages_B.float()[:, None]
    ratio_BT = clamped_exp(masked_log_ratio(policy_logprobs_BT, old_logprobs_BT, loss_mask_BT))
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    if dual_clip is not None:
        bounded_BT = torch.maximum(gain_BT, dual_clip * advantages_B1)
        gain_BT = torch.where(advantages_B1 < 0, bounded_BT, gain_BT)
    ratio_BT = ratio_BT.detach()
    metrics = {
        "ratio": ratio_BT,
        "is_clipped_low": (ratio_BT < 1.0 - clip_low) & (advantages_B1 < 0) & loss_mask_BT,
        "is_clipped_high": (ratio_BT > 1.0 + clip_high) & (advantages_B1 > 0) & loss_mask_BT,
    }
    return torch.where(loss_mask_BT, -gain_BT, 0.0), metrics
