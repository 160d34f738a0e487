"""What is sampled: attempts, reviews of failed ones, second attempts after reviews or controls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.studies.coded.learning import Rollouts, Term
from benchmarks.studies.coded.memory import Memory
from benchmarks.studies.coded.policy import Policy, sample
from benchmarks.studies.coded.world import (
    ANSWER_TOKENS,
    REVIEW_TOKENS,
    RULES,
    TOKEN,
    Ints,
    Problems,
    World,
    attempt_prompts,
    blank_ids,
    feedback_ids,
    random_feedback,
    raw_hints,
    review_ids,
    review_prompts,
    second_prompts,
)


class Sampler:
    """Samples from a policy, and counts what that takes."""

    def __init__(
        self, policy: Policy, generator: torch.Generator, temperature: float = 1.0
    ) -> None:
        self._policy, self._generator, self._temperature = policy, generator, temperature
        self.num_sequences = 0
        self.num_tokens = 0
        """Sampled tokens, not those of prompts."""

    def __call__(self, term: Term, prompts_BT: Ints, num_tokens: int) -> Rollouts:
        """Return a completion of each prompt; its advantage is not known yet."""
        ids, logprobs = sample(
            self._policy, prompts_BT, num_tokens, self._generator, self._temperature
        )
        self.num_sequences += len(ids)
        self.num_tokens += ids.size
        return Rollouts(term, prompts_BT, ids, logprobs, np.zeros(len(ids)))


@dataclass(frozen=True)
class Failures:
    """Failed attempts [B], each a row for every second attempt that follows it."""

    problems: Problems
    answers: Ints
    feedback: Ints


@dataclass(frozen=True)
class Seconds:
    """Second attempts, and what came before them."""

    answers: Rollouts
    reviews: Rollouts | None
    """None where nothing was reviewed."""


def feedback_on(
    world: World, problems: Problems, answers_B7: Ints, lying: np.random.Generator | None
) -> Failures:
    """Return failed attempts with their feedback; with `lying` it is drawn, and says nothing."""
    if lying is not None:
        return Failures(problems, answers_B7, random_feedback(lying, len(problems)))
    rules_B = world.true_rule_C[problems.class_B]
    return Failures(problems, answers_B7, feedback_ids(rules_B, problems, answers_B7))


def attempt(sampler: Sampler, problems: Problems) -> Rollouts:
    """Sample an attempt at each problem."""
    return sampler("attempt", attempt_prompts(problems), ANSWER_TOKENS)


def try_again(
    kind: str,
    sampler: Sampler,
    failures: Failures,
    memory: Memory | None,
    draws: np.random.Generator,
) -> Seconds:
    """Sample a second attempt after each failure.

    Args:
        kind: what it is given, see `arms.Second`.
        sampler: of reviews and second attempts.
        failures: what is tried again.
        memory: what reviews are shown; None: nothing.
        draws: of random reviews.
    """
    if kind == "retry":
        prompts = attempt_prompts(failures.problems)
        return Seconds(sampler("second_attempt", prompts, ANSWER_TOKENS), None)
    reviews = None
    if kind == "review":
        reviews = _review(sampler, failures, memory)
        hints_B4 = reviews.completions
    else:
        hints_B4 = _HINTS[kind](failures, draws)
    prompts = second_prompts(failures.problems, hints_B4)
    return Seconds(sampler("second_attempt", prompts, ANSWER_TOKENS), reviews)


def _review(sampler: Sampler, failures: Failures, memory: Memory | None) -> Rollouts:
    memories_B8 = (
        blank_ids(len(failures.answers), 2 * REVIEW_TOKENS)
        if memory is None
        else memory.slots(failures.problems)
    )
    prompts = review_prompts(failures.problems, failures.answers, failures.feedback, memories_B8)
    return sampler("review", prompts, REVIEW_TOKENS)


def _random_hints(failures: Failures, draws: np.random.Generator) -> Ints:
    class_B = failures.problems.class_B
    rules_B = draws.integers(len(RULES), size=len(class_B))
    return review_ids(np.full(len(class_B), TOKEN["w"]), class_B, rules_B)


_HINTS: Mapping[str, Callable[[Failures, np.random.Generator], Ints]] = {
    "blank": lambda failures, draws: blank_ids(len(failures.answers)),
    "raw_feedback": lambda failures, draws: raw_hints(failures.feedback),
    "random_review": _random_hints,
}
