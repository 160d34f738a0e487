"""The sampler without an engine: a batched loop over the learner's own model.

It samples from the very weights that are trained (`sync` "shared"), in plain PyTorch, and is the
reference that the faster engine is compared with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from rrl_core.policy.model import Policy
from rrl_core.sampling.protocol import (
    Completion,
    OnFinished,
    SampleRequest,
    SamplerError,
    SamplingParams,
    SyncMode,
)
from rrl_core.sampling.serve import GREEDY_REASON, serve


class TransformersSampler:
    """Samples from the policy's live model; see `Sampler` for the contract."""

    engine = "transformers"
    sync: SyncMode = "shared"

    def __init__(self, policy: Policy, context_tokens: int, max_num_seqs: int):
        self.context_tokens = min(context_tokens, policy.context_tokens)
        self._max_num_seqs = max_num_seqs
        self._policy = policy
        self._version = -1
        self._digest = ""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first `load_policy`."""
        return self._version

    def load_policy(self, policy: Policy, version: int) -> None:
        """Sample from `policy` from now on.

        Nothing is copied: its weights must not change between this call and those of `generate`.
        """
        self._policy, self._version, self._digest = policy, version, policy.adapter_digest()

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in order.

        Raises:
            SamplerError: no policy was loaded, or it was changed since.
        """
        if self._version < 0:
            raise SamplerError("expected a policy, none was loaded; call load_policy first")
        if self._digest != self._policy.adapter_digest():
            raise SamplerError(
                f"expected the weights of policy version {self._version}, but they changed since; "
                "call load_policy before generate"
            )
        return serve(requests, params, self.context_tokens, self._sample, on_finished)

    def sleep(self) -> None:
        """Do nothing: the model is the learner's."""

    def wake(self) -> None:
        """Do nothing: the model is the learner's."""

    def close(self) -> None:
        """Forget the policy version; there is no engine to stop."""
        self._version = -1

    def _sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> Iterator[tuple[int, Completion]]:
        size = self._max_num_seqs
        try:
            for start in range(0, len(requests), size):
                chunk = requests[start : start + size]
                for index, ids, logprobs in sample_batch(self._policy, chunk, params):
                    yield start + index, self._completion(ids, logprobs)
        except RuntimeError as error:  # torch's own: out of memory, a device that is gone
            raise SamplerError(f"sampling {len(requests)} requests failed: {error}") from error

    def _completion(self, ids: list[int], logprobs: list[float] | None) -> Completion:
        return Completion(
            completion_ids=tuple(ids),
            sampler_logprobs=None if logprobs is None else tuple(logprobs),
            finish_reason="stop" if ids[-1] in self._policy.eos_token_ids else "length",
            text=self._policy.decode(ids),
            logprobs_reason=GREEDY_REASON if logprobs is None else None,
        )


@dataclass
class _Rows:
    """The unfinished rows of a batch: everything the next forward pass needs, one row each."""

    indices_B: Tensor  # place in the batch asked for
    mask_BT: Tensor  # [B, T] True where the cache holds a token
    logits_BV: Tensor  # of the next token

    def keep(self, is_kept_B: Tensor) -> None:
        self.indices_B = self.indices_B[is_kept_B]
        self.mask_BT = self.mask_BT[is_kept_B]


