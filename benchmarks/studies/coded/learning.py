"""One optimizer step over everything an iteration sampled, by the product's functions.

    L = L_policy + lambda L_distill + beta L_KL - entropy

The step is on-policy: the old policy is the policy, and the weights that correct for the sampler
are 1 but for replayed trajectories. The given tokens of a replayed state are in no policy term;
what they are credited with is a term of its own, a mean over these tokens. Sequences of a stage
are of one length, so each stage is a micro-batch without padding; their shares of the loss add up
to that of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.policy import Policy, picked, token_logprobs
from benchmarks.studies.coded.warm_start import BETAS
from benchmarks.studies.coded.world import ANSWER_TOKENS, Floats, Ints
from rrl_core.algorithms.corrections import sampler_correction
from rrl_core.algorithms.distill import distill_loss
from rrl_core.algorithms.kl import kl_estimate
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.prefix_credit import prefix_credit
from rrl_core.algorithms.ratios import entropy_from_logprobs
from rrl_core.algorithms.reduce import Denominators, reduce_loss

Term = Literal[
    "attempt", "continuation", "review", "second_attempt", "trajectory", "distill", "prefix"
]

ADDED: tuple[Term, ...] = ("distill", "prefix")
"""Further terms of sequences that are in the batch already, or of others: N does not count them."""

KL_COEF, KL_ESTIMATOR = 0.001, "k3"
CORRECTION, CORRECTION_CAP = "token_truncate", 2.0
GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Rollouts:
    """B sequences of one stage."""

    term: Term
    prompts: Ints
    """[B, T]"""
    completions: Ints
    """[B, L]"""
    sampler_logprobs: Floats
    """[B, L] when they were sampled; of distilled ones anything."""
    advantages: Floats
    """[B], with a critic [B, L]; of a prefix 0 or more; of distilled ones anything."""

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Ints) -> "Rollouts":
        """Return the sequences that an index [N] selects."""
        return Rollouts(
            self.term,
            self.prompts[rows],
            self.completions[rows],
            self.sampler_logprobs[rows],
            self.advantages[rows],
        )


class Learner:
    """AdamW on a policy that is compared with what it was at first."""

    def __init__(self, policy: Policy, reference: Policy, arm: Arm) -> None:
        self._policy, self._reference, self._arm = policy, reference, arm
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=arm.rate, betas=BETAS)

    def step(self, parts: Sequence[Rollouts]) -> None:
        """Take one step on the parts' common loss; none if nothing has a gradient to give."""
        loss = self.loss(parts)
        if loss is None:
            return
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(
            self._policy.parameters(), GRADIENT_NORM, error_if_nonfinite=True
        )
        self._optimizer.step()

    def loss(self, parts: Sequence[Rollouts]) -> Tensor | None:
        """Return the loss of a batch; None where every sequence has left it."""
        num_sequences = sum(len(part) for part in parts if part.term not in ADDED)
        if ALGORITHMS[self._arm.algorithm].only_positive:
            parts = [
                p if p.term in ADDED else p.take(np.flatnonzero(p.advantages > 0)) for p in parts
            ]
        parts = [part for part in parts if len(part)]
        policy = [part for part in parts if part.term not in ADDED]
        lengths_B = [part.completions.shape[1] for part in policy for _ in range(len(part))]
        denominators = Denominators.of_lengths(lengths_B, constant_tokens=ANSWER_TOKENS)
        # N of what is distilled counts what raft leaves out too: never the successes only.
        everything = Denominators(num_sequences, num_tokens=1, constant_tokens=1)
        losses = [self._term_loss(part, denominators, everything) for part in parts]
        return torch.stack(losses).sum() if losses else None

    def _term_loss(
        self, part: Rollouts, denominators: Denominators, everything: Denominators
    ) -> Tensor:
        if part.term == "distill":
            return self._distill_loss(part, everything)
        if part.term == "prefix":
            return self._prefix_loss(part, denominators)
        return self._policy_loss(part, denominators)

    def _policy_loss(self, part: Rollouts, denominators: Denominators) -> Tensor:
        """Return the part's share of objective, KL and entropy."""
        algorithm, arm = ALGORITHMS[self._arm.algorithm], self._arm
        logprobs_BLV, policy_BL = self._scores(self._policy, part)
        mask_BL = torch.ones_like(policy_BL, dtype=torch.bool)
        old_BL = policy_BL.detach()
        sampler_BL = torch.from_numpy(part.sampler_logprobs)
        correction = sampler_correction(CORRECTION, old_BL, sampler_BL, mask_BL, CORRECTION_CAP)
        loss_BL, _ = algorithm.objective(
            policy_BL,
            old_BL,
            torch.from_numpy(part.advantages),
            mask_BL,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        loss_BL = correction.weights_BT * loss_BL
        if part.term != "trajectory":  # KL and entropy are of what the policy samples now
            with torch.no_grad():
                _, reference_BL = self._scores(self._reference, part)
            kl_BL = kl_estimate(policy_BL, reference_BL, mask_BL, KL_ESTIMATOR)
            loss_BL = loss_BL + KL_COEF * kl_BL
            if arm.entropy:
                loss_BL = loss_BL - arm.entropy * entropy_from_logprobs(logprobs_BLV)
        return reduce_loss(loss_BL, mask_BL, denominators, algorithm.reduction)

    def _distill_loss(self, part: Rollouts, denominators: Denominators) -> Tensor:
        _, policy_BL = self._scores(self._policy, part)
        mask_BL = torch.ones_like(policy_BL, dtype=torch.bool)
        loss_BL = distill_loss(policy_BL, mask_BL)
        return self._arm.distill * reduce_loss(loss_BL, mask_BL, denominators, "sequence_mean")

    def _prefix_loss(self, part: Rollouts, denominators: Denominators) -> Tensor:
        _, policy_BL = self._scores(self._policy, part)
        mask_BL = torch.ones_like(policy_BL, dtype=torch.bool)
        loss_BL, _ = prefix_credit(
            policy_BL,
            policy_BL.detach(),
            torch.from_numpy(part.sampler_logprobs),
            torch.from_numpy(part.advantages).float(),
            mask_BL,
            self._arm.credit,
        )
        return reduce_loss(loss_BL, mask_BL, denominators, "sequence_mean")

    def _scores(self, policy: Policy, part: Rollouts) -> tuple[Tensor, Tensor]:
        """Return log-probs at the completions' places: of every token [B, L, V], and of theirs."""
        ids_BT = torch.from_numpy(np.concatenate([part.prompts, part.completions], axis=1))
        length = part.completions.shape[1]
        logprobs_BLV = token_logprobs(policy, ids_BT, self._arm.temperature)[:, -length:]
        return logprobs_BLV, picked(logprobs_BLV, ids_BT[:, -length:])
