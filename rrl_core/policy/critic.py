"""The critic: what each token's state is worth, from a head and an adapter of its own.

    V(s_t) = w . h(s_t) + b        h: last hidden state of the base model with the critic's adapter

The base model is the policy's and frozen; the policy's adapter is never the critic's, so neither
moves the other. The critic's adapter has the size of the policy's and is active inside the methods
here only. Head, values and AdamW are float32.

Our choice: the head starts at zero, as LoRA's B does. All values are 0 at first, so the first
advantages are the rewards, less their mean.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from torch.nn import Parameter

from rrl_core.policy.adapters import active_adapter, adapter_parameters, add_adapter, overwrite
from rrl_core.policy.bundle import BundleError, bundle, unbundle
from rrl_core.policy.digest import tensors_digest
from rrl_core.policy.logprobs import predictor_states
from rrl_core.policy.optimizer import optimizer_from_bytes, optimizer_to_bytes
from rrl_core.policy.packing import Branch, PackedBatch, pack

if TYPE_CHECKING:
    from rrl_core.policy.model import Policy

CRITIC = "critic"  # PEFT's name of its adapter


class CriticError(ValueError):
    """The bytes are no critic's state, or that of another one."""


class Critic:
    """Values of the states of completions, and AdamW over what they are computed with.

    `num_iterations` is the number of iterations it has judged; the learner counts, the state keeps.

    Args:
        policy: whose base model it reads; it gets a second adapter, which stays idle.
        learning_rate: of its AdamW; betas and weight decay are PyTorch's and none.
        seed: of the adapter's random half.

    Raises:
        AdapterError: the policy has a critic already.
    """

    def __init__(self, policy: "Policy", *, learning_rate: float, seed: int) -> None:
        add_adapter(policy.model, CRITIC, seed)
        self._policy = policy
        width = int(policy.model.get_base_model().config.hidden_size)
        self._weight_D = Parameter(torch.zeros(width, device=policy.device))
        self._bias = Parameter(torch.zeros((), device=policy.device))
        self.parameters = adapter_parameters(policy.model, CRITIC)
        self.parameters |= {"head.weight": self._weight_D, "head.bias": self._bias}
        self._optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=learning_rate, weight_decay=0.0
        )
        self.num_iterations = 0

    @property
    def pad_token_id(self) -> int:
        """The policy's: what fills shorter rows."""
        return self._policy.pad_token_id

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Start from no gradient; differentiate what `batch_values` returns inside."""
        self._optimizer.zero_grad()
        with active_adapter(self._policy.model, CRITIC):
            yield

    def batch_values(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the values of one packed batch's tokens; call it inside `gradients`.

        Returns:
            [B, T] float32, V of the state before each token, 0 where there is none, on the policy's
            device; and [B, T] bool, True = a token of the completion.
        """
        device = self._policy.device
        hidden_ND = predictor_states(self._policy, batch)
        values_N = hidden_ND.float() @ self._weight_D + self._bias
        predictor_K = batch.target_predictor_M[batch.token_target_K].to(device)
        place = (batch.token_row_K.to(device), batch.token_column_K.to(device))
        zeros_BT = torch.zeros((len(batch.branches), batch.num_columns), device=device)
        is_token_BT = zeros_BT.bool().index_put(place, torch.tensor(True, device=device))
        return zeros_BT.index_put(place, values_N[predictor_K]), is_token_BT

    @torch.no_grad()
    def values(
        self, branches: Sequence[Branch], *, max_tokens: int, share_prefix: bool = True
    ) -> list[Tensor]:
        """Return of each branch the values [T] of its completion's tokens: float32, on the CPU.

        Arguments are those of `pack`.
        """
        found: list[Tensor] = [torch.empty(0)] * len(branches)
        batches = pack(
            branches,
            max_tokens=max_tokens,
            pad_token_id=self.pad_token_id,
            share_prefix=share_prefix,
        )
        with active_adapter(self._policy.model, CRITIC):
            for batch in batches:
                values_BT = self.batch_values(batch)[0].cpu()
                for values_T, index in zip(values_BT, batch.branches, strict=True):
                    found[index] = values_T[: len(branches[index].completion_ids)].clone()
        return found

    def update(self, max_grad_norm: float | None) -> float:
        """Clip the gradient, take the step, return the norm before clipping."""
        limit = math.inf if max_grad_norm is None else max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self._optimizer.step()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Return a copy of adapter and head: float32, on the CPU."""
        return {
            name: parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self.parameters.items()
        }

    def digest(self) -> str:
        """Return the digest of adapter and head."""
        return tensors_digest(self.state())

    def to_bytes(self) -> bytes:
        """Return adapter, head, AdamW's state and count; equal critics give equal bytes."""
        return bundle(
            {
                "weights": bytes(save_safetensors(self.state())),
                "optimizer": optimizer_to_bytes(self._optimizer, self.parameters),
                "counts": json.dumps({"num_iterations": self.num_iterations}).encode(),
            }
        )

    def from_bytes(self, data: bytes) -> None:
        """Become the critic that `to_bytes` was asked of, bit for bit.

        Raises:
            CriticError: the bytes are damaged.
            AdapterError: they are of a critic of another model or other LoRA settings.
        """
        try:
            parts = unbundle(data)
            weights = load_safetensors(parts["weights"])
            num_iterations = int(json.loads(parts["counts"])["num_iterations"])
        except (BundleError, SafetensorError, KeyError, ValueError) as error:
            raise CriticError(
                f"expected a critic's state, got {len(data)} bytes that are not: {error!r}"
            ) from error
        overwrite(self.parameters, weights)
        optimizer_from_bytes(self._optimizer, self.parameters, parts["optimizer"])
        self.num_iterations = num_iterations
