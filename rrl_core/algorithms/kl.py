"""Estimators of KL(policy || reference) from the log-probs of tokens the policy sampled.

Source: J. Schulman, "Approximating KL divergence" (2020). With d = log reference - log policy:

    k1 = -d                unbiased, may be negative
    k2 = d^2 / 2           biased, never negative, its gradient is that of the KL
    k3 = exp(d) - 1 - d    unbiased, never negative

Differs from the source in: d is clamped to +-20 before it is exponentiated (k3), and k3 is computed
as expm1(d) - d in float32, which keeps the digits of small d.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rrl_core.algorithms.ratios import LOG_RATIO_LIMIT, masked_log_ratio


def _k1(d_BT: Tensor) -> Tensor:
    return -d_BT


def _k2(d_BT: Tensor) -> Tensor:
    return d_BT.square() / 2


def _k3(d_BT: Tensor) -> Tensor:
    d_BT = d_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d_BT) - d_BT


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_estimate(
    policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, loss_mask_BT: Tensor, estimator: str
) -> Tensor:
    """Estimate KL(policy || reference) per token.

    Args:
        policy_logprobs_BT: [B, T] float, natural logs; the gradient flows through it.
        reference_logprobs_BT: [B, T] float, natural logs, detached.
        loss_mask_BT: [B, T] bool, True = trained on; elsewhere the estimate is 0.
        estimator: "k1", "k2" or "k3".

    Returns:
        [B, T] float32 in nats; 0 where both agree.
    """
    d_BT = masked_log_ratio(reference_logprobs_BT, policy_logprobs_BT, loss_mask_BT)
    return KL_ESTIMATORS[estimator](d_BT)
