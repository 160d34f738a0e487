"""The learner: one optimizer step over a list of samples, whatever fits into memory at once.

A step reads top to bottom in `Learner.step`: count the denominators over the whole list, pack what
has something to teach, run and differentiate one micro-batch after the other, clip, step. The
denominators are those of the whole list, so loss and gradient do not depend on the split.

Our choices:
1. A sample with advantage (or weight) 0 and no KL term has no gradient; with `skip_zero_advantage`
   it is not run at all. It counts in every denominator; its statistics are None.
2. A sample without sampler log-probs leaves the loss under any correction but "none"
   (`num_loss_tokens` 0), as does an empty completion. Both leave the denominators too.
3. Samples that were not prepared have the policy as their old policy: ratio 1, the on-policy
   gradient, and no extra forward pass.
4. If nothing has an advantage and there is no KL term, no step is taken: momentum and weight decay
   would move the adapter without a reason.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rrl_core.algorithms.corrections import is_corrigible, sampler_correction
from rrl_core.algorithms.kl import kl_estimate
from rrl_core.algorithms.minibatches import plan_steps
from rrl_core.algorithms.objectives import ALGORITHMS, clipped_surrogate
from rrl_core.algorithms.prefix_credit import prefix_credit
from rrl_core.algorithms.reduce import Denominators, reduce_loss
from rrl_core.policy.adapters import adapter_parameters
from rrl_core.policy.logprobs import TokenScores, check_model, policy_logprobs, score_batch
from rrl_core.policy.optimizer import optimizer_from_bytes, optimizer_to_bytes
from rrl_core.policy.packing import Branch, PackedBatch, pack
from rrl_core.policy.records import LearnerConfig, LearnerError, LearnSample, StepResult
from rrl_core.policy.statistics import SampleStats, TokenStats, sample_stats, step_metrics

if TYPE_CHECKING:
    from rrl_core.policy.model import Policy

__all__ = [
    "LearnSample",
    "Learner",
    "LearnerConfig",
    "LearnerError",
    "SampleStats",
    "StepResult",
    "plan_steps",
]


class Learner:
    """AdamW over the adapter of `policy`; the base model is never touched.

    Raises:
        UnsupportedModelError: the model cannot be packed, see `check_model`.
    """

    def __init__(self, policy: "Policy", config: LearnerConfig) -> None:
        check_model(policy)
        self.policy = policy
        self.config = config
        self._parameters = adapter_parameters(policy.model)
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self._old: dict[str, Tensor] = {}

    def prepare(self, samples: Sequence[LearnSample]) -> None:
        """Remember the present policy as the old policy of `samples`, and forget all others.

        Needed when several steps are taken on one iteration's samples; call it before the first,
        with the samples of all of them. One that comes in several steps is scored once.
        """
        self._check_samples(samples)
        self._old = {s.rollout_id: torch.empty(0) for s in samples}
        scored = self._to_run({s.rollout_id: s for s in samples}.values())
        scores = policy_logprobs(
            self.policy,
            [_branch(s) for s in scored],
            max_tokens=self.config.micro_batch_tokens,
            share_prefix=self.config.packing,
        )
        for row, sample in enumerate(scored):
            length = len(_branch(sample).completion_ids)
            self._old[sample.rollout_id] = scores.logprobs_BT[row, :length]

    def step(self, samples: Sequence[LearnSample]) -> StepResult:
        """Take one optimizer step on the loss of the whole list.

        Args:
            samples: the batch; every rollout id once. Either all of them were prepared, or none.

        Returns:
            The result; `is_skipped` if no sample had anything to teach and nothing was changed.

        Raises:
            LearnerError: a sample is malformed, or its loss or gradient is not finite.
        """
        started_s = perf_counter()
        self._check_samples(samples)
        self._check_membership(samples)
        lengths_B = [self._num_loss_tokens(s) for s in samples]
        denominators = Denominators.of_lengths(lengths_B, self.config.max_completion_tokens)
        is_skipped = not any(self._teaches(s) for s in samples)
        policy_loss = kl_loss = 0.0
        seen: list[TokenStats] = []
        self._optimizer.zero_grad()
        with torch.set_grad_enabled(not is_skipped):
            for batch, rows in self._micro_batches(self._to_run(samples)):
                policy_term, kl_term, stats = self._run(rows, batch, denominators)
                if not is_skipped:
                    (policy_term + kl_term).backward()  # type: ignore[no-untyped-call]
                    self._check_gradient(rows)
                policy_loss += policy_term.item()
                kl_loss += kl_term.item()
                seen.append(stats)
        by_id = {s.rollout_id: s for stats in seen for s in sample_stats(stats)}
        return StepResult(
            loss=policy_loss + kl_loss,
            policy_loss=policy_loss,
            kl_loss=kl_loss,
            grad_norm=0.0 if is_skipped else self._update(),
            learning_rate=self.config.learning_rate,
            num_sequences=denominators.num_sequences,
            num_loss_tokens=denominators.num_tokens,
            is_skipped=is_skipped,
            metrics=step_metrics(seen),
            samples=[
                by_id.get(s.rollout_id, SampleStats(s.rollout_id, length))
                for s, length in zip(samples, lengths_B, strict=True)
            ],
            elapsed_s=perf_counter() - started_s,
        )

    def optimizer_state(self) -> bytes:
        """Return AdamW's state; equal states give equal bytes."""
        return optimizer_to_bytes(self._optimizer, self._parameters)

    def load_optimizer_state(self, data: bytes) -> None:
        """Go on from what `optimizer_state` returned; with its adapter, bit for bit.

        Raises:
            OptimizerStateError: damaged, or of another adapter.
        """
        optimizer_from_bytes(self._optimizer, self._parameters, data)

    def _num_loss_tokens(self, sample: LearnSample) -> int:
        """Return how many tokens the sample is trained on: 0 if it leaves the loss."""
        stays = is_corrigible(self.config.correction, sample.sampler_logprobs is not None)
        return len(sample.completion_ids) if stays else 0

    def _teaches(self, sample: LearnSample) -> bool:
        """Return whether the sample has a gradient."""
        has_prefix_term = sample.prefix_advantage != 0 and self.config.prefix_credit != "none"
        has_term = sample.advantage != 0 or has_prefix_term or self.config.kl_coef > 0
        return has_term and sample.weight != 0 and self._num_loss_tokens(sample) > 0

    def _to_run(self, samples: Iterable[LearnSample]) -> list[LearnSample]:
        """Return the samples that need a forward pass."""
        is_wanted = self._teaches if self.config.skip_zero_advantage else self._num_loss_tokens
        return [s for s in samples if is_wanted(s)]

    def _micro_batches(
        self, samples: Sequence[LearnSample]
    ) -> Iterator[tuple[PackedBatch, list[LearnSample]]]:
        for batch in pack(
            [_branch(s) for s in samples],
            max_tokens=self.config.micro_batch_tokens,
            pad_token_id=self.policy.pad_token_id,
            share_prefix=self.config.packing,
        ):
            yield batch, [samples[i] for i in batch.branches]

    def _run(
        self, rows: Sequence[LearnSample], batch: PackedBatch, denominators: Denominators
    ) -> tuple[Tensor, Tensor, TokenStats]:
        """Return the policy term and the KL term of a micro-batch, and its records."""
        reference_BT = None
        if self.config.kl_coef > 0:
            with torch.no_grad(), self.policy.reference():
                reference_BT = score_batch(self.policy, batch).logprobs_BT
        scores = score_batch(self.policy, batch)
        old_BT = scores.logprobs_BT.detach()
        if rows[0].rollout_id in self._old:
            old_BT = _padded([self._old[s.rollout_id] for s in rows], old_BT)
        return batch_loss(rows, scores, old_BT, reference_BT, denominators, self.config)

    def _update(self) -> float:
        """Clip the gradient, take the step, return the norm before clipping."""
        limit = self.config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters.values(), math.inf if limit is None else limit
        )
        self._optimizer.step()
        return float(norm)

    def _check_gradient(self, rows: Sequence[LearnSample]) -> None:
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not torch.nn.utils.get_total_norm(grads).isfinite():
            raise LearnerError(
                "expected a finite gradient, got NaN or infinity from the micro-batch of rollouts "
                f"{', '.join(s.rollout_id for s in rows)}; look at their advantages and log-probs, "
                "or lower `learning_rate`: the policy may have diverged"
            )

    def _check_samples(self, samples: Sequence[LearnSample]) -> None:
        context_tokens = self.policy.context_tokens
        for sample in samples:
            problem = _problem(sample, context_tokens) or self._prefix_problem(sample)
            if problem:
                raise LearnerError(f"rollout {sample.rollout_id}: {problem}")

    def _prefix_problem(self, sample: LearnSample) -> str | None:
        needs_logprobs = self.config.prefix_credit == "corrected" and sample.prefix_advantage != 0
        if needs_logprobs and sample.prefix_logprobs is None:
            return (
                "expected stored sampler log-probs of its given tokens for prefix credit "
                "`corrected`, got none; give it a prefix advantage of 0, or use `direct`"
            )
        return None

    def _check_membership(self, samples: Sequence[LearnSample]) -> None:
        if len({s.rollout_id for s in samples}) < len(samples):
            raise LearnerError(
                f"expected every rollout once, got {len(samples)} samples with repeated ids; "
                "give repeats ids of their own"
            )
        unprepared = [s.rollout_id for s in samples if s.rollout_id not in self._old]
        if 0 < len(unprepared) < len(samples):
            raise LearnerError(
                f"expected all samples of a step to be prepared, or none, got {len(samples)} of "
                f"which {len(unprepared)} are not, such as {unprepared[0]}; call `prepare` with "
                "every sample of the iteration"
            )


