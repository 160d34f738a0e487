"""What a step tells about itself: statistics of every sample, and metrics over all its tokens.

Everything is a function of the step's inputs, never of the clock: a step taken again gives the
same rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rrl_core.algorithms.corrections import effective_sample_frac, mass_below

SMALL_WEIGHT = 0.1  # tokens below are all but removed from the loss by the correction


@dataclass(frozen=True)
class TokenStats:
    """Detached per-token records of a micro-batch, [B, T] on the CPU; unused where masked.

    `mismatch_BT`: |trainer - sampler| log-prob, meaningful where `has_sampler_BT`.
    `kl_BT`: k3 estimate of the KL to the reference; None without a KL term.
    `prefix_mask_BT`: True = a given token of the prefix term, never one of `loss_mask_BT`.
    """

    rollout_ids: tuple[str, ...]
    loss_mask_BT: Tensor
    has_sampler_BT: Tensor
    logprobs_BT: Tensor
    entropy_BT: Tensor
    mismatch_BT: Tensor
    weights_BT: Tensor
    is_truncated_BT: Tensor
    ratio_BT: Tensor
    is_clipped_low_BT: Tensor
    is_clipped_high_BT: Tensor
    kl_BT: Tensor | None
    prefix_mask_BT: Tensor
    prefix_weights_BT: Tensor


@dataclass(frozen=True)
class SampleStats:
    """One sample of a step, as the table `learned_samples` describes it.

    `num_loss_tokens` is 0 if the sample left the loss. The rest is None if it was not run, or if
    what it needs (sampler log-probs, a KL term) is not there.
    """

    rollout_id: str
    num_loss_tokens: int
    policy_logprob_mean: float | None = None
    mismatch_mean: float | None = None
    mismatch_max: float | None = None
    importance_mean: float | None = None
    ratio_mean: float | None = None
    frac_clipped: float | None = None
    frac_truncated: float | None = None
    kl_mean: float | None = None
    entropy_mean: float | None = None
    prefix_weight_mean: float | None = None
    prefix_logprob_mean: float | None = None


def sample_stats(stats: TokenStats) -> list[SampleStats]:
    """Return one record per row, means taken in float64 over its trained tokens."""
    num_tokens_B = stats.loss_mask_BT.sum(dim=1)

    def means(values_BT: Tensor, mask_BT: Tensor = stats.loss_mask_BT) -> list[float]:
        kept_BT = torch.where(mask_BT, values_BT.double(), 0.0)
        result: list[float] = (kept_BT.sum(dim=1) / mask_BT.sum(dim=1)).tolist()
        return result

    columns: dict[str, Sequence[float | None]] = {
        "policy_logprob_mean": means(stats.logprobs_BT),
        "mismatch_mean": means(stats.mismatch_BT),
        "mismatch_max": torch.where(stats.loss_mask_BT, stats.mismatch_BT, 0.0).amax(1).tolist(),
        "importance_mean": means(stats.weights_BT),
        "ratio_mean": means(stats.ratio_BT),
        "frac_clipped": means(stats.is_clipped_low_BT | stats.is_clipped_high_BT),
        "frac_truncated": means(stats.is_truncated_BT),
        "entropy_mean": means(stats.entropy_BT),
    }
    if stats.kl_BT is not None:
        columns["kl_mean"] = means(stats.kl_BT)
    has_prefix_B = stats.prefix_mask_BT.any(dim=1).tolist()
    for name, values_BT in (
        ("prefix_weight_mean", stats.prefix_weights_BT),
        ("prefix_logprob_mean", stats.logprobs_BT),
    ):
        found = means(values_BT, stats.prefix_mask_BT)
        columns[name] = [v if has else None for v, has in zip(found, has_prefix_B, strict=True)]
    has_sampler_B = stats.has_sampler_BT.any(dim=1).tolist()
    for name in ("mismatch_mean", "mismatch_max"):
        columns[name] = [
            v if has else None for v, has in zip(columns[name], has_sampler_B, strict=True)
        ]
    return [
        SampleStats(
            rollout_id, int(num_tokens_B[row]), **{k: column[row] for k, column in columns.items()}
        )
        for row, rollout_id in enumerate(stats.rollout_ids)
    ]


def step_metrics(batches: Sequence[TokenStats]) -> dict[str, float]:
    """Return metrics over all trained tokens of a step; a metric without a token is left out."""
    if not batches:
        return {}

    def tokens(select: Callable[[TokenStats], Tensor], *, sampler: bool = False) -> Tensor:
        masks = [b.has_sampler_BT if sampler else b.loss_mask_BT for b in batches]
        kept = [select(b)[mask].double() for b, mask in zip(batches, masks, strict=True)]
        return torch.cat(kept)

    weights_N = tokens(lambda b: b.weights_BT)
    metrics = {
        "is/ess": effective_sample_frac(weights_N),
        "is/mass_below_0.1": mass_below(weights_N, SMALL_WEIGHT),
        "is/frac_truncated": float(tokens(lambda b: b.is_truncated_BT).mean()),
        "clip/frac_low": float(tokens(lambda b: b.is_clipped_low_BT).mean()),
        "clip/frac_high": float(tokens(lambda b: b.is_clipped_high_BT).mean()),
        "explore/entropy": float(tokens(lambda b: b.entropy_BT).mean()),
    }
    mismatch_N = tokens(lambda b: b.mismatch_BT, sampler=True)
    if len(mismatch_N):
        metrics["is/mismatch"] = float(mismatch_N.mean())
        metrics["is/mismatch_max"] = float(mismatch_N.max())
    if kls := [b.kl_BT[b.loss_mask_BT] for b in batches if b.kl_BT is not None]:
        metrics["kl/ref"] = float(torch.cat(kls).double().mean())
    return metrics
