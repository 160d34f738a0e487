"""The one place where per-token losses become a number: sums over named denominators.

The denominators are arguments, counted once over the whole batch. So the losses (and gradients) of
micro-batches add up to those of the batch, however it is split.

    sequence_mean:    sum_i (1 / |y_i|) sum_t l_it  / num_sequences                    (grpo)
    constant_length:  sum_i sum_t l_it  / (num_sequences * constant_tokens)            (dr_grpo)
    token_mean:       sum_i sum_t l_it  / num_tokens                                   (dapo)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """What the sums of a batch are divided by; a sequence without trained tokens does not count."""

    num_sequences: int
    num_tokens: int
    constant_tokens: int

    @classmethod
    def of_lengths(cls, lengths_B: Sequence[int], constant_tokens: int) -> "Denominators":
        """Count a batch by the number of trained tokens of each of its sequences."""
        return cls(sum(n > 0 for n in lengths_B), sum(lengths_B), constant_tokens)


def _sequence_mean(loss_BT: Tensor, loss_mask_BT: Tensor, denominators: Denominators) -> Tensor:
    num_tokens_B = loss_mask_BT.sum(dim=1).clamp(min=1)
    return (loss_BT.sum(dim=1) / num_tokens_B).sum() / denominators.num_sequences


def _constant_length(loss_BT: Tensor, loss_mask_BT: Tensor, denominators: Denominators) -> Tensor:
    del loss_mask_BT
    return loss_BT.sum() / (denominators.num_sequences * denominators.constant_tokens)


def _token_mean(loss_BT: Tensor, loss_mask_BT: Tensor, denominators: Denominators) -> Tensor:
    del loss_mask_BT
    return loss_BT.sum() / denominators.num_tokens


REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Denominators], Tensor]] = {
    "sequence_mean": _sequence_mean,
    "constant_length": _constant_length,
    "token_mean": _token_mean,
}


def reduce_loss(
    loss_BT: Tensor, loss_mask_BT: Tensor, denominators: Denominators, reduction: str
) -> Tensor:
    """Sum per-token losses of a micro-batch and divide by the denominators of the whole batch.

    Args:
        loss_BT: [B, T] float32; anything, NaN included, where masked.
        loss_mask_BT: [B, T] bool, True = trained on.
        denominators: of the whole batch, not of this micro-batch.
        reduction: a key of `REDUCTIONS`.

    Returns:
        [] float32; exactly 0 if everything is masked.
    """
    if denominators.num_tokens == 0:
        return torch.where(loss_mask_BT, loss_BT, 0.0).sum()
    kept_BT = torch.where(loss_mask_BT, loss_BT, 0.0)
    return REDUCTIONS[reduction](kept_BT, loss_mask_BT, denominators)
