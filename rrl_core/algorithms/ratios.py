"""Log-ratios that may be exponentiated, and entropies: what several modules need in the same way.

Two rules live here so that nobody has to remember them. Clamp **before** exp: exp(100) is infinite
in float32 and its gradient is NaN. Mask with `where`, never by multiplying: inf * 0 is NaN.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: far outside any trust region, far inside float32


def masked_log_ratio(numerator_BT: Tensor, denominator_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Return the difference of two log-probs in float32, 0 where masked.

    Args:
        numerator_BT: [B, T] float, natural logs.
        denominator_BT: [B, T] float, natural logs.
        loss_mask_BT: [B, T] bool, True = a token that is trained on. What stands elsewhere, NaN and
            infinities included, changes neither the value nor the gradient.

    Returns:
        [B, T] float32 log-ratio, not clamped.
    """
    difference_BT = numerator_BT.float() - denominator_BT.float()
    return torch.where(loss_mask_BT, difference_BT, 0.0)


def clamped_exp(log_ratio_BT: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to +-20; outside, the gradient is 0."""
    return log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def entropy_from_logprobs(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy of each row of normalised log-probs.

        H = - sum_v p_v log p_v

    Args:
        logprobs_NV: [N, V] float, natural logs; -inf means impossible and contributes 0.

    Returns:
        [N] float32 entropy in nats, 0..log V. Differentiable.
    """
    logprobs_NV = logprobs_NV.float()
    # Clamped, an impossible token is 0 times a finite number.
    finite_NV = logprobs_NV.clamp(min=torch.finfo(torch.float32).min)
    return -(logprobs_NV.exp() * finite_NV).sum(dim=-1)


def entropy_from_logits(logits_NV: Tensor) -> Tensor:
    """Return the entropy [N] of softmax(logits), in nats; the log-softmax is taken in float32."""
    return entropy_from_logprobs(torch.log_softmax(logits_NV.float(), dim=-1))
