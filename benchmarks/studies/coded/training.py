"""A run: one arm on one seed at one difficulty, from its warm start to its budget."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import process_time

import numpy as np
import torch

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.critic import WARMUP, Critic
from benchmarks.studies.coded.evaluation import Evaluation, Examiner, ExamSettings
from benchmarks.studies.coded.learning import Learner, Rollouts
from benchmarks.studies.coded.memory import Memory
from benchmarks.studies.coded.policy import Policy
from benchmarks.studies.coded.replaying import Replayed, Replayer
from benchmarks.studies.coded.stages import Sampler, attempt, feedback_on, try_again
from benchmarks.studies.coded.warm_start import WarmStart
from benchmarks.studies.coded.world import (
    Floats,
    Ints,
    Problems,
    attempt_prompts,
    draw_problems,
    is_review,
    make_world,
    rewards,
)
from rrl_core.algorithms.advantages import group_advantages
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.replay.outcomes import SUCCESS
from rrl_core.review.credit import is_distilled, review_advantages
from rrl_core.review.gate import Gate, gated_attempts
from rrl_core.seeds import derive_seed
from rrl_core.value.counts import success_rate

GATE: Gate = "sample"


@dataclass(frozen=True)
class Settings:
    """What all arms share."""

    warm: WarmStart = field(default_factory=WarmStart)
    exam: ExamSettings = field(default_factory=ExamSettings)
    budget: int = 8000
    """Sampled sequences: attempts, reviews and second attempts."""
    group_size: int = 8
    """G, attempts at a problem."""
    evaluate_every: int = 1000
    """Sequences between evaluations."""
    revision: int = 1
    """Raised when the code changes what a run comes to."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    evaluations: list[Evaluation]
    """At the start, about every `evaluate_every` sequences, and at the end."""
    num_iterations: int
    num_sequences: int
    num_tokens: int
    """Sampled tokens."""
    num_distilled: int
    cpu_s: float


@dataclass(frozen=True)
class _Attempts:
    """An iteration's attempts [B] at P problems; replayed ones stand last."""

    problems: Problems
    owner_B: Ints
    """Number of the problem, 0..P-1."""
    answers: Ints
    """[B, 7]"""
    rewards_B: Floats
    p_hat_P: Floats
    """Success rate of what was sampled now."""


def train(
    settings: Settings,
    arm: Arm,
    seed: int,
    start: Policy,
    advance: Callable[[int], None] = lambda num_sequences: None,
) -> Outcome:
    """Train an arm; `advance` is told the sequences sampled so far, after each iteration."""
    began, run = process_time(), Run(settings, arm, seed, start)
    evaluations, half = [run.evaluate(is_whole=False)], settings.budget / 2
    while (before := run.sampler.num_sequences) < settings.budget:
        run.iterate()
        done = run.sampler.num_sequences
        advance(min(done, settings.budget))
        is_whole = before < half <= done or done >= settings.budget
        if is_whole or done // settings.evaluate_every > before // settings.evaluate_every:
            evaluations.append(run.evaluate(is_whole))
    return Outcome(
        evaluations=evaluations,
        num_iterations=run.num_iterations,
        num_sequences=run.sampler.num_sequences,
        num_tokens=run.sampler.num_tokens,
        num_distilled=run.num_distilled,
        cpu_s=process_time() - began,
    )


