"""Log-probs of given tokens under the policy: float32, tempered, by position of the completion.

Three things keep this quick and small. Packing (`packing.py`) runs shared tokens once. The language
model head runs only where something is predicted, a chunk of positions at a time, so that there is
never an [N, V] tensor of all positions. And its gradient is computed beside its value: with
z = (W h + b) / temperature,

    log p_y = z_y - logsumexp(z)        d log p_y / dh = (W_y - sum_v p_v W_v) / temperature

only the [N, D] tensor sum_v p_v W_v is kept for the backward pass. The head itself is frozen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rrl_core.algorithms.ratios import entropy_from_logprobs
from rrl_core.policy.packing import Branch, PackedBatch, pack

if TYPE_CHECKING:
    from rrl_core.policy.model import Policy

# Numbers of one chunk of logits. Above 32 MiB the C library gives memory back after every chunk and
# faults it in again, which costs more than the product; on a GPU larger products pay.
_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # nats


class UnsupportedModelError(ValueError):
    """Packed, the model would say something else than it says about one sequence alone."""


@dataclass(frozen=True)
class TokenScores:
    """What a policy says about B completions of up to T tokens.

    `logprobs_BT`: float32 natural logs of the completions' tokens, 0 where masked.
    `entropy_BT`: float32 nats of the distribution each token was drawn from, detached.
    `loss_mask_BT`: bool, True = a token of the completion.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    loss_mask_BT: Tensor


