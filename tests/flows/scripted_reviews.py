"""A policy whose reviews fix a known class of errors; the real learner learns from them.

A problem names its class: `class a <word>`. The right answer is the class's letter. First answers
follow the model's own logits of the right letter and of a wrong one: sampled ones with a handicap
that makes the right one rare, greedy ones with a margin. A review names the letter of the class
when a lesson of that class is before it, else by luck; a second attempt writes that letter.
"""

import json
import math
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import storage
from flows import wiring
from flows.config import RunConfig, override_config, parse_config
from rrl_core.policy.model import Policy
from rrl_core.sampling.fake import FakeSampler
from rrl_core.sampling.protocol import SampleRequest, SamplingParams
from tests.flows.conftest import RUN_ID, run_here

CLASSES = "abcd"
WRONG = "x"
HANDICAP = 14.0  # nats: sampled attempts almost never succeed
MARGIN = 2.0  # nats by which the right letter must lead in a greedy answer
LUCK = 0.25  # a review without a fitting lesson names the right letter


def write_problems(path: Path) -> Path:
    """Write problems of four classes; no word stands in two of them."""
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("ghklmnprstuvw", k=12)) for _ in range(200)})
    lines = [
        json.dumps({"prompt": f"class {CLASSES[i % 4]} {word}", "answer": CLASSES[i % 4]})
        for i, word in enumerate(words[:80])
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def class_letter(prompt: object, completion: str) -> float:
    """Return 1.0 when the completion is the letter of the problem's class."""
    return float(completion.strip() == prompt.answer)  # type: ignore[attr-defined]


class ScriptedPolicy:
    """Answers, reviews and second attempts, by the text of the prompt and the seed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __call__(self, request: SampleRequest, params: SamplingParams) -> list[int]:
        text = self.policy.decode(request.prompt_ids)
        draw = random.Random(request.seed)
        letter = re.findall(r"class ([a-d]) [a-z]+", text)[-1]
        written = self._written(text, letter, draw, params, request)
        return [*self.policy.tokenizer.encode(written), min(self.policy.eos_token_ids)]

    def _written(
        self, text: str, letter: str, draw: random.Random, params: SamplingParams,
        request: SampleRequest,
    ) -> str:  # fmt: skip
        if is_review_request(text):
            is_known = f"write {letter} for {letter}" in text
            named = letter if is_known or draw.random() < LUCK else WRONG
            return f" the letter was not right\nInstead: write {named} for {letter}"
        named = re.findall(r"write ([a-dx]) for", text)
        if named:
            return named[-1]
        right, wrong = (self.policy.tokenizer.encode(c)[0] for c in (letter, WRONG))
        with torch.no_grad():
            logits = self.policy.model(torch.tensor([request.prompt_ids])).logits[0, -1]
        lead = (logits[right] - logits[wrong]).item()
        if params.temperature == 0:
            return letter if lead > MARGIN else WRONG
        return letter if draw.random() < 1 / (1 + math.exp(HANDICAP - lead)) else WRONG


def is_review_request(text: str) -> bool:
    """Return whether a prompt asks for a review."""
    return "Do not solve the problem again" in text


def scripted_config(problems: Path, *overrides: str) -> RunConfig:
    config = {
        "run": {"name": "scripted", "iterations": 5},
        "model": {"name": "tiny"},
        "task": {
            "name": "jsonl", "path": str(problems), "eval_fraction": 0.5,
            "reward": "tests.flows.scripted_reviews:class_letter", "reward_time_limit_s": None,
        },
        "sampler": {
            "engine": "fake", "prompts": 8, "group_size": 4, "max_tokens": 8,
            "context_tokens": 1024,
        },
        "learner": {"learning_rate": 2e-2, "correction": "none"},
        "review": {  # distillation alone can teach first attempts
            "gate": "sample", "max_tokens": 128,
            "review_coef": 0.0, "second_coef": 0.0,
        },
        "evaluation": {"every": 5, "prompts": 30, "temperature": 0.0},
        "tracking": {"mlflow": False},
    }  # fmt: skip
    return override_config(parse_config(config, "scripted"), overrides)


@contextmanager
def scripted_sampler() -> Iterator[None]:
    """Let every run sample from the scripted policy."""

    def make_sampler(name: str, policy: Policy, settings: object) -> FakeSampler:
        return FakeSampler(policy, 1024, ScriptedPolicy(policy))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "make_sampler", make_sampler)
        yield


def scripted_run(store_path: Path, *overrides: str, run_id: str = RUN_ID) -> storage.Store:
    """Train the scripted policy; return the store."""
    store_path.parent.mkdir(parents=True, exist_ok=True)
    problems = write_problems(store_path.parent / "problems.jsonl")
    with scripted_sampler():
        return run_here(store_path, scripted_config(problems, *overrides), run_id)


if __name__ == "__main__":
    scripted_run(Path(sys.argv[1]), "review.memory=embedding")
