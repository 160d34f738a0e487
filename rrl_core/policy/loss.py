"""The policy's loss of a micro-batch: its terms token by token, and their reduction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from rrl_core.algorithms.corrections import sampler_correction
from rrl_core.algorithms.distill import distill_loss
from rrl_core.algorithms.kl import kl_estimate
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.prefix_credit import prefix_credit
from rrl_core.algorithms.reduce import Denominators, reduce_loss
from rrl_core.policy.logprobs import TokenScores
from rrl_core.policy.records import LearnerConfig, LearnerError, LearnSample
from rrl_core.policy.samples import (
    padded,
    prefix_mask,
    stored_logprobs,
    term_mask,
    trained_mask,
)
from rrl_core.policy.statistics import TokenStats


@dataclass(frozen=True)
class Fixed:
    """What was known of a micro-batch before the step, detached, on the policy's device.

    `old_BT`: float32 log-probs of the old policy. `reference_BT`: of the reference policy; None: no
    KL term. `advantages`: [B] or [B, T] float32.
    """

    old_BT: Tensor
    reference_BT: Tensor | None
    advantages: Tensor


@dataclass(frozen=True)
class StepDenominators:
    """What the terms of a whole step are divided by.

    `policy`: counts what is in the policy terms. `distill`: counts what could be, the samples too
    that an algorithm leaves out for their advantage (raft): never the successes only.
    """

    policy: Denominators
    distill: Denominators


@dataclass(frozen=True)
class _Masks:
    """[B, T] bool: which term a token is in. None is in two, and what a tool said is in none."""

    policy_BT: Tensor
    prefix_BT: Tensor
    distill_BT: Tensor

    @classmethod
    def of_rows(cls, rows: Sequence[LearnSample], mask_BT: Tensor) -> "_Masks":
        is_given_BT = prefix_mask(rows, mask_BT)
        is_distilled_B1 = term_mask(rows, "distill", mask_BT)
        trained_BT = mask_BT & trained_mask(rows, mask_BT)
        return cls(
            policy_BT=trained_BT & ~is_given_BT & ~is_distilled_B1,
            prefix_BT=trained_BT & is_given_BT,
            distill_BT=trained_BT & is_distilled_B1,
        )


@dataclass(frozen=True)
class _Losses:
    """[B, T] float32: what each token adds to its term, weighted, before the reduction."""

    policy_BT: Tensor
    kl_BT: Tensor
    prefix_BT: Tensor
    distill_BT: Tensor


def batch_loss(
    rows: Sequence[LearnSample],
    scores: TokenScores,
    fixed: Fixed,
    denominators: StepDenominators,
    config: LearnerConfig,
) -> tuple[dict[str, Tensor], Tensor, TokenStats]:
    """Compute a micro-batch's share of the loss.

    Args:
        rows: the B samples of the micro-batch.
        scores: of the policy; the gradient flows through them.
        fixed: what the objective compares them with.
        denominators: of the whole step.
        config: of the learner.

    Returns:
        [] loss of each term with a row here, prefix credit included, [] KL term (weighted by
        `kl_coef`), and the records of every token.

    Raises:
        LearnerError: the loss of a sample is not finite.
    """
    masks = _Masks.of_rows(rows, scores.loss_mask_BT)
    losses, stats = _token_losses(rows, scores, fixed, masks, config)
    check_loss(rows, losses.policy_BT + losses.kl_BT + losses.prefix_BT + losses.distill_BT)
    reduction = ALGORITHMS[config.algorithm].reduction
    reduced: dict[str, Tensor] = {}
    for term in sorted({s.term for s in rows}):
        is_own_B1 = term_mask(rows, term, scores.loss_mask_BT)
        own = reduce_loss(
            losses.policy_BT, masks.policy_BT & is_own_B1, denominators.policy, reduction
        )
        # Means over a sequence under any objective: it weighs what a sequence weighs.
        own += reduce_loss(
            losses.prefix_BT, masks.prefix_BT & is_own_B1, denominators.policy, "sequence_mean"
        )
        own += reduce_loss(
            losses.distill_BT, masks.distill_BT & is_own_B1, denominators.distill, "sequence_mean"
        )
        reduced[term] = own
    kl_loss = reduce_loss(losses.kl_BT, masks.policy_BT, denominators.policy, reduction)
    return reduced, kl_loss, stats


def _token_losses(
    rows: Sequence[LearnSample],
    scores: TokenScores,
    fixed: Fixed,
    masks: _Masks,
    config: LearnerConfig,
) -> tuple[_Losses, TokenStats]:
    policy_BT, old_BT, mask_BT = scores.logprobs_BT, fixed.old_BT, masks.policy_BT
    sampler_BT = padded([stored_logprobs(s) for s in rows], old_BT)
    has_sampler_B = torch.tensor([s.sampler_logprobs is not None for s in rows])
    has_sampler_BT = mask_BT & has_sampler_B.to(mask_BT.device)[:, None]
    correction = sampler_correction(
        config.correction_in_force, old_BT, sampler_BT, has_sampler_BT, config.correction_cap
    )
    clip_low, clip_high = config.clip_range
    loss_BT, tokens = ALGORITHMS[config.algorithm].objective(
        policy_BT,
        old_BT,
        fixed.advantages,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.dual_clip,
    )
    weight_B1 = old_BT.new_tensor([[s.weight] for s in rows])
    kl_term_BT, kl_BT = _kl_terms(policy_BT, fixed.reference_BT, mask_BT, config)
    prefix_advantages_B = old_BT.new_tensor([s.prefix_advantage for s in rows])
    prefix_BT, prefix_weights_BT = prefix_credit(
        policy_BT, old_BT, sampler_BT, prefix_advantages_B, masks.prefix_BT, config.prefix_credit
    )
    losses = _Losses(
        policy_BT=weight_B1 * correction.weights_BT * loss_BT,
        kl_BT=weight_B1 * kl_term_BT,
        prefix_BT=weight_B1 * prefix_BT,
        distill_BT=weight_B1 * distill_loss(policy_BT, masks.distill_BT),
    )
    stats = TokenStats(
        rollout_ids=tuple(s.rollout_id for s in rows),
        terms=tuple(s.term for s in rows),
        loss_mask_BT=mask_BT,
        has_sampler_BT=has_sampler_BT,
        logprobs_BT=policy_BT.detach(),
        entropy_BT=scores.entropy_BT,
        mismatch_BT=(old_BT - sampler_BT).abs(),
        weights_BT=correction.weights_BT,
        is_truncated_BT=correction.is_truncated_BT,
        ratio_BT=tokens["ratio"],
        is_clipped_low_BT=tokens["is_clipped_low"],
        is_clipped_high_BT=tokens["is_clipped_high"],
        kl_BT=kl_BT,
        prefix_mask_BT=masks.prefix_BT,
        prefix_weights_BT=prefix_weights_BT,
        distill_mask_BT=masks.distill_BT,
    )
    return losses, stats


def _kl_terms(
    policy_BT: Tensor, reference_BT: Tensor | None, mask_BT: Tensor, config: LearnerConfig
) -> tuple[Tensor, Tensor | None]:
    """Return the KL loss of every token, and the k3 estimate that is recorded."""
    if reference_BT is None:
        return torch.zeros_like(policy_BT), None
    estimate_BT = kl_estimate(policy_BT, reference_BT, mask_BT, config.kl_estimator)
    recorded_BT = kl_estimate(policy_BT.detach(), reference_BT, mask_BT, "k3")
    return config.kl_coef * estimate_BT, recorded_BT


def check_loss(rows: Sequence[LearnSample], loss_BT: Tensor) -> None:
    """Raise a LearnerError that names the first sample whose loss is not finite."""
    for sample, is_finite in zip(rows, loss_BT.isfinite().all(dim=1).tolist(), strict=True):
        if not is_finite:
            raise LearnerError(
                f"rollout {sample.rollout_id}: expected a finite loss, got NaN or infinity; the "
                "policy's log-probs or the critic's values are broken (diverged, or damaged "
                "weights): go back to an earlier policy and lower `learning_rate`"
            )


def check_gradient(rows: Sequence[LearnSample], parameters: Iterable[Parameter]) -> None:
    """Raise a LearnerError that names the samples if a gradient is not finite."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not torch.nn.utils.get_total_norm(grads).isfinite():
        raise LearnerError(
            "expected a finite gradient, got NaN or infinity from the micro-batch of rollouts "
            f"{', '.join(s.rollout_id for s in rows)}; look at their advantages and log-probs, "
            "or lower `learning_rate`: the policy may have diverged"
        )
