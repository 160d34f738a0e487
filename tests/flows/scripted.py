"""Short runs of the fake sampler whose completions follow a script: what happens is planned."""

from collections.abc import Callable
from pathlib import Path

import pytest

import storage
from flows.config import RunConfig
from rrl_core.sampling.fake import FakeSampler
from rrl_core.sampling.protocol import SampleRequest
from tests.flows.conftest import replay_config, run_here

RIGHT, WRONG = "7 7 7", "1 2 3"  # by `tests.flows.rewards:early_seven`
Answer = Callable[[int, SampleRequest], str]


def scripted_config(*overrides: str) -> RunConfig:
    """Five iterations of four prompts in groups of eight; nothing is annealed before the last."""
    return replay_config(
        "sampler.engine=fake", "sampler.prompts=4", "sampler.group_size=8", "task.num_train=4",
        "task.reward=tests.flows.rewards:early_seven", "evaluation.every=off", "value.every=off",
        "run.iterations=5", 'replay.units=["trajectory"]', "replay.share=0.25", *overrides,
    )  # fmt: skip


def forgetful(version: int, request: SampleRequest) -> str:
    """The first policy solves everything, the later ones nothing."""
    return RIGHT if version == 0 else WRONG


def idea_only(version: int, request: SampleRequest) -> str:
    """Whoever is given the beginning of an answer succeeds; alone nobody does."""
    return "7" if request.max_tokens is not None else WRONG


def hopeless(version: int, request: SampleRequest) -> str:
    """Nobody ever solves anything."""
    return WRONG


def run_script(
    path: Path, config: RunConfig, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> storage.Store:
    """Train with completions that `answer` gives by policy version and request."""
    script(answer, monkeypatch)
    return run_here(path, config)


def script(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake sampler give the answers of `answer`."""

    def draw(self: FakeSampler, request: SampleRequest, params: object) -> list[int]:
        text = answer(self.policy_version, request)
        ids = [i for letter in text for i in self._policy.tokenizer.encode(letter)]
        return [*ids, min(self._policy.eos_token_ids)]

    monkeypatch.setattr(FakeSampler, "_draw", draw)
