"""The critic of the arm `ppo`: a copy of the start policy with a value in the place of its head."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.studies.coded.learning import GRADIENT_NORM, Rollouts
from benchmarks.studies.coded.policy import Policy
from benchmarks.studies.coded.warm_start import BETAS
from benchmarks.studies.coded.world import Floats
from rrl_core.algorithms.gae import gae, value_loss, whiten
from rrl_core.algorithms.reduce import Denominators, reduce_loss

GAMMA, LAMBDA = 1.0, 1.0
WARMUP = 2
"""Iterations that the critic learns alone."""


class Critic:
    """Values of the states before each token, with an optimizer of its own."""

    def __init__(self, start: Policy, rate: float) -> None:
        self._body = copy.deepcopy(start)
        self._body.head = nn.Linear(start.shape.width, 1)
        nn.init.zeros_(self._body.head.weight)
        nn.init.zeros_(self._body.head.bias)
        self._optimizer = torch.optim.AdamW(self._body.parameters(), lr=rate, betas=BETAS)

    def learn(self, part: Rollouts, rewards_B: Floats) -> Floats:
        """Return whitened advantages [B, L] by the critic as it is, then fit it by one step."""
        values_BL = self._values(part)
        mask_BL = torch.ones_like(values_BL, dtype=torch.bool)
        rewards_BL = torch.zeros_like(values_BL)
        rewards_BL[:, -1] = torch.from_numpy(rewards_B)
        nothing_B = torch.zeros(len(part))
        old_BL = values_BL.detach()
        advantages_BL, returns_BL = gae(rewards_BL, old_BL, nothing_B, mask_BL, GAMMA, LAMBDA)
        denominators = Denominators(len(part), mask_BL.numel(), mask_BL.shape[1])
        loss_BL = value_loss(values_BL, old_BL, returns_BL, mask_BL)
        self._optimizer.zero_grad()
        reduce_loss(loss_BL, mask_BL, denominators, "token_mean").backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._body.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        return whiten(advantages_BL, mask_BL).numpy()

    def _values(self, part: Rollouts) -> Tensor:
        ids_BT = torch.from_numpy(np.concatenate([part.prompts, part.completions], axis=1))
        values_BT: Tensor = self._body(ids_BT[:, :-1])[..., 0]
        return values_BT[:, -part.completions.shape[1] :]