def batch_loss(
    rows: Sequence[LearnSample],
    scores: TokenScores,
    old_BT: Tensor,
    reference_BT: Tensor | None,
    denominators: Denominators,
    config: LearnerConfig,
) -> tuple[Tensor, Tensor, TokenStats]:
    """Compute a micro-batch's share of the loss: objective, correction, KL, reduction.

    Args:
        rows: the B samples of the micro-batch.
        scores: of the policy; the gradient flows through them.
        old_BT: [B, T] float32 log-probs of the old policy, detached.
        reference_BT: [B, T] float32 log-probs of the reference policy; None: no KL term.
        denominators: of the whole step.
        config: of the learner.

    Returns:
        [] policy term, [] KL term (weighted by `kl_coef`), and the records of every token.

    Raises:
        LearnerError: the loss of a sample is not finite.
    """
    policy_BT = scores.logprobs_BT
    prefix_mask_BT = _prefix_mask(rows, scores.loss_mask_BT)
    mask_BT = scores.loss_mask_BT & ~prefix_mask_BT
    sampler_BT = _padded([_stored_logprobs(s) for s in rows], old_BT)
    has_sampler_B = torch.tensor([s.sampler_logprobs is not None for s in rows])
    has_sampler_BT = mask_BT & has_sampler_B.to(mask_BT.device)[:, None]
    correction = sampler_correction(
        config.correction, old_BT, sampler_BT, has_sampler_BT, config.correction_cap
    )
    clip_low, clip_high = config.clip_range
    loss_BT, tokens = clipped_surrogate(
        policy_BT,
        old_BT,
        old_BT.new_tensor([s.advantage for s in rows]),
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.dual_clip,
    )
    weight_B1 = old_BT.new_tensor([[s.weight] for s in rows])
    policy_term_BT = weight_B1 * correction.weights_BT * loss_BT
    kl_term_BT, kl_BT = torch.zeros_like(loss_BT), None
    if reference_BT is not None:
        estimate_BT = kl_estimate(policy_BT, reference_BT, mask_BT, config.kl_estimator)
        kl_term_BT = config.kl_coef * weight_B1 * estimate_BT
        kl_BT = kl_estimate(policy_BT.detach(), reference_BT, mask_BT, "k3")
    prefix_advantages_B = old_BT.new_tensor([s.prefix_advantage for s in rows])
    prefix_BT, prefix_weights_BT = prefix_credit(
        policy_BT, old_BT, sampler_BT, prefix_advantages_B, prefix_mask_BT, config.prefix_credit
    )
    prefix_BT = weight_B1 * prefix_BT
    _check_finite(rows, policy_term_BT + kl_term_BT + prefix_BT)
    reduction = ALGORITHMS[config.algorithm].reduction
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
    policy_loss = reduce_loss(policy_term_BT, mask_BT, denominators, reduction)
    # A mean over the prefix under any objective: every state group weighs what a group weighs.
    policy_loss += reduce_loss(prefix_BT, prefix_mask_BT, denominators, "sequence_mean")
    return policy_loss, reduce_loss(kl_term_BT, mask_BT, denominators, reduction), stats


