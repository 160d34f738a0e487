"""One optimizer step over everything an iteration sampled, by the product's functions.

    L = L_policy + lambda L_distill + beta L_KL - entropy

The step is on-policy: the old policy is the policy, and the weights that correct for the sampler
are 1 but for replayed trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.policy import Policy, padded, picked, token_logprobs
from benchmarks.studies.coded.world import Floats, Ints
from rrl_core.algorithms.corrections import sampler_correction
from rrl_core.algorithms.distill import distill_loss
from rrl_core.algorithms.kl import kl_estimate
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.ratios import entropy_from_logprobs
from rrl_core.algorithms.reduce import Denominators, reduce_loss

Term = Literal["attempt", "review", "second_attempt", "trajectory", "distill"]

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
    """[B]; of distilled ones anything."""

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Sequence[int] | Ints) -> "Rollouts":
        """Return the sequences that an index [N] selects."""
        held = self.prompts, self.completions, self.sampler_logprobs, self.advantages
        return Rollouts(self.term, *(each[rows] for each in held))


class Learner:
    """AdamW on a policy that is compared with what it was at first."""

    def __init__(self, policy: Policy, reference: Policy, arm: Arm) -> None:
        self._policy, self._reference, self._arm = policy, reference, arm
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=arm.rate, betas=(0.9, 0.95))

    def step(self, parts: Sequence[Rollouts]) -> None:
        """Take one step on the parts' common loss; none if nothing has a gradient to give."""
        loss = self.loss([part for part in parts if len(part)])
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
        algorithm, arm = ALGORITHMS[self._arm.algorithm], self._arm
        num_sequences = sum(len(part) for part in parts if part.term != "distill")
        if algorithm.only_positive:
            parts = [p if p.term == "distill" else p.take(p.advantages > 0) for p in parts]
        batch = _Batch.of_parts([part for part in parts if len(part)])
        if batch is None:
            return None
        logprobs_BTV = token_logprobs(self._policy, batch.ids_BT, arm.temperature)
        policy_BT = picked(logprobs_BTV, batch.ids_BT)
        mask_BT, distill_BT = batch.policy_mask_BT, batch.distill_mask_BT
        old_BT = policy_BT.detach()
        correction = sampler_correction(
            CORRECTION, old_BT, batch.sampler_BT, mask_BT, CORRECTION_CAP
        )
        loss_BT, _ = algorithm.objective(
            policy_BT,
            old_BT,
            batch.advantages_B,
            mask_BT,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        loss_BT = correction.weights_BT * loss_BT
        # Old trajectories are off-policy: KL and entropy are estimated on what was sampled now.
        fresh_BT = mask_BT & ~batch.is_old_B[:, None]
        loss_BT = loss_BT + KL_COEF * self._kl(policy_BT, batch.ids_BT, fresh_BT)
        if arm.entropy:
            entropy_BT = entropy_from_logprobs(logprobs_BTV)
            loss_BT = loss_BT - arm.entropy * torch.where(fresh_BT, entropy_BT, 0.0)
        denominators = Denominators.of_lengths(mask_BT.sum(dim=1).tolist(), 1)
        loss = reduce_loss(loss_BT, mask_BT, denominators, algorithm.reduction)
        everything = replace(denominators, num_sequences=num_sequences, num_tokens=1)
        distilled_BT = distill_loss(policy_BT, distill_BT)
        return loss + arm.distill * reduce_loss(
            distilled_BT, distill_BT, everything, "sequence_mean"
        )

    def _kl(self, policy_BT: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        with torch.no_grad():
            logprobs_BTV = token_logprobs(self._reference, ids_BT, self._arm.temperature)
        return kl_estimate(policy_BT, picked(logprobs_BTV, ids_BT), mask_BT, KL_ESTIMATOR)


@dataclass(frozen=True)
class _Batch:
    """Sequences in one padded batch; masks and log-probs [B, T - 1] belong to the next token."""

    ids_BT: Tensor
    sampler_BT: Tensor
    advantages_B: Tensor
    is_old_B: Tensor
    policy_mask_BT: Tensor
    distill_mask_BT: Tensor

    @classmethod
    def of_parts(cls, parts: Sequence[Rollouts]) -> "_Batch | None":
        if not parts:
            return None
        rows = [ids for p in parts for ids in np.concatenate([p.prompts, p.completions], axis=1)]
        ids_BT = padded(rows)
        sampler_BT = np.zeros((len(ids_BT), ids_BT.shape[1] - 1), dtype=np.float32)
        mask_BT = np.zeros(sampler_BT.shape, dtype=bool)
        start = 0
        for part in parts:
            stop, first = start + len(part), part.prompts.shape[1] - 1
            tokens = slice(first, first + part.completions.shape[1])
            mask_BT[start:stop, tokens] = True
            sampler_BT[start:stop, tokens] = part.sampler_logprobs
            start = stop
        terms = np.repeat([part.term for part in parts], [len(part) for part in parts])
        is_distilled_B1 = torch.from_numpy(terms == "distill")[:, None]
        mask = torch.from_numpy(mask_BT)
        return cls(
            ids_BT=ids_BT,
            sampler_BT=torch.from_numpy(sampler_BT),
            advantages_B=torch.from_numpy(np.concatenate([p.advantages for p in parts])).float(),
            is_old_B=torch.from_numpy(terms == "trajectory"),
            policy_mask_BT=mask & ~is_distilled_B1,
            distill_mask_BT=mask & is_distilled_B1,
        )
