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
5. With a critic (`actor_critic.py`) a step on samples that were not prepared is an iteration of
   its own, judged at its beginning. The first `critic_warmup` iterations move the critic alone.
6. A distilled sample needs no advantage, sampler log-probs or old policy and is in no denominator;
   a step must hold a sequence of a policy term to divide it by. There is none under a critic.
7. Of an episode of several turns what was given between them is masked: it is run, since the turns
   behind it see it, and counts in no term, statistic or denominator.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rrl_core.algorithms.corrections import is_corrigible
from rrl_core.algorithms.minibatches import plan_steps
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.reduce import Denominators
from rrl_core.policy.actor_critic import Estimate, estimate, fit_critic
from rrl_core.policy.adapters import adapter_parameters
from rrl_core.policy.bundle import bundle, is_bundle, unbundle
from rrl_core.policy.critic import Critic
from rrl_core.policy.logprobs import check_model, policy_logprobs, score_batch
from rrl_core.policy.loss import Fixed, StepDenominators, batch_loss, check_gradient
from rrl_core.policy.optimizer import optimizer_from_bytes, optimizer_to_bytes
from rrl_core.policy.packing import PackedBatch, pack
from rrl_core.policy.records import LearnerConfig, LearnerError, LearnSample, StepResult
from rrl_core.policy.samples import (
    num_scored_prefix_tokens,
    num_trained_tokens,
    padded,
    sample_problem,
    scored_branch,
)
from rrl_core.policy.statistics import (
    SampleStats,
    TokenStats,
    sample_stats,
    step_metrics,
    term_metrics,
)

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
    "take_steps",
]


