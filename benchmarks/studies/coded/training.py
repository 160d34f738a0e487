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
from benchmarks.studies.coded.journal import Journal, Role
from benchmarks.studies.coded.learning import Learner, Rollouts
from benchmarks.studies.coded.memory import Memory
from benchmarks.studies.coded.policy import Policy
from benchmarks.studies.coded.replaying import Entry, Replayed, Replayer
from benchmarks.studies.coded.stages import Sampler, attempt, feedback_on, try_again
from benchmarks.studies.coded.warm_start import WarmStart
from benchmarks.studies.coded.world import (
    ANSWER_TOKENS,
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
from rrl_core.replay.picks import Pick
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
    """Sampled sequences: attempts, continuations, reviews and second attempts."""
    group_size: int = 8
    """G, attempts at a problem."""
    evaluate_every: int = 1000
    """Sequences between evaluations."""
    revision: int = 2
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
    ids: list[str]
    """Of what was sampled now, in the journal; shorter than B where there are replayed ones."""


def train(
    settings: Settings,
    arm: Arm,
    seed: int,
    start: Policy,
    advance: Callable[[int], None] = lambda num_sequences: None,
    run_id: str = "run",
) -> tuple[Outcome, Journal]:
    """Train an arm; `advance` is told the sequences sampled so far, after each iteration."""
    began, run = process_time(), Run(settings, arm, seed, start, run_id)
    evaluations = [run.evaluate(is_whole=False, is_varied=True)]
    half = settings.budget / 2
    while (before := run.sampler.num_sequences) < settings.budget:
        run.iterate()
        done = run.sampler.num_sequences
        advance(min(done, settings.budget))
        is_whole = before < half <= done or done >= settings.budget
        if is_whole or done // settings.evaluate_every > before // settings.evaluate_every:
            evaluations.append(run.evaluate(is_whole, is_varied=is_whole))
    outcome = Outcome(
        evaluations=evaluations,
        num_iterations=run.num_iterations,
        num_sequences=run.sampler.num_sequences,
        num_tokens=run.sampler.num_tokens,
        num_distilled=run.num_distilled,
        cpu_s=process_time() - began,
    )
    return outcome, run.journal


class Run:
    """The state of a run."""

    def __init__(
        self, settings: Settings, arm: Arm, seed: int, start: Policy, run_id: str = "run"
    ) -> None:
        self._settings, self._arm = settings, arm
        self.world = make_world(seed)
        self.journal = Journal(run_id, self.world, arm.temperature)
        self.journal.begin(0)
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
        self._replayer = Replayer(arm, seed, settings.group_size, iterations)

    def evaluate(self, is_whole: bool, is_varied: bool = False) -> Evaluation:
        """Evaluate now; `is_whole` adds the lifts and what was internalised."""
        place = self.sampler.num_sequences
        evaluation = self._examiner.examine(self.policy, self.memory, place, is_whole)
        if not is_varied:
            return evaluation
        variety, problems, answers, rewards_B = self._examiner.vary(self.policy, place)
        self.journal.sample_from(self.policy, self.num_iterations)
        self.journal.note("evaluation", problems, answers, rewards_B)
        return replace(evaluation, variety=variety)

    def iterate(self) -> None:
        """Sample, review, try again, learn."""
        self.journal.sample_from(self.policy, self.num_iterations)
        self.num_iterations += 1
        self.journal.begin(self.num_iterations)
        attempts, parts = self._attempt()
        if self._arm.second is not None:
            parts += self._second_stage(attempts)
        self._learner.step(parts)

    def _attempt(self) -> tuple[_Attempts, list[Rollouts]]:
        arm, size = self._arm, self._settings.group_size
        picked = self._replayer.pick(self.num_iterations)
        old = picked if arm.unit == "trajectory" else Replayed([])
        again = Replayed([]) if arm.unit == "state" else picked
        fresh = draw_problems(self._problem_draws, arm.prompts)
        problems = again.problems.join(fresh.take(slice(arm.prompts - len(picked))))
        own_B = np.repeat(
            np.arange(len(problems)), [size - 1] * len(old) + [size] * (len(problems) - len(old))
        )
        sampled = attempt(self.sampler, problems.take(own_B))
        owner_B = np.concatenate([own_B, np.arange(len(old))])
        answers_B7 = sampled.completions
        if len(old):
            answers_B7 = np.concatenate([answers_B7, old.tokens])
        rewards_B = rewards(self.world, problems.take(owner_B), answers_B7)
        own_rewards_B = rewards_B[: len(own_B)]
        self._replayer.add(self.num_iterations, problems.take(own_B), sampled, own_rewards_B)
        ids = self._note_attempts(problems.take(own_B), sampled, own_rewards_B)
        self._note_picks(again, ids, own_rewards_B)
        solved_P = np.bincount(own_B, own_rewards_B >= SUCCESS, len(problems))
        p_hat_P = success_rate(solved_P, np.bincount(own_B))
        attempts = _Attempts(problems, owner_B, answers_B7, rewards_B, p_hat_P, ids)
        if self._critic is not None:
            advantages_BL = self._critic.learn(sampled, own_rewards_B)
            is_warm = self.num_iterations > WARMUP
            return attempts, [replace(sampled, advantages=advantages_BL)] if is_warm else []
        advantages_B = np.array(
            group_advantages(rewards_B.tolist(), owner_B.astype(str).tolist(), arm.algorithm)
        )
        parts = [replace(sampled, advantages=advantages_B[: len(own_B)])]
        if len(old):
            parts.append(old.rollouts(advantages_B[len(own_B) :]))
        if arm.unit == "state":
            pairs = zip(self._replayer.picks, picked.entries, strict=True)
            parts += [part for pick, state in pairs for part in self._continue(pick, state)]
        return attempts, parts

    def _note_attempts(self, problems: Problems, sampled: Rollouts, rewards_B: Floats) -> list[str]:
        num_picks = len(self._replayer.picks) if self._arm.unit == "prompt" else 0
        num_retries = num_picks * self._settings.group_size
        rows: dict[Role, slice] = {"retry": slice(num_retries), "attempt": slice(num_retries, None)}
        ids = []
        for role, each in rows.items():
            part = sampled.take(np.arange(len(sampled))[each])
            ids += self.journal.note(role, problems.take(each), part, rewards_B[each])
        return ids

    def _note_picks(self, picked: Replayed, ids: list[str], rewards_B: Floats) -> None:
        """Note picks of trajectories and problems; the attempts at what was picked stand first."""
        size = self._settings.group_size
        pairs = zip(self._replayer.picks, picked.entries, strict=False)
        for number, (pick, entry) in enumerate(pairs):
            self.journal.pick(pick, entry)
            if self._arm.unit == "prompt":
                rows = slice(size * number, size * (number + 1))
                self.journal.compare(entry, ids[rows], rewards_B[rows])

    def _continue(self, pick: Pick, state: Entry) -> list[Rollouts]:
        """Return a group of continuations, and the term of the prefix that they were given."""
        size = self._settings.group_size
        problems = Replayed([state] * size).problems
        given_BL = np.tile(state.tokens, (size, 1))
        prompts = np.concatenate([attempt_prompts(problems), given_BL], axis=1)
        sampled = self.sampler("continuation", prompts, ANSWER_TOKENS - len(state.tokens))
        answers_B7 = np.concatenate([given_BL, sampled.completions], axis=1)
        rewards_B = rewards(self.world, problems, answers_B7)
        parent = self.journal.pick(pick, state)
        ids = self.journal.note(
            "continuation", problems, sampled, rewards_B, [parent] * size, state.tokens
        )
        self.journal.compare(state, ids, rewards_B)
        credit = self._replayer.add_continuations(self.num_iterations, state, rewards_B)
        advantages_B = np.array(
            group_advantages(rewards_B.tolist(), [""] * size, self._arm.algorithm)
        )
        prefix = Rollouts(
            "prefix",
            attempt_prompts(problems),
            given_BL,
            np.tile(state.logprobs, (size, 1)),
            np.full(size, credit),
        )
        parts = [replace(sampled, advantages=advantages_B)]
        return [*parts, prefix] if credit > 0 and self._arm.credit != "none" else parts

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
        parents = [attempts.ids[row] for row in failed_B]
        if seconds.reviews is not None:
            parents = self.journal.note("review", problems, seconds.reviews, None, parents)
        self.journal.note("second_attempt", problems, answers, rewards_B, parents)
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