class _HeadLogprobs(torch.autograd.Function):
    """Log-probs [M] of targets and entropies [N] of predictors from hidden states [N, D]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head: nn.Linear, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        device, weight_VD = hidden_ND.device, head.weight
        temperature_N1 = batch.temperature_N.to(device)[:, None]
        predictor_M, ids_M = batch.target_predictor_M.to(device), batch.target_ids_M.to(device)
        logprobs_M = torch.empty(len(ids_M), device=device)
        entropy_N = torch.empty(len(hidden_ND), device=device)
        mean_weight_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        chunk = max(1, _CHUNK_ELEMENTS[device.type] // len(weight_VD))
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            logits_CV = head(hidden_ND[rows]).float().div_(temperature_N1[rows])
            logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
            in_chunk_M = (predictor_M >= start) & (predictor_M < start + chunk)
            logprobs_M[in_chunk_M] = logprobs_CV[predictor_M[in_chunk_M] - start, ids_M[in_chunk_M]]
            entropy_N[rows] = entropy_from_logprobs(logprobs_CV)
            if mean_weight_ND is not None:
                mean_weight_ND[rows] = logprobs_CV.exp_().to(weight_VD.dtype) @ weight_VD
        ctx.save_for_backward(mean_weight_ND, weight_VD, predictor_M, ids_M, temperature_N1)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_M, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        mean_weight_ND, weight_VD, predictor_M, ids_M, temperature_N1 = ctx.saved_tensors
        direction_MD = weight_VD[ids_M].float() - mean_weight_ND[predictor_M].float()
        direction_MD *= grads[0][:, None] / temperature_N1[predictor_M]
        grad_ND = torch.zeros(mean_weight_ND.shape, device=mean_weight_ND.device)
        grad_ND.index_add_(0, predictor_M, direction_MD)
        return grad_ND.to(mean_weight_ND.dtype), None, None


def score_batch(policy: "Policy", batch: PackedBatch) -> TokenScores:
    """Score one packed batch with one forward pass; the gradient reaches the adapter.

    Args:
        policy: in eval mode, on its device. Inside `policy.reference()` the reference is scored.
        batch: from `pack`.

    Returns:
        Scores on the policy's device; row b is the completion `batch.branches[b]`.

    Raises:
        UnsupportedModelError: a sequence is longer than the model's attention window.
    """
    device = policy.device
    hidden_ND = predictor_states(policy, batch)
    head = policy.model.get_base_model().get_output_embeddings()
    logprobs_M, entropy_N = _HeadLogprobs.apply(hidden_ND, head, batch)  # type: ignore[no-untyped-call]
    target_K = batch.token_target_K.to(device)
    predictor_K = batch.target_predictor_M.to(device)[target_K]
    place = (batch.token_row_K.to(device), batch.token_column_K.to(device))
    zeros_BT = torch.zeros((len(batch.branches), batch.num_columns), device=device)
    return TokenScores(
        logprobs_BT=zeros_BT.index_put(place, logprobs_M[target_K]),
        entropy_BT=zeros_BT.index_put(place, entropy_N[predictor_K]),
        loss_mask_BT=zeros_BT.bool().index_put(place, torch.tensor(True, device=device)),
    )


def predictor_states(policy: "Policy", batch: PackedBatch) -> Tensor:
    """Run the backbone over a packed batch and return what its predictors say.

    Returns:
        [N, D] last hidden states, after the final norm, of `batch.predictors_N`, on the policy's
        device and in its dtype.

    Raises:
        UnsupportedModelError: a sequence is longer than the model's attention window.
    """
    base = policy.model.get_base_model()
    _check_window(base.config, int(batch.position_ids_RT.max()) + 1)
    device = policy.device
    is_visible_R1TT = batch.is_visible_RTT.to(device)[:, None]
    mask_R1TT = torch.zeros(is_visible_R1TT.shape, dtype=policy.dtype, device=device)
    hidden_RTD = base.get_decoder()(
        input_ids=batch.input_ids_RT.to(device),
        attention_mask=mask_R1TT.masked_fill_(~is_visible_R1TT, -torch.inf),
        position_ids=batch.position_ids_RT.to(device),
        use_cache=False,
    ).last_hidden_state
    hidden_ND: Tensor = hidden_RTD.flatten(0, 1)[batch.predictors_N.to(device)]
    return hidden_ND


@torch.no_grad()
def policy_logprobs(
    policy: "Policy",
    completions: Sequence[Branch],
    *,
    max_tokens: int,
    share_prefix: bool = True,
) -> TokenScores:
    """Score any number of completions without gradients, in batches of `max_tokens`.

    Args:
        policy: in eval mode. Inside `policy.reference()` the reference is scored.
        completions: prompts and completions are not empty.
        max_tokens: budget of one forward pass, see `pack`.
        share_prefix: False runs every completion in a row of its own.

    Returns:
        Scores on the CPU, rows in the order of `completions`.
    """
    shape = (len(completions), max((len(c.completion_ids) for c in completions), default=0))
    logprobs_BT, entropy_BT = torch.zeros(shape), torch.zeros(shape)
    loss_mask_BT = torch.zeros(shape, dtype=torch.bool)
    for batch in pack(
        completions,
        max_tokens=max_tokens,
        pad_token_id=policy.pad_token_id,
        share_prefix=share_prefix,
    ):
        scores = score_batch(policy, batch)
        place = (torch.tensor(batch.branches)[:, None], torch.arange(batch.num_columns))
        logprobs_BT[place] = scores.logprobs_BT.cpu()
        entropy_BT[place] = scores.entropy_BT.cpu()
        loss_mask_BT[place] = scores.loss_mask_BT.cpu()
    return TokenScores(logprobs_BT, entropy_BT, loss_mask_BT)


@torch.no_grad()
def check_model(policy: "Policy") -> None:
    """Check on a tiny example that packing, and the head run apart, give what the model gives.

    Models that ignore a 4-D mask or position ids, carry state from token to token, or rescale their
    logits after the head fail here instead of learning from wrong numbers.

    Raises:
        UnsupportedModelError: the head is not a frozen linear layer, or the numbers differ.
    """
    base = policy.model.get_base_model()
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear or any(p.requires_grad for p in head.parameters()):
        raise UnsupportedModelError(
            f"expected a frozen linear layer as the head of {type(base).__name__}, got "
            f"{type(head).__name__}; take the head out of the adapter's target modules"
        )
    prompt_ids, completions_ids = (1, 2, 3), ((4, 5, 6), (5, 4, 3), (4, 6, 2))
    packed = policy_logprobs(
        policy, [Branch(prompt_ids, ids) for ids in completions_ids], max_tokens=64
    )
    for row, ids in enumerate(completions_ids):
        input_ids = torch.tensor([prompt_ids + ids], device=policy.device)
        logits_TV = policy.model(input_ids=input_ids).logits[0, len(prompt_ids) - 1 : -1]
        alone_TV = torch.log_softmax(logits_TV.float(), dim=-1).cpu()
        alone_T = alone_TV[torch.arange(len(ids)), torch.tensor(ids)]
        error = float((packed.logprobs_BT[row] - alone_T).abs().max())
        if not error <= _PROBE_TOLERANCE[policy.dtype]:
            raise UnsupportedModelError(
                f"expected {type(base).__name__} to give packed completions the log-probs it gives "
                f"them alone, got a difference of {error:.3g}; this learner cannot train it"
            )


def _check_window(config: Any, num_tokens: int) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and num_tokens > window:
        raise UnsupportedModelError(
            f"expected sequences within the model's attention window of {window} tokens, got "
            f"{num_tokens}; shorten prompts or completions"
        )
