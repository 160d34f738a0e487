"""What of a sample is scored, where it stands in [B, T] tensors, and what can be wrong with it.

A row holds the sample's completion; where its given tokens get credit they stand before it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rrl_core.policy.packing import Branch
from rrl_core.policy.records import TERMS, LearnSample


def scored_branch(sample: LearnSample) -> Branch:
    """Return what of the sample is scored: its given tokens too where they get credit."""
    given = sample.prefix_ids
    if sample.prefix_advantage != 0:
        return Branch(sample.prompt_ids, given + sample.completion_ids, sample.temperature)
    return Branch(sample.prompt_ids + given, sample.completion_ids, sample.temperature)


def num_scored_prefix_tokens(sample: LearnSample) -> int:
    """Return how many given tokens are scored: all or none."""
    return len(sample.prefix_ids) if sample.prefix_advantage != 0 else 0


def trained_tokens(sample: LearnSample) -> tuple[bool, ...]:
    """Return of each token of the completion whether it is trained on."""
    return sample.loss_mask or (True,) * len(sample.completion_ids)


def num_trained_tokens(sample: LearnSample) -> int:
    """Return how many tokens of the completion are trained on."""
    return sum(trained_tokens(sample))


def trained_mask(rows: Sequence[LearnSample], mask_BT: Tensor) -> Tensor:
    """Return [B, T] bool on the device of `mask_BT`, True = a scored token that is not masked."""
    trained = []
    for sample in rows:
        num_given = num_scored_prefix_tokens(sample)
        given = sample.prefix_mask or (True,) * num_given
        trained.append(torch.tensor(given[:num_given] + trained_tokens(sample), dtype=torch.bool))
    return padded(trained, mask_BT)


def prefix_mask(rows: Sequence[LearnSample], mask_BT: Tensor) -> Tensor:
    """Return [B, T] bool, True = a given token of a row whose prefix gets credit, masked or not."""
    num_given_B = torch.tensor([num_scored_prefix_tokens(s) for s in rows], device=mask_BT.device)
    return torch.arange(mask_BT.shape[1], device=mask_BT.device) < num_given_B[:, None]


def term_mask(rows: Sequence[LearnSample], term: str, mask_BT: Tensor) -> Tensor:
    """Return [B, 1] bool on the device of `mask_BT`, True = a row of this term."""
    return torch.tensor([[s.term == term] for s in rows], device=mask_BT.device)


def stored_logprobs(sample: LearnSample) -> tuple[float, ...]:
    """Return the sampler log-probs of the scored tokens; zeros stand where there are none."""
    num_given = num_scored_prefix_tokens(sample)
    given = sample.prefix_logprobs or (0.0,) * num_given
    return given[:num_given] + (sample.sampler_logprobs or ())


def padded(rows: Sequence[Sequence[float] | Tensor], like_BT: Tensor) -> Tensor:
    """Stack rows of different lengths, zeros behind them, in the shape of `like_BT`."""
    padded_BT = torch.zeros_like(like_BT)
    for row, values in enumerate(rows):
        padded_BT[row, : len(values)] = torch.as_tensor(values)
    return padded_BT


def sample_problem(sample: LearnSample, context_tokens: int) -> str | None:
    """Return what is wrong with a sample: what was expected, what came; None: nothing."""
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
    for name, mask, ids in (
        ("loss_mask", sample.loss_mask, sample.completion_ids),
        ("prefix_mask", sample.prefix_mask, sample.prefix_ids),
    ):
        if mask is not None and len(mask) != len(ids):
            return (
                f"expected one entry of `{name}` per token, got {len(mask)} for {len(ids)}; "
                "give None where no token is masked"
            )
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
    return _term_problem(sample) or _number_problem(sample)


def _term_problem(sample: LearnSample) -> str | None:
    if sample.term not in TERMS:
        return f"expected a term among {', '.join(TERMS)}, got {sample.term!r}"
    if sample.term == "distill" and (sample.prefix_ids or sample.prefix_advantage):
        return (
            f"expected no given tokens in a distilled sample, got {len(sample.prefix_ids)} with "
            f"advantage {sample.prefix_advantage}; it follows its prompt alone"
        )
    return None


def _number_problem(sample: LearnSample) -> str | None:
    if sample.prefix_advantage < 0 or not math.isfinite(sample.prefix_advantage):
        return f"expected a finite prefix advantage of 0 or more, got {sample.prefix_advantage}"
    if sample.reward is not None and not math.isfinite(sample.reward):
        return f"expected a finite reward, got {sample.reward}; leave the sample out"
    if not (math.isfinite(sample.advantage) and math.isfinite(sample.weight)):
        return f"expected finite numbers, got advantage {sample.advantage}, weight {sample.weight}"
    return None
