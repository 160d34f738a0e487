"""The policy's loss of a micro-batch: objective, correction, KL, prefix term, reduction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from rrl_core.algorithms.corrections import sampler_correction
from rrl_core.algorithms.kl import kl_estimate
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.prefix_credit import prefix_credit
from rrl_core.algorithms.reduce import Denominators, reduce_loss
from rrl_core.policy.logprobs import TokenScores
from rrl_core.policy.records import LearnerConfig, LearnerError, LearnSample
from rrl_core.policy.samples import padded, prefix_mask, stored_logprobs
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


def batch_loss(
    rows: Sequence[LearnSample],
    scores: TokenScores,
    fixed: Fixed,
    denominators: Denominators,
    config: LearnerConfig,
) -> tuple[Tensor, Tensor, TokenStats]:
    """Compute a micro-batch's share of the loss.

    Args:
        rows: the B samples of the micro-batch.
        scores: of the policy; the gradient flows through them.
        fixed: what the objective compares them with.
        denominators: of the whole step.
        config: of the learner.

    Returns:
        [] policy term, [] KL term (weighted by `kl_coef`), and the records of every token.

    Raises:
        LearnerError: the loss of a sample is not finite.
    """
    algorithm = ALGORITHMS[config.algorithm]
    policy_BT, old_BT = scores.logprobs_BT, fixed.old_BT
    prefix_mask_BT = prefix_mask(rows, scores.loss_mask_BT)
    mask_BT = scores.loss_mask_BT & ~prefix_mask_BT
    sampler_BT = padded([stored_logprobs(s) for s in rows], old_BT)
    has_sampler_B = torch.tensor([s.sampler_logprobs is not None for s in rows])
    has_sampler_BT = mask_BT & has_sampler_B.to(mask_BT.device)[:, None]
    correction = sampler_correction(
        config.correction_in_force, old_BT, sampler_BT, has_sampler_BT, config.correction_cap
    )
    clip_low, clip_high = config.clip_range
    loss_BT, tokens = algorithm.objective(
        policy_BT,
        old_BT,
        fixed.advantages,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.dual_clip,
    )
    weight_B1 = old_BT.new_tensor([[s.weight] for s in rows])
    policy_term_BT = weight_B1 * correction.weights_BT * loss_BT
    kl_term_BT, kl_BT = torch.zeros_like(loss_BT), None
    if fixed.reference_BT is not None:
        estimate_BT = kl_estimate(policy_BT, fixed.reference_BT, mask_BT, config.kl_estimator)
        kl_term_BT = config.kl_coef * weight_B1 * estimate_BT
        kl_BT = kl_estimate(policy_BT.detach(), fixed.reference_BT, mask_BT, "k3")
    prefix_advantages_B = old_BT.new_tensor([s.prefix_advantage for s in rows])
    prefix_BT, prefix_weights_BT = prefix_credit(
        policy_BT, old_BT, sampler_BT, prefix_advantages_B, prefix_mask_BT, config.prefix_credit
    )
    prefix_BT = weight_B1 * prefix_BT
    check_loss(rows, policy_term_BT + kl_term_BT + prefix_BT)
    stats = TokenStats(
        rollout_ids=tuple(s.rollout_id for s in rows),
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
        prefix_mask_BT=prefix_mask_BT,
        prefix_weights_BT=prefix_weights_BT,
    )
    policy_loss = reduce_loss(policy_term_BT, mask_BT, denominators, algorithm.reduction)
    # A mean over the prefix under any objective: every state group weighs what a group weighs.
    policy_loss += reduce_loss(prefix_BT, prefix_mask_BT, denominators, "sequence_mean")
    kl_loss = reduce_loss(kl_term_BT, mask_BT, denominators, algorithm.reduction)
    return policy_loss, kl_loss, stats


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