class Learner:
    """AdamW over the adapter of `policy`; the base model is never touched.

    `critic` is None where the algorithm has none; one that has gives the policy's model a second
    adapter, idle outside the learner.

    Raises:
        UnsupportedModelError: the model cannot be packed, see `check_model`.
        AdapterError: the policy has a critic already, from another learner.
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
        self._estimates: dict[str, Estimate] = {}
        self._algorithm = ALGORITHMS[config.algorithm]
        self.critic: Critic | None = None
        if self._algorithm.has_critic:
            self.critic = Critic(
                policy, learning_rate=config.critic_learning_rate, seed=config.critic_seed
            )

    def prepare(self, samples: Sequence[LearnSample]) -> None:
        """Remember the present policy as the old policy of `samples`, and forget all others.

        Needed when several steps are taken on one iteration's samples; call it before the first,
        with the samples of all of them. One that comes in several steps is scored once.
        """
        self._check_samples(samples)
        unique = {s.rollout_id: s for s in samples}
        self._judge(unique.values())
        self._old = dict.fromkeys(unique, torch.empty(0))
        scored = [s for s in self._to_run(unique.values()) if s.term != "distill"]
        scores = policy_logprobs(
            self.policy,
            [scored_branch(s) for s in scored],
            max_tokens=self.config.micro_batch_tokens,
            share_prefix=self.config.packing,
        )
        for row, sample in enumerate(scored):
            length = len(scored_branch(sample).completion_ids)
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
        if not self._is_prepared(samples):
            self._judge(samples)
        lengths_B = [self._num_loss_tokens(s) for s in samples]
        denominators = self._denominators(samples)
        is_skipped = not any(self._teaches(s) for s in samples)
        losses, kl_loss, seen = self._differentiate(samples, denominators, is_skipped)
        policy_loss = sum(losses.values(), 0.0)
        # It may refuse: before our own step.
        critic_metrics = self._fit_critic(samples, denominators.policy)
        value_loss = self.config.vf_coef * critic_metrics.get("value_loss", 0.0)
        by_id = {s.rollout_id: s for stats in seen for s in sample_stats(stats)}
        return StepResult(
            loss=policy_loss + kl_loss + value_loss,
            policy_loss=policy_loss,
            kl_loss=kl_loss,
            grad_norm=0.0 if is_skipped else self._update(),
            learning_rate=self.config.learning_rate,
            num_sequences=denominators.policy.num_sequences,
            num_loss_tokens=denominators.policy.num_tokens,
            is_skipped=is_skipped and not critic_metrics,
            metrics=step_metrics(seen)
            | term_metrics(seen, losses, [s.term for s in samples], lengths_B)
            | critic_metrics,
            samples=[
                by_id.get(s.rollout_id, SampleStats(s.rollout_id, length))
                for s, length in zip(samples, lengths_B, strict=True)
            ],
            elapsed_s=perf_counter() - started_s,
        )

    def optimizer_state(self) -> bytes:
        """Return AdamW's state and the critic, if there is one; equal states give equal bytes."""
        state = optimizer_to_bytes(self._optimizer, self._parameters)
        if self.critic is None:
            return state
        return bundle({"policy": state, "critic": self.critic.to_bytes()})

    def load_optimizer_state(self, data: bytes) -> None:
        """Go on from what `optimizer_state` returned; with its adapter, bit for bit.

        A state saved under an algorithm without a critic leaves the critic as it is, and one saved
        with a critic is read without it where there is none: so a run may go on under another
        algorithm.

        Raises:
            OptimizerStateError, CriticError, AdapterError: damaged, or of another adapter; where
                there is no critic, nothing was changed.
        """
        parts = unbundle(data) if is_bundle(data) else {"policy": data}
        if self.critic is not None and "critic" in parts:
            self.critic.from_bytes(parts["critic"])
        optimizer_from_bytes(self._optimizer, self._parameters, parts.get("policy", data))

    def _judge(self, samples: Iterable[LearnSample]) -> None:
        """Begin an iteration of the critic: judge these samples, and forget all others."""
        if self.critic is not None:
            staying = [s for s in samples if self._num_loss_tokens(s)]
            self._old, self._estimates = {}, estimate(self.critic, staying, self.config)
            self.critic.num_iterations += bool(staying)

    def _fit_critic(
        self, samples: Iterable[LearnSample], denominators: Denominators
    ) -> dict[str, float]:
        """Take the critic's step; return its metrics, none where there is nothing to fit."""
        staying = [s for s in samples if self._num_loss_tokens(s)]
        if self.critic is None or not staying:
            return {}
        return fit_critic(self.critic, staying, self._estimates, denominators, self.config)

    def _num_loss_tokens(self, sample: LearnSample) -> int:
        """Return how many tokens the sample is trained on: 0 if it leaves the loss."""
        if sample.term == "distill":
            return num_trained_tokens(sample)
        is_wanted = sample.advantage > 0 or not self._algorithm.only_positive
        return self._num_policy_tokens(sample) if is_wanted else 0

    def _num_policy_tokens(self, sample: LearnSample) -> int:
        """Return how many tokens its policy term could have, whatever the advantage."""
        has_logprobs = sample.sampler_logprobs is not None
        stays = is_corrigible(self.config.correction_in_force, has_logprobs)
        return num_trained_tokens(sample) if stays else 0

    def _denominators(self, samples: Sequence[LearnSample]) -> StepDenominators:
        """Count the step; refuse one that has nothing to divide its distilled samples by."""
        constant = self.config.max_completion_tokens
        policy = [s for s in samples if s.term != "distill"]
        found = StepDenominators(
            policy=Denominators.of_lengths([self._num_loss_tokens(s) for s in policy], constant),
            distill=Denominators.of_lengths([self._num_policy_tokens(s) for s in policy], constant),
        )
        distilled = [s for s in samples if s.term == "distill"]
        if distilled and not found.distill.num_sequences:
            raise LearnerError(
                f"rollout {distilled[0].rollout_id}: expected sequences of policy terms in the "
                f"step to divide the {len(distilled)} distilled ones by, got {len(policy)} of "
                "which none is in the loss; take it in the step of its group, or learn from it "
                "alone as an attempt under `sft`"
            )
        return found

    def _teaches(self, sample: LearnSample) -> bool:
        """Return whether the sample has a gradient of the policy."""
        if self._num_loss_tokens(sample) == 0 or sample.weight == 0:
            return False
        if self.critic is not None and self.critic.num_iterations <= self.config.critic_warmup:
            return False
        has_prefix_term = sample.prefix_advantage != 0 and self.config.prefix_credit != "none"
        has_gradient = sample.term == "distill" or has_prefix_term or self.config.kl_coef > 0
        return has_gradient or self._has_advantage(sample)

    def _has_advantage(self, sample: LearnSample) -> bool:
        if self.critic is not None:
            return bool(self._estimates[sample.rollout_id].advantages_T.any())
        return sample.advantage != 0 or not self._algorithm.has_ratio

    def _to_run(self, samples: Iterable[LearnSample]) -> list[LearnSample]:
        """Return the samples that need a forward pass."""
        is_wanted = self._teaches if self.config.skip_zero_advantage else self._num_loss_tokens
        return [s for s in samples if is_wanted(s)]

    def _micro_batches(
        self, samples: Sequence[LearnSample]
    ) -> Iterator[tuple[PackedBatch, list[LearnSample]]]:
        for batch in pack(
            [scored_branch(s) for s in samples],
            max_tokens=self.config.micro_batch_tokens,
            pad_token_id=self.policy.pad_token_id,
            share_prefix=self.config.packing,
        ):
            yield batch, [samples[i] for i in batch.branches]

    def _differentiate(
        self, samples: Sequence[LearnSample], denominators: StepDenominators, is_skipped: bool
    ) -> tuple[dict[str, float], float, list[TokenStats]]:
        """Run what is to be run, with its gradient unless skipped.

        Returns the loss of each term, the KL term, and the records.
        """
        losses: dict[str, float] = {}
        kl_loss = 0.0
        seen: list[TokenStats] = []
        self._optimizer.zero_grad()
        with torch.set_grad_enabled(not is_skipped):
            for batch, rows in self._micro_batches(self._to_run(samples)):
                parts, kl_term, stats = self._run(rows, batch, denominators)
                if not is_skipped:
                    sum(parts.values(), kl_term).backward()  # type: ignore[no-untyped-call]
                    check_gradient(rows, self._parameters.values())
                for term, loss in parts.items():
                    losses[term] = losses.get(term, 0.0) + loss.item()
                kl_loss += kl_term.item()
                seen.append(stats)
        return losses, kl_loss, seen

    def _run(
        self, rows: Sequence[LearnSample], batch: PackedBatch, denominators: StepDenominators
    ) -> tuple[dict[str, Tensor], Tensor, TokenStats]:
        """Return the loss of each term of a micro-batch, the KL term, and its records."""
        reference_BT = None
        if self.config.kl_coef > 0:
            with torch.no_grad(), self.policy.reference():
                reference_BT = score_batch(self.policy, batch).logprobs_BT
        scores = score_batch(self.policy, batch)
        old_BT = scores.logprobs_BT.detach()
        if rows[0].rollout_id in self._old:
            old_BT = padded([self._old[s.rollout_id] for s in rows], old_BT)
        fixed = Fixed(old_BT, reference_BT, self._advantages(rows, old_BT))
        return batch_loss(rows, scores, fixed, denominators, self.config)

    def _advantages(self, rows: Sequence[LearnSample], like_BT: Tensor) -> Tensor:
        """Return the advantages of the rows [B], with a critic those of their tokens [B, T]."""
        if self.critic is None:
            return like_BT.new_tensor([s.advantage for s in rows])
        given = [torch.zeros(num_scored_prefix_tokens(s)) for s in rows]
        own = [self._estimates[s.rollout_id].advantages_T for s in rows]
        return padded([torch.cat(parts) for parts in zip(given, own, strict=True)], like_BT)

    def _update(self) -> float:
        """Clip the gradient, take the step, return the norm before clipping."""
        limit = self.config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters.values(), math.inf if limit is None else limit
        )
        self._optimizer.step()
        return float(norm)

    def _check_samples(self, samples: Sequence[LearnSample]) -> None:
        context_tokens = self.policy.context_tokens
        for sample in samples:
            problem = sample_problem(sample, context_tokens) or self._missing(sample)
            if problem:
                raise LearnerError(f"rollout {sample.rollout_id}: {problem}")

    def _missing(self, sample: LearnSample) -> str | None:
        """Return what the configuration needs of the sample and it lacks."""
        if self.critic is not None and sample.term != "attempt":
            return (
                f"expected attempts only under `{self.config.algorithm}`, got one to learn from as "
                f"{sample.term}, whose states the critic has no values of; use an algorithm "
                "without a critic, such as grpo"
            )
        if self.critic is not None and sample.reward is None:
            return "expected a reward for the critic, got none; leave out what was not scored"
        needs_logprobs = self.config.prefix_credit == "corrected" and sample.prefix_advantage != 0
        if needs_logprobs and sample.prefix_logprobs is None:
            return (
                "expected stored sampler log-probs of its given tokens for prefix credit "
                "`corrected`, got none; give it a prefix advantage of 0, or use `direct`"
            )
        return None

    def _is_prepared(self, samples: Sequence[LearnSample]) -> bool:
        """Return whether the samples were prepared; all or none must be, and each come once."""
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
        return not unprepared


def take_steps(learner: Learner, steps: Sequence[Sequence[LearnSample]]) -> Iterator[StepResult]:
    """Take an iteration's optimizer steps one after the other; yield what each did.

    Later steps are off-policy: they need the log-probs from before the first.
    """
    unique = {sample.rollout_id: sample for batch in steps for sample in batch}
    learner.prepare(list(unique.values()) if len(steps) > 1 else [])
    for batch in steps:
        yield learner.step(batch)
