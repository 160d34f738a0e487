"""Features of states: what the backbone makes of a prompt and the first tokens of a response.

    feature(x, y_<=t) = last hidden state, after the final norm, at the last token of (x, y_<=t)

Attention is causal, so one pass over a response yields all of its states; and responses of one
prompt share the prompt and what they begin with (`rrl_core/policy/packing.py`).

Our choice: the backbone is the reference policy, the model the run started from, not the policy of
today. So the features of a state never change: they can be kept, old and new states can be compared
by any version of the value model, and a value depends on nothing but the state and that version.
Today's standard enters through the labels the value model is fitted to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rrl_core.policy.digest import tensors_digest
from rrl_core.policy.logprobs import predictor_states
from rrl_core.policy.model import Policy
from rrl_core.policy.packing import Branch, PackedBatch, pack

_UNREAD = 0  # the last token of a packed completion is a target and never run; we need no target


@dataclass(frozen=True)
class StateSequence:
    """A response and the states wanted of it.

    `prefix_tokens`: how many of the completion's tokens each state has; 0 is the prompt alone.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    prefix_tokens: tuple[int, ...]


@torch.no_grad()
def state_features(
    policy: Policy, sequences: Sequence[StateSequence], max_tokens: int
) -> NDArray[np.float32]:
    """Return the features of all states, each response run once and no further than needed.

    The same list gives the same bits. In a float32 policy a state's features do not depend on the
    rest of the list, up to rounding; in bfloat16 that rounding is coarse.

    Args:
        policy: in eval mode; its reference policy makes the features.
        sequences: responses in any order.
        max_tokens: budget of one forward pass, pads included: memory, not results.

    Returns:
        [S, D] float32, one row per state: sequences in order, and within each its `prefix_tokens`
        in order.

    Raises:
        ValueError: a prompt is empty, a prefix is longer than its completion, or a state is longer
            than the model's context.
    """
    first_rows, num_states = [], 0
    for index, sequence in enumerate(sequences):
        _check(sequence, index, policy.context_tokens)
        first_rows.append(num_states)
        num_states += len(sequence.prefix_tokens)
    wanted = [index for index, sequence in enumerate(sequences) if sequence.prefix_tokens]
    width = int(policy.model.get_base_model().config.hidden_size)
    features_SD = np.empty((num_states, width), dtype=np.float32)
    batches = pack(
        [_branch(sequences[index]) for index in wanted],
        max_tokens=max_tokens,
        pad_token_id=policy.pad_token_id,
    )
    with policy.reference():
        for batch in batches:
            states_ND = predictor_states(policy, batch).float().cpu()
            predictor_BT = _predictors(batch)
            for row, branch in enumerate(batch.branches):
                index = wanted[branch]
                prefixes = list(sequences[index].prefix_tokens)
                rows = slice(first_rows[index], first_rows[index] + len(prefixes))
                features_SD[rows] = states_ND[predictor_BT[row, prefixes]].numpy()
    return features_SD


def backbone_digest(policy: Policy) -> str:
    """Return the digest of the model that makes the features: the reference policy's."""
    if policy.start_state is None:
        return policy.base_digest
    return policy.digest(tensors_digest(policy.start_state))


def _branch(sequence: StateSequence) -> Branch:
    """Cut a response after its last state; the state of t tokens is what predicts token t."""
    given = sequence.completion_ids[: max(sequence.prefix_tokens)]
    return Branch(sequence.prompt_ids, (*given, _UNREAD))


def _predictors(batch: PackedBatch) -> Tensor:
    """Return [B, T] int64: which of the batch's predictors predicts each token."""
    predictor_BT = torch.zeros((len(batch.branches), batch.num_columns), dtype=torch.int64)
    predictor_K = batch.target_predictor_M[batch.token_target_K]
    predictor_BT[batch.token_row_K, batch.token_column_K] = predictor_K
    return predictor_BT


def _check(sequence: StateSequence, index: int, context_tokens: int) -> None:
    if not sequence.prompt_ids:
        raise ValueError(f"expected a prompt of at least one token, got none at index {index}")
    num_tokens, prefixes = len(sequence.completion_ids), sequence.prefix_tokens
    if any(not 0 <= t <= num_tokens for t in prefixes):
        raise ValueError(
            f"expected `prefix_tokens` between 0 and the {num_tokens} tokens of the completion, "
            f"got {prefixes} at index {index}"
        )
    longest = len(sequence.prompt_ids) + max(prefixes, default=0)
    if longest > context_tokens:
        raise ValueError(
            f"expected states within the model's context of {context_tokens} tokens, got one of "
            f"{longest} at index {index}; leave it out"
        )
