"""Checkpoints to start from: one trunk for all, then one policy a seed and difficulty.

They are kept in a folder under names that hold the digest of everything they depend on, so another
setting never meets an old file, and an arm never starts from another policy than its rivals.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.studies.coded.corpus import Corpus, CorpusSettings, Examples
from benchmarks.studies.coded.policy import Policy, Shape, picked, token_logprobs
from benchmarks.studies.coded.world import make_world
from rrl_core.seeds import derive_seed

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class WarmStart:
    """How the policies that every arm starts from are made."""

    shape: Shape = field(default_factory=Shape)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    trunk_steps: int = 450
    trunk_rate: float = 2e-3
    seed_steps: int = 150
    seed_rate: float = 1e-3
    gradient_norm: float = 1.0
    revision: int = 2
    """Raised when the code that makes checkpoints changes what they are."""

    def digest(self) -> str:
        """Return eight hex digits that depend on every number above."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


def start_policy(
    warm: WarmStart,
    seed: int,
    eps: float,
    folder: Path,
    advance: Callable[[], None] = lambda: None,
) -> Policy:
    """Return the policy that every arm of a seed starts from, trained now unless it is kept.

    Args:
        warm: how it is made.
        seed: of the world.
        eps: how far the policy is from sure of the wrong rules of rare classes, 0..1.
        folder: where checkpoints are kept.
        advance: called after every step.
    """
    path = folder / f"start-{warm.digest()}-seed{seed}-eps{eps}.safetensors"
    policy = _kept(warm, path)
    if policy is None:
        policy = _trunk(warm, folder, advance)
        draws = np.random.default_rng(derive_seed(seed, "warm start", str(eps)))
        corpus = Corpus(warm.corpus, draws, make_world(seed), eps)
        _fit(policy, corpus, warm, (warm.seed_steps, warm.seed_rate), advance)
        _keep(policy, path)
    return policy


def num_steps(warm: WarmStart, starts: set[tuple[int, float]], folder: Path) -> int:
    """Return the steps that making the policies of these seeds and difficulties would take."""
    digest = warm.digest()
    missing = [
        each
        for each in starts
        if not (folder / f"start-{digest}-seed{each[0]}-eps{each[1]}.safetensors").exists()
    ]
    needs_trunk = bool(missing) and not (folder / f"trunk-{digest}.safetensors").exists()
    return warm.trunk_steps * needs_trunk + warm.seed_steps * len(missing)


def _trunk(warm: WarmStart, folder: Path, advance: Callable[[], None]) -> Policy:
    path = folder / f"trunk-{warm.digest()}.safetensors"
    policy = _kept(warm, path)
    if policy is None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy = Policy(warm.shape)
        corpus = Corpus(warm.corpus, np.random.default_rng(derive_seed(0, "trunk")))
        _fit(policy, corpus, warm, (warm.trunk_steps, warm.trunk_rate), advance)
        _keep(policy, path)
    return policy


def _fit(
    policy: Policy,
    corpus: Corpus,
    warm: WarmStart,
    schedule: tuple[int, float],
    advance: Callable[[], None],
) -> None:
    steps, rate = schedule
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=BETAS)
    for _ in range(steps):
        loss = corpus_loss(policy, corpus.attempts())
        loss = loss + warm.corpus.review_weight * corpus_loss(policy, corpus.reviews())
        loss = loss + corpus_loss(policy, corpus.second_attempts())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), warm.gradient_norm)
        optimizer.step()
        advance()


def corpus_loss(policy: Policy, examples: Examples) -> Tensor:
    """Return the mean of -log pi over the tokens of the completions."""
    ids_BT = torch.from_numpy(np.concatenate([examples.prompts, examples.completions], axis=1))
    length = examples.completions.shape[1]
    logprobs_BLV = token_logprobs(policy, ids_BT)[:, -length:]
    return -picked(logprobs_BLV, ids_BT[:, -length:]).mean()


def _kept(warm: WarmStart, path: Path) -> Policy | None:
    if not path.exists():
        return None
    policy = Policy(warm.shape)
    policy.load_state_dict(load_file(path))
    return policy


def _keep(policy: Policy, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(policy.state_dict(), partial)
    partial.replace(path)
