"""Distillation: what a review led to becomes a target for its prompt alone.

Source: SRRL (arXiv 2607.05541), the term L_distill. With x the prompt, y the second attempt that
succeeded, and lambda the term's weight:

    L_distill = -(lambda / N) sum_i (1 / |y_i|) sum_t log pi_theta(y_it | x_i, y_i,<t)

Our choices:
1. N counts all sequences of the step's policy terms (attempts, reviews, second attempts): not the
   distilled ones, and not only those that succeeded. So one success among many teaches as little
   as one sequence does, and a distilled copy takes nothing from the policy terms.
2. The mean over a sequence's tokens is taken under every objective, like that of prefix credit.
3. There is no ratio, no correction and no clip. The sampler saw the review when it wrote y: its
   log-probs are those of another context and say nothing of pi_theta(y | x).
4. pi_theta is tempered as in the policy terms: it is the distribution that attempts are drawn from.
"""

import torch
from torch import Tensor


def distill_loss(policy_logprobs_BT: Tensor, distill_mask_BT: Tensor) -> Tensor:
    """Return -log pi of every distilled token.

    Args:
        policy_logprobs_BT: [B, T] float, natural logs given the prompt alone; the gradient flows
            through it.
        distill_mask_BT: [B, T] bool, True = a token of a distilled completion. What stands
            elsewhere, NaN included, changes neither the value nor the gradient.

    Returns:
        [B, T] float32 loss in nats, 0 where masked.
    """
    return torch.where(distill_mask_BT, -policy_logprobs_BT.float(), 0.0)
