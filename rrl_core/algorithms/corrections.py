"""Corrections for the sampler not being the trainer: weights from old / sampler log-probs.

Source: truncated importance sampling between inference and training engines (arXiv 2510.26788
discusses both forms). With pi_old the trainer's and mu the sampler's probability of a token:

    token_truncate:           w_t = min(exp(clamp(log pi_old - log mu, +-20)), C)
    sequence_geometric_mask:  w_t = 1 if |mean_t (log pi_old - log mu)| <= log C, else 0
    none:                     w_t = 1

Law: mu = pi_old gives w = 1, so the corrected loss is the on-policy loss.

Our choices: weights are detached; a weight of 0 does not leave the denominator, which stays the
original mask count; a row whose sampler gave no log-probs cannot be corrected and leaves the loss
altogether, numerator and denominator (`is_corrigible`). Under "none" such a row stays.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rrl_core.algorithms.ratios import clamped_exp, masked_log_ratio


@dataclass(frozen=True)
class Correction:
    """Per-token weights of the policy term and what was done to them; all detached.

    `weights_BT` is float32 and 1 where masked. `is_truncated_BT` is True where the weight was cut
    to the cap or the sequence was rejected.
    """

    weights_BT: Tensor
    is_truncated_BT: Tensor


def is_corrigible(correction: str, has_sampler_logprobs: bool) -> bool:
    """Tell whether a row may stay in the loss: under "none" any, else one with log-probs."""
    return correction == "none" or has_sampler_logprobs


def no_correction(log_ratio_BT: Tensor, loss_mask_BT: Tensor, cap: float) -> Correction:
    """Weigh every token 1."""
    del loss_mask_BT, cap
    weights_BT = torch.ones_like(log_ratio_BT)
    return Correction(weights_BT, torch.zeros_like(weights_BT, dtype=torch.bool))


def token_truncate(log_ratio_BT: Tensor, loss_mask_BT: Tensor, cap: float) -> Correction:
    """Weigh each token by its ratio, cut at `cap`."""
    del loss_mask_BT
    ratio_BT = clamped_exp(log_ratio_BT)
    return Correction(ratio_BT.clamp(max=cap), ratio_BT > cap)


def sequence_geometric_mask(log_ratio_BT: Tensor, loss_mask_BT: Tensor, cap: float) -> Correction:
    """Keep a sequence whose geometric mean ratio lies within [1 / cap, cap]; weigh others 0."""
    num_tokens_B = loss_mask_BT.sum(dim=1).clamp(min=1)
    mean_B = log_ratio_BT.double().sum(dim=1) / num_tokens_B
    is_rejected_B = mean_B.abs() > torch.tensor(cap, dtype=torch.float64).log()
    is_rejected_BT = is_rejected_B[:, None] & loss_mask_BT
    return Correction((~is_rejected_BT).float(), is_rejected_BT)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float], Correction]] = {
    "none": no_correction,
    "token_truncate": token_truncate,
    "sequence_geometric_mask": sequence_geometric_mask,
}


def sampler_correction(
    correction: str,
    old_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    cap: float,
) -> Correction:
    """Compute the weights that make tokens of the sampler stand for tokens of the trainer.

    Args:
        correction: a key of `CORRECTIONS`.
        old_logprobs_BT: [B, T] float, the trainer's log-probs before the iteration's first step.
        sampler_logprobs_BT: [B, T] float, the sampler's; anything where masked.
        loss_mask_BT: [B, T] bool, True = trained on and sampler log-prob known.
        cap: C > 1, unitless.

    Returns:
        The correction, detached.
    """
    log_ratio_BT = masked_log_ratio(old_logprobs_BT, sampler_logprobs_BT, loss_mask_BT).detach()
    return CORRECTIONS[correction](log_ratio_BT, loss_mask_BT, cap)


def effective_sample_frac(weights_N: Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2), the effective share of n samples; 0 if all weights are."""
    weights_N = weights_N.double()
    total_square = float(weights_N.square().sum())
    if total_square == 0.0:
        return 0.0
    return float(weights_N.sum().square()) / (len(weights_N) * total_square)


def mass_below(weights_N: Tensor, threshold: float) -> float:
    """Return the fraction of weights [N] below `threshold`: tokens that hardly count any more."""
    return float((weights_N < threshold).double().mean())