@torch.no_grad()
def sample_batch(
    policy: Policy, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[tuple[int, list[int], list[float] | None]]:
    """Sample all requests as one batch; yield each one's place, ids and log-probs as it ends.

    Log-probs are None when greedy. Equal prompts are computed once. A row's draw depends on its
    seed and its step alone; a row leaves the batch with its end-of-sequence token.
    """
    cache = DynamicCache(config=policy.model.config)
    rows = _prefill(policy, requests, cache)
    uniforms_BT = _uniforms(requests, params.max_tokens).to(policy.device)
    eos = torch.tensor(sorted(policy.eos_token_ids), device=policy.device)
    limits_B = torch.tensor([r.limit(params) for r in requests], device=policy.device)
    ids: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    for step in range(int(limits_B.max())):
        uniforms_B = uniforms_BT[rows.indices_B, step]
        tokens_B, logprobs_B = draw_tokens(rows.logits_BV, params, uniforms_B)
        drawn = zip(rows.indices_B.tolist(), tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        for index, token, logprob in drawn:
            ids[index].append(token)
            logprobs[index].append(logprob)
        is_open_B = ~torch.isin(tokens_B, eos) & (step + 1 < limits_B[rows.indices_B])
        for index in rows.indices_B[~is_open_B].tolist():
            yield index, ids[index], None if params.temperature == 0 else logprobs[index]
        if not is_open_B.any():
            return
        if not is_open_B.all():
            rows.keep(is_open_B)
            cache.batch_select_indices(is_open_B.nonzero()[:, 0])
            tokens_B = tokens_B[is_open_B]
        _advance(policy, rows, tokens_B, cache)


def draw_tokens(
    logits_BV: Tensor, params: SamplingParams, uniforms_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return tokens [B] and their log-probs [B] (float32, nats).

    Log-probs are of the tempered, full distribution, also when `top_p` or `top_k` cut the draw.
    Temperature 0 takes the most likely token, with log-probs at temperature 1.

    Args:
        logits_BV: [B, V] of the next token.
        params: temperature, top_p, top_k.
        uniforms_B: [B] float64 in [0, 1), which decide the draw by inverting the distribution.
    """
    logits_BV = logits_BV.float()
    if params.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        logprobs_BV = logits_BV.log_softmax(-1)
    else:
        logprobs_BV = (logits_BV / params.temperature).log_softmax(-1)
        cdf_BV = _allowed_probs(logprobs_BV.exp(), params).cumsum(-1, dtype=torch.float64)
        total_B = cdf_BV[:, -1]
        # Strictly below the total, so that no token of probability 0 behind the last is drawn.
        targets_B = torch.minimum(uniforms_B * total_B, total_B.nextafter(total_B.new_zeros(())))
        tokens_B = torch.searchsorted(cdf_BV, targets_B[:, None], right=True)[:, 0]
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _allowed_probs(probs_BV: Tensor, params: SamplingParams) -> Tensor:
    """Set to 0 what `top_k` and then `top_p` exclude; ties at the edge of `top_k` stay."""
    if 0 < params.top_k < probs_BV.shape[-1]:
        smallest_B1 = probs_BV.topk(params.top_k, dim=-1).values[:, -1:]
        probs_BV = probs_BV.where(probs_BV >= smallest_B1, 0.0)
    if params.top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
        mass_before_BV = sorted_BV.cumsum(-1) - sorted_BV
        limit_B1 = params.top_p * sorted_BV.sum(-1, keepdim=True)
        sorted_BV = sorted_BV.where(mass_before_BV < limit_B1, 0.0)
        probs_BV = torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV)
    return probs_BV


def _uniforms(requests: Sequence[SampleRequest], num_tokens: int) -> Tensor:
    rows = [
        torch.rand(
            num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(request.seed)
        )
        for request in requests
    ]
    return torch.stack(rows)


def _prefill(policy: Policy, requests: Sequence[SampleRequest], cache: DynamicCache) -> _Rows:
    """Run the distinct prompts, left-padded, and give every request its prompt's row."""
    prompts = list(dict.fromkeys(request.prompt_ids for request in requests))
    longest = max(map(len, prompts))
    ids_UT = torch.full((len(prompts), longest), policy.pad_token_id)
    mask_UT = torch.zeros(ids_UT.shape, dtype=torch.bool)
    for row, prompt_ids in enumerate(prompts):
        ids_UT[row, longest - len(prompt_ids) :] = torch.tensor(prompt_ids)
        mask_UT[row, longest - len(prompt_ids) :] = True
    mask_UT = mask_UT.to(policy.device)
    logits_UV = _forward(policy, ids_UT.to(policy.device), mask_UT, cache)
    row_of_prompt = {prompt_ids: row for row, prompt_ids in enumerate(prompts)}
    rows_B = torch.tensor([row_of_prompt[r.prompt_ids] for r in requests], device=policy.device)
    cache.batch_select_indices(rows_B)
    return _Rows(
        indices_B=torch.arange(len(requests), device=policy.device),
        mask_BT=mask_UT[rows_B],
        logits_BV=logits_UV[rows_B],
    )


def _advance(policy: Policy, rows: _Rows, tokens_B: Tensor, cache: DynamicCache) -> None:
    """Feed the drawn tokens and put the next logits into `rows`."""
    rows.mask_BT = torch.nn.functional.pad(rows.mask_BT, (0, 1), value=True)
    rows.logits_BV = _forward(policy, tokens_B[:, None], rows.mask_BT, cache)


def _forward(policy: Policy, ids_BN: Tensor, mask_BT: Tensor, cache: DynamicCache) -> Tensor:
    """Return the logits [B, V] after the last of `ids_BN`, the newest N of T tokens."""
    # Positions count real tokens only: models with learned positions are wrong otherwise.
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    logits: Tensor = policy.model(
        input_ids=ids_BN,
        attention_mask=mask_BT.long(),
        position_ids=positions_BT[:, -ids_BN.shape[1] :],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]