class Run:
    """The state of a run."""

    def __init__(self, settings: Settings, arm: Arm, seed: int, start: Policy) -> None:
        self._settings, self._arm = settings, arm
        self.world = make_world(seed)
        self.policy = copy.deepcopy(start)
        self.memory = Memory()
        self.num_iterations = self.num_distilled = 0
        generator = torch.Generator().manual_seed(derive_seed(seed, "sampling"))
        self.sampler = Sampler(self.policy, generator, arm.temperature)
        self._problem_draws = np.random.default_rng(derive_seed(seed, "problems"))
        self._hint_draws = np.random.default_rng(derive_seed(seed, "hints"))
        self._learner = Learner(self.policy, start, arm)
        has_critic = ALGORITHMS[arm.algorithm].has_critic
        self._critic = Critic(start, arm.rate) if has_critic else None
        self._examiner = Examiner(settings.exam, arm, seed, self.world)
        iterations = settings.budget // (arm.prompts * settings.group_size)
        self._replayer = Replayer(seed, arm.prompts, settings.group_size, iterations)

    def evaluate(self, is_whole: bool) -> Evaluation:
        """Evaluate now; `is_whole` adds the lifts and what was internalised."""
        return self._examiner.examine(
            self.policy, self.memory, self.sampler.num_sequences, is_whole
        )

    def iterate(self) -> None:
        """Sample, review, try again, learn."""
        self.num_iterations += 1
        attempts, parts = self._attempt()
        if self._arm.second is not None:
            parts += self._second_stage(attempts)
        self._learner.step(parts)

    def _attempt(self) -> tuple[_Attempts, list[Rollouts]]:
        arm, size = self._arm, self._settings.group_size
        old = self._replayer.pick(self.num_iterations) if arm.replays else Replayed.of_successes([])
        fresh = draw_problems(self._problem_draws, arm.prompts).take(slice(arm.prompts - len(old)))
        problems = old.problems.join(fresh)
        own_B = np.repeat(np.arange(arm.prompts), [size - 1] * len(old) + [size] * len(fresh))
        sampled = attempt(self.sampler, problems.take(own_B))
        owner_B = np.concatenate([own_B, np.arange(len(old))])
        answers_B7 = np.concatenate([sampled.completions, old.answers])
        rewards_B = rewards(self.world, problems.take(owner_B), answers_B7)
        own_rewards_B = rewards_B[: len(own_B)]
        self._replayer.add(self.num_iterations, problems.take(own_B), sampled, own_rewards_B)
        solved_P = np.bincount(own_B, own_rewards_B >= SUCCESS, arm.prompts)
        p_hat_P = success_rate(solved_P, np.bincount(own_B))
        attempts = _Attempts(problems, owner_B, answers_B7, rewards_B, p_hat_P)
        if self._critic is not None:
            advantages_BL = self._critic.learn(sampled, own_rewards_B)
            is_warm = self.num_iterations > WARMUP
            return attempts, [replace(sampled, advantages=advantages_BL)] if is_warm else []
        advantages_B = np.array(
            group_advantages(rewards_B.tolist(), owner_B.astype(str).tolist(), arm.algorithm)
        )
        fresh_part = replace(sampled, advantages=advantages_B[: len(own_B)])
        return attempts, [fresh_part, old.rollouts(advantages_B[len(own_B) :])]

    def _second_stage(self, attempts: _Attempts) -> list[Rollouts]:
        arm, groups = self._arm, attempts.owner_B.astype(str).tolist()
        gated = gated_attempts(
            attempts.rewards_B.tolist(), groups, list(range(len(groups))), GATE, SUCCESS
        )
        if not gated:
            return []
        num_failures_P = np.bincount(attempts.owner_B[attempts.rewards_B < SUCCESS])
        num_seconds = num_failures_P[attempts.owner_B[gated]]
        if arm.reviews is not None:
            num_seconds = np.full(len(gated), arm.reviews)
        failed_B = np.repeat(gated, num_seconds)
        owner_B = attempts.owner_B[failed_B]
        failures = feedback_on(
            self.world,
            attempts.problems.take(owner_B),
            attempts.answers[failed_B],
            None if arm.has_feedback else self._hint_draws,
        )
        memory = self.memory if arm.has_memory else None
        seconds = try_again(str(arm.second), self.sampler, failures, memory, self._hint_draws)
        problems, answers = failures.problems, seconds.answers
        rewards_B = rewards(self.world, problems, answers.completions)
        advantages_B = np.concatenate(
            [
                review_advantages(group.tolist())
                for group in np.split(rewards_B, num_seconds.cumsum()[:-1])
            ]
        )
        parts = [replace(answers, advantages=advantages_B)]
        if seconds.reviews is not None:
            parts.append(replace(seconds.reviews, advantages=advantages_B))
            reviews_B4 = seconds.reviews.completions
            verified = np.flatnonzero(is_review(reviews_B4) & (rewards_B >= SUCCESS))
            self.memory.add(problems.take(verified), reviews_B4[verified])
        if arm.distill:
            parts.append(self._targets(problems, answers, rewards_B, attempts.p_hat_P[owner_B]))
        return parts

    def _targets(
        self, problems: Problems, answers: Rollouts, rewards_B: Floats, p_hat_B: Floats
    ) -> Rollouts:
        """Return what is distilled: second attempts, as if they answered the problem alone."""
        is_target_B = [
            is_distilled(reward, SUCCESS, p_hat)
            for reward, p_hat in zip(rewards_B, p_hat_B, strict=True)
        ]
        rows = np.flatnonzero(is_target_B)
        self.num_distilled += len(rows)
        self._examiner.watch(problems.take(rows))
        alone = replace(answers, term="distill", prompts=attempt_prompts(problems))
        return alone.take(rows)
