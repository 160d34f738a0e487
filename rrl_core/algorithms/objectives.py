"""Objectives on per-token tensors, and the table of algorithms built from them.

Sources: PPO (arXiv 1707.06347, eq. 7), dual clip (arXiv 1912.09729, eq. 5), GRPO (arXiv
2402.03300), Dr. GRPO (arXiv 2503.20783), DAPO (arXiv 2503.14476), GSPO (arXiv 2507.18071, eq. 5-7,
clip range of section 5.1), RAFT (arXiv 2304.06767). With u = pi / pi_old per token:

    J = min(u A, clip(u, 1 - low, 1 + high) A)          A < 0 and dual clip c:  J = max(J, c A)
    gspo:       the same with s = exp(mean_t log u) in the place of u, one number per sequence
    sft, raft:  J = log pi

The loss is -J. `reduce.py` divides; nothing here does.

Differs from the sources in: the log-ratio is clamped to +-20 before exp; KL to the reference is a
separate term (`kl.py`) with the same reduction.

Our choices:
1. gspo: a correction weight of a token multiplies that token's share 1/|y| of the sequence's loss.
2. raft keeps what did better than its group (A > 0), not the best of k; the others leave the loss,
   numerator and denominator.
3. ppo reduces by the mean over tokens, since a token is one of its time steps.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rrl_core.algorithms.ratios import clamped_exp, masked_log_ratio


class Objective(Protocol):
    """What every objective takes and gives; `clipped_surrogate` says what the arguments mean."""

    def __call__(
        self,
        policy_logprobs_BT: Tensor,
        old_logprobs_BT: Tensor,
        advantages: Tensor,
        loss_mask_BT: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return [B, T] losses and detached [B, T] metrics."""


def clipped_surrogate(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
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
        advantages: [B] or [B, T] float, positive = make more likely.
        loss_mask_BT: [B, T] bool, True = trained on.
        clip_low: how far the ratio may fall below 1, in [0, 1).
        clip_high: how far it may rise above 1, >= 0.
        dual_clip: c > 1, bound of the loss of a negative advantage at -c A; None: unbounded.

    Returns:
        [B, T] float32 loss (to be minimised), 0 where masked, and detached [B, T] tensors:
        "ratio", "is_clipped_low" (A < 0 and u < 1 - low), "is_clipped_high" (A > 0, u > 1 + high).
        A clipped token has no gradient.
    """
    ratio_BT = clamped_exp(masked_log_ratio(policy_logprobs_BT, old_logprobs_BT, loss_mask_BT))
    return _clip(ratio_BT, advantages, loss_mask_BT, clip_low, clip_high, dual_clip)


def sequence_surrogate(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the GSPO loss: every token of a sequence has the ratio of the sequence.

    The mean over a sequence's tokens is the sequence's loss. Arguments and returns are those of
    `clipped_surrogate`; a clipped sequence has no gradient.
    """
    log_ratio_BT = masked_log_ratio(policy_logprobs_BT, old_logprobs_BT, loss_mask_BT)
    num_tokens_B1 = loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    ratio_B1 = clamped_exp(log_ratio_BT.sum(dim=1, keepdim=True) / num_tokens_B1)
    ratio_BT = ratio_B1.expand_as(log_ratio_BT)
    return _clip(ratio_BT, advantages, loss_mask_BT, clip_low, clip_high, dual_clip)


def negative_log_likelihood(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    loss_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -log pi of every token; only the log-probs and the mask are read.

    Returns:
        [B, T] float32 loss, 0 where masked, and the metrics of `clipped_surrogate` at ratio 1.
    """
    del old_logprobs_BT, advantages, clip_low, clip_high, dual_clip
    nothing_BT = torch.zeros_like(loss_mask_BT)
    metrics = {
        "ratio": torch.ones_like(policy_logprobs_BT, dtype=torch.float32),
        "is_clipped_low": nothing_BT,
        "is_clipped_high": nothing_BT,
    }
    return torch.where(loss_mask_BT, -policy_logprobs_BT.float(), 0.0), metrics


def _clip(
    ratio_BT: Tensor,
    advantages: Tensor,
    loss_mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    per_row = advantages.float()[:, None] if advantages.ndim == 1 else advantages.float()
    # Masked here too: the gradient of the ratio is multiplied by what stands in its place.
    advantages_BT = torch.where(loss_mask_BT, per_row, 0.0)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if dual_clip is not None:
        bounded_BT = torch.maximum(gain_BT, dual_clip * advantages_BT)
        gain_BT = torch.where(advantages_BT < 0, bounded_BT, gain_BT)
    ratio_BT = ratio_BT.detach()
    metrics = {
        "ratio": ratio_BT,
        "is_clipped_low": (ratio_BT < 1.0 - clip_low) & (advantages_BT < 0),
        "is_clipped_high": (ratio_BT > 1.0 + clip_high) & (advantages_BT > 0),
    }
    return torch.where(loss_mask_BT, -gain_BT, 0.0), metrics


@dataclass(frozen=True)
class Algorithm:
    """What tells one algorithm from another; everything else is shared.

    `divide_by_std`: of the group advantages. `reduction`: a key of `reduce.REDUCTIONS`.
    `clip_low`, `clip_high`: the source's clip range. `dynamic_sampling`: whether groups of equal
    rewards leave the batch before the step (`dapo.informative_rows`) instead of counting in it.
    `has_ratio`: whether the objective compares policies; one that does not needs no advantage, no
    old policy and no correction. `only_positive`: whether samples without a positive advantage
    leave the loss. `has_critic`: whether advantages come from a critic, token by token (`gae.py`).
    """

    divide_by_std: bool
    reduction: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False
    objective: Objective = clipped_surrogate
    has_ratio: bool = True
    only_positive: bool = False
    has_critic: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(divide_by_std=True, reduction="sequence_mean"),
    "dr_grpo": Algorithm(divide_by_std=False, reduction="constant_length"),
    "dapo": Algorithm(
        divide_by_std=True, reduction="token_mean", clip_high=0.28, dynamic_sampling=True
    ),
    "gspo": Algorithm(
        divide_by_std=True,
        reduction="sequence_mean",
        clip_low=3e-4,
        clip_high=4e-4,
        objective=sequence_surrogate,
    ),
    "ppo": Algorithm(divide_by_std=True, reduction="token_mean", has_critic=True),
    "sft": Algorithm(
        divide_by_std=True,
        reduction="sequence_mean",
        objective=negative_log_likelihood,
        has_ratio=False,
    ),
    "raft": Algorithm(
        divide_by_std=True,
        reduction="sequence_mean",
        objective=negative_log_likelihood,
        has_ratio=False,
        only_positive=True,
    ),
}