def _branch(sample: LearnSample) -> Branch:
    """Return what of the sample is scored: its given tokens too where they get credit."""
    given = sample.prefix_ids
    if sample.prefix_advantage != 0:
        return Branch(sample.prompt_ids, given + sample.completion_ids, sample.temperature)
    return Branch(sample.prompt_ids + given, sample.completion_ids, sample.temperature)


def _num_scored_prefix_tokens(sample: LearnSample) -> int:
    return len(sample.prefix_ids) if sample.prefix_advantage != 0 else 0


def _prefix_mask(rows: Sequence[LearnSample], mask_BT: Tensor) -> Tensor:
    """Return [B, T] bool, True = a given token of a row whose prefix gets credit."""
    num_given_B = torch.tensor([_num_scored_prefix_tokens(s) for s in rows], device=mask_BT.device)
    return torch.arange(mask_BT.shape[1], device=mask_BT.device) < num_given_B[:, None]


def _stored_logprobs(sample: LearnSample) -> tuple[float, ...]:
    """Return the sampler log-probs of the scored tokens; zeros stand where there are none."""
    num_given = _num_scored_prefix_tokens(sample)
    given = sample.prefix_logprobs or (0.0,) * num_given
    return given[:num_given] + (sample.sampler_logprobs or ())


def _padded(rows: Sequence[Sequence[float] | Tensor], like_BT: Tensor) -> Tensor:
    """Stack rows of different lengths, zeros behind them, in the shape of `like_BT`."""
    padded_BT = torch.zeros_like(like_BT)
    for row, values in enumerate(rows):
        padded_BT[row, : len(values)] = torch.as_tensor(values)
    return padded_BT


