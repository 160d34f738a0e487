"""What a step tells about itself: statistics of every sample, and metrics over all its tokens.

Everything is a function of the step's inputs, never of the clock: a step taken again gives the
same rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from rrl_core.algorithms.corrections import effective_sample_frac, mass_below

SMALL_WEIGHT = 0.1  # tokens below are all but removed from the loss by the correction


@dataclass(frozen=True)
class TokenStats:
    """Detached per-token records of a micro-batch, [B, T] on the CPU; unused where masked.

    `mismatch_BT`: |trainer - sampler| log-prob, meaningful where `has_sampler_BT`.
    `kl_BT`: k3 estimate of the KL to the reference; None without a KL term.
    `loss_mask_BT`: True = a token of a policy term; `prefix_mask_BT`: a given token of the prefix
    term; `distill_mask_BT`: a token of a distilled completion. No token is in two of them.
    """

    rollout_ids: tuple[str, ...]
    terms: tuple[str, ...]
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
    distill_mask_BT: Tensor


@dataclass(frozen=True)
class SampleStats:
    """One sample of a step, as the table `learned_samples` describes it.

    `num_loss_tokens` is 0 if the sample left the loss. The rest is None if it was not run, or if
    what it needs (sampler log-probs, a KL term) is not there. A distilled sample has its
    `policy_logprob_mean` only, given its prompt.
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
    trained_BT = stats.loss_mask_BT | stats.distill_mask_BT
    is_clipped_BT = stats.is_clipped_low_BT | stats.is_clipped_high_BT
    largest_B = torch.where(stats.has_sampler_BT, stats.mismatch_BT, 0.0).amax(1).tolist()
    mismatch = _row_means(stats.mismatch_BT, stats.has_sampler_BT)
    columns: dict[str, Sequence[float | None]] = {
        "policy_logprob_mean": _row_means(stats.logprobs_BT, trained_BT),
        "mismatch_mean": mismatch,
        "mismatch_max": [
            None if mean is None else largest
            for mean, largest in zip(mismatch, largest_B, strict=True)
        ],
        "importance_mean": _row_means(stats.weights_BT, stats.loss_mask_BT),
        "ratio_mean": _row_means(stats.ratio_BT, stats.loss_mask_BT),
        "frac_clipped": _row_means(is_clipped_BT, stats.loss_mask_BT),
        "frac_truncated": _row_means(stats.is_truncated_BT, stats.loss_mask_BT),
        "entropy_mean": _row_means(stats.entropy_BT, stats.loss_mask_BT),
        "prefix_weight_mean": _row_means(stats.prefix_weights_BT, stats.prefix_mask_BT),
        "prefix_logprob_mean": _row_means(stats.logprobs_BT, stats.prefix_mask_BT),
    }
    if stats.kl_BT is not None:
        columns["kl_mean"] = _row_means(stats.kl_BT, stats.loss_mask_BT)
    num_tokens_B = trained_BT.sum(dim=1).tolist()
    return [
        SampleStats(
            rollout_id, num_tokens_B[row], **{k: column[row] for k, column in columns.items()}
        )
        for row, rollout_id in enumerate(stats.rollout_ids)
    ]


def _row_means(values_BT: Tensor, mask_BT: Tensor) -> list[float | None]:
    """Return the mean of each row where `mask_BT` is True; None for a row where it never is."""
    sums_B = torch.where(mask_BT, values_BT.double(), 0.0).sum(dim=1)
    num_B = mask_BT.sum(dim=1)
    means_B: list[float] = (sums_B / num_B).tolist()
    return [mean if n else None for mean, n in zip(means_B, num_B.tolist(), strict=True)]


def step_metrics(batches: Sequence[TokenStats]) -> dict[str, float]:
    """Return metrics over a step's tokens in policy terms; a metric without one is left out."""
    masks = [b.loss_mask_BT for b in batches]
    weights_N = _tokens([b.weights_BT for b in batches], masks)
    if not len(weights_N):
        return {}

    def mean(values: Sequence[Tensor]) -> float:
        return float(_tokens(values, masks).mean())

    metrics = {
        "is/ess": effective_sample_frac(weights_N),
        "is/mass_below_0.1": mass_below(weights_N, SMALL_WEIGHT),
        "is/frac_truncated": mean([b.is_truncated_BT for b in batches]),
        "clip/frac_low": mean([b.is_clipped_low_BT for b in batches]),
        "clip/frac_high": mean([b.is_clipped_high_BT for b in batches]),
    }
    mismatch_N = _tokens([b.mismatch_BT for b in batches], [b.has_sampler_BT for b in batches])
    if len(mismatch_N):
        metrics["is/mismatch"] = float(mismatch_N.mean())
        metrics["is/mismatch_max"] = float(mismatch_N.max())
    return metrics | _policy_metrics(batches, masks, "")


def term_metrics(
    batches: Sequence[TokenStats],
    losses: Mapping[str, float],
    terms_B: Sequence[str],
    lengths_B: Sequence[int],
) -> dict[str, float]:
    """Return the metrics that tell a step's terms apart; none if all are attempts.

    Args:
        batches: the records of what was run.
        losses: each term's part of the step's loss.
        terms_B: [B] term of each sample of the step.
        lengths_B: [B] how many tokens each is trained on.

    Returns:
        "policy/loss_<term>", "explore/entropy_<term>" and "kl/ref_<term>" of each policy term, and
        of what is distilled "distill/loss", "distill/count" (samples) and "distill/token_share" (of
        all tokens trained on).
    """
    if set(terms_B) <= {"attempt"}:
        return {}
    is_distilled = [term == "distill" and n > 0 for term, n in zip(terms_B, lengths_B, strict=True)]
    metrics = {
        "distill/loss": losses.get("distill", 0.0),
        "distill/count": float(sum(is_distilled)),
        "distill/token_share": sum(compress(lengths_B, is_distilled)) / max(sum(lengths_B), 1),
    }
    for term in sorted(set(terms_B) - {"distill"}):
        metrics[f"policy/loss_{term}"] = losses.get(term, 0.0)
        is_own = [b.loss_mask_BT & _rows(b, term) for b in batches]
        metrics |= _policy_metrics(batches, is_own, f"_{term}")
    return metrics


def _policy_metrics(
    batches: Sequence[TokenStats], masks: Sequence[Tensor], suffix: str
) -> dict[str, float]:
    """Return entropy and KL of the policy where it acted, none where it did not."""
    entropy_N = _tokens([b.entropy_BT for b in batches], masks)
    if not len(entropy_N):
        return {}
    metrics = {f"explore/entropy{suffix}": float(entropy_N.mean())}
    kls = [b.kl_BT for b in batches if b.kl_BT is not None]
    if kls:
        metrics[f"kl/ref{suffix}"] = float(_tokens(kls, masks).mean())
    return metrics


def _rows(batch: TokenStats, term: str) -> Tensor:
    return torch.tensor([[own == term] for own in batch.terms], device=batch.loss_mask_BT.device)


def _tokens(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """Return [N] float64, the values of all micro-batches where their masks are True."""
    kept = [v[mask].double() for v, mask in zip(values, masks, strict=True)]
    return torch.cat(kept) if kept else torch.empty(0)
