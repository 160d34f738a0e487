"""The policy: a causal transformer of about 350,000 parameters, and how it is sampled.

Pre-LN, learned positions. Prompts of one call are of one length, so sampling needs no padding: one
pass over the prompts fills the cache of keys and values, then one token a pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.studies.coded.world import VOCABULARY, Floats, Ints

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, T, width / heads] of each layer."""


@dataclass(frozen=True)
class Shape:
    """The size of the transformer."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    positions: int = 32


class Policy(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(len(VOCABULARY), shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, len(VOCABULARY), bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Return logits [B, T, V]; the tokens come after those in the cache, which they join."""
        start = cache[0][0].shape[2] if cache else 0
        x_BTD = self.tokens(ids_BT) + self.positions.weight[start : start + ids_BT.shape[1]]
        joined: Cache = []
        for number, layer in enumerate(self.layers):
            x_BTD, entry = layer(x_BTD, cache[number] if cache else None)
            joined.append(entry)
        if cache is not None:
            cache[:] = joined
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x_BTD: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the layer's output, and the keys and values up to here."""
        num, length, width = x_BTD.shape
        qkv = self.qkv(self.norm_attention(x_BTD)).view(num, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(past, (key, value), strict=True))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(num, length, width))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD)))), (key, value)


@torch.no_grad()
def sample(
    policy: Policy,
    prompts_BT: Ints,
    num_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> tuple[Ints, Floats]:
    """Sample a continuation of each prompt.

    Args:
        policy: what samples.
        prompts_BT: [B, T] token ids.
        num_tokens: length of every continuation, 1 or more.
        generator: of the draws.
        temperature: above 0, divides the logits.

    Returns:
        [B, num_tokens] token ids and [B, num_tokens] float32 log-probs of them, tempered.
    """
    cache: Cache = []
    ids_BT = torch.from_numpy(prompts_BT)
    ids, logprobs = [], []
    for _ in range(num_tokens):
        logits_BV = policy(ids_BT, cache)[:, -1]
        logprobs_BV = F.log_softmax(logits_BV / temperature, dim=-1)
        ids_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        ids.append(ids_BT)
        logprobs.append(logprobs_BV.gather(1, ids_BT))
    return torch.cat(ids, dim=1).numpy(), torch.cat(logprobs, dim=1).numpy()


def token_logprobs(policy: Policy, ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the tempered log-probs of every next token, [B, T - 1, V]: row t is of token t + 1."""
    return F.log_softmax(policy(ids_BT[:, :-1]) / temperature, dim=-1)


def picked(logprobs_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the log-prob of each of the tokens [B, T]."""
    return logprobs_BTV.gather(2, ids_BT[..., None]).squeeze(2)