def _problem(sample: LearnSample, context_tokens: int) -> str | None:
    """Return what is wrong with a sample: what was expected, what came."""
    num_tokens = len(sample.prompt_ids) + len(sample.prefix_ids) + len(sample.completion_ids)
    logprobs = sample.sampler_logprobs
    if not sample.prompt_ids:
        return "expected at least one prompt token to predict from, got none"
    if num_tokens > context_tokens:
        return f"expected at most {context_tokens} tokens with its prompt, got {num_tokens}"
    if logprobs is not None and len(logprobs) != len(sample.completion_ids):
        return (
            f"expected one sampler log-prob per completion token, got {len(logprobs)} for "
            f"{len(sample.completion_ids)}; give None where the sampler has none"
        )
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        return "expected finite sampler log-probs; give None for the whole sample instead"
    if not sample.temperature > 0:
        return (
            f"expected a temperature above 0, got {sample.temperature}; a greedy completion has no "
            "log-probs to learn from"
        )
    if sample.prefix_logprobs is not None and len(sample.prefix_logprobs) != len(sample.prefix_ids):
        return (
            f"expected one sampler log-prob per given token, got {len(sample.prefix_logprobs)} for "
            f"{len(sample.prefix_ids)}; give None where the sampler had none"
        )
    if sample.prefix_advantage < 0 or not math.isfinite(sample.prefix_advantage):
        return f"expected a finite prefix advantage of 0 or more, got {sample.prefix_advantage}"
    if not (math.isfinite(sample.advantage) and math.isfinite(sample.weight)):
        return f"expected finite numbers, got advantage {sample.advantage}, weight {sample.weight}"
    return None


def _check_finite(rows: Sequence[LearnSample], loss_BT: Tensor) -> None:
    for sample, is_finite in zip(rows, loss_BT.isfinite().all(dim=1).tolist(), strict=True):
        if not is_finite:
            raise LearnerError(
                f"rollout {sample.rollout_id}: expected a finite loss, got NaN or infinity; the "
                "policy's log-probs are broken (diverged, or damaged weights): go back to an "
                "earlier policy and lower `learning_rate`"
            )
