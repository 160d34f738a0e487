"""Old successes of problems that are now rarely solved, picked and scheduled as in the product."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.studies.coded.learning import Rollouts
from benchmarks.studies.coded.world import (
    ANSWER_TOKENS,
    NUM_DIGITS,
    Floats,
    Ints,
    Problems,
    attempt_prompts,
    decode,
)
from rrl_core.replay.credit import RARELY_SOLVED, RECENT_ATTEMPTS
from rrl_core.replay.factors import Candidates, PriorityRule, default_horizon, make_candidates
from rrl_core.replay.outcomes import SUCCESS
from rrl_core.replay.picks import PickRule, pick_entries, signature_cap
from rrl_core.replay.schedule import Situation, plan_replay
from rrl_core.value.counts import success_rate

SHARE = 0.25
UNIT = "trajectory"


@dataclass(frozen=True)
class Replayed:
    """Old successes [K] that join a fresh group of their problem."""

    problems: Problems
    answers: Ints
    """[K, 7]"""
    sampler_logprobs: Floats
    """[K, 7] when they were sampled."""

    @classmethod
    def of_successes(cls, successes: Sequence["_Success"]) -> "Replayed":
        """Return these successes, which may be none."""
        num = len(successes)
        return cls(
            Problems(
                np.array([s.problem[0] for s in successes], dtype=np.int64),
                np.array([s.problem[1:] for s in successes], dtype=np.int64).reshape(
                    num, NUM_DIGITS
                ),
            ),
            np.array([s.answer for s in successes], dtype=np.int64).reshape(num, ANSWER_TOKENS),
            np.array([s.logprobs for s in successes]).reshape(num, ANSWER_TOKENS),
        )

    def __len__(self) -> int:
        return len(self.problems)

    def rollouts(self, advantages: Floats) -> Rollouts:
        """Return them as part of a batch."""
        prompts = attempt_prompts(self.problems)
        return Rollouts("trajectory", prompts, self.answers, self.sampler_logprobs, advantages)


@dataclass(frozen=True)
class _Success:
    entry_id: str
    problem: tuple[int, ...]
    answer: Ints
    logprobs: Floats
    iteration: int


class Replayer:
    """The history of attempts, and what an iteration goes back to."""

    def __init__(self, seed: int, num_groups: int, group_size: int, num_iterations: int) -> None:
        self._seed, self._num_groups, self._num_iterations = seed, num_groups, num_iterations
        priority = PriorityRule(default_horizon(num_iterations))
        self._rule = PickRule(priority, signature_cap(num_groups * group_size))
        self._recent: dict[tuple[int, ...], list[float]] = {}
        self._successes: list[_Success] = []
        self._best_pass_at_1: float | None = None

    def pick(self, iteration: int) -> Replayed:
        """Return what this iteration replays, counted from 1."""
        rare = [s for s in self._successes if self._p_hat(s) <= RARELY_SOLVED]
        situation = Situation(
            iteration=iteration,
            planned_iterations=self._num_iterations,
            num_groups=self._num_groups,
            has_value_model=False,
            is_judged=False,
            best_pass_at_1=self._best_pass_at_1,
            num_eligible={UNIT: len(rare)},
        )
        num_picks = plan_replay([UNIT], SHARE, situation).num_groups
        if not sum(num_picks.values()):
            return Replayed.of_successes([])
        chunk = self._candidates(rare, iteration)
        picks = pick_entries(lambda: [chunk], num_picks, self._rule, self._seed, iteration).picks
        by_id = {s.entry_id: s for s in rare}
        return Replayed.of_successes([by_id[pick.entry_id] for pick in picks])

    def add(
        self, iteration: int, problems: Problems, attempts: Rollouts, rewards_B: Floats
    ) -> None:
        """Remember an iteration's attempts at these problems."""
        self._best_pass_at_1 = max(float(rewards_B.mean()), self._best_pass_at_1 or 0.0)
        keys = np.concatenate([problems.class_B[:, None], problems.digits_B5], axis=1).tolist()
        for row, (problem, reward) in enumerate(zip(map(tuple, keys), rewards_B, strict=True)):
            self._recent.setdefault(problem, []).append(float(reward))
            if reward >= SUCCESS:
                answer, logprobs = attempts.completions[row], attempts.sampler_logprobs[row]
                entry_id = f"{iteration}/{row}"
                self._successes.append(_Success(entry_id, problem, answer, logprobs, iteration))

    def _p_hat(self, success: _Success) -> float:
        recent = self._recent[success.problem][-RECENT_ATTEMPTS:]
        return float(success_rate(sum(r >= SUCCESS for r in recent), len(recent)))

    def _candidates(self, successes: Sequence[_Success], iteration: int) -> Candidates:
        prompts = [str(s.problem) for s in successes]
        signatures = [decode(s.answer) for s in successes]
        counts = Counter(zip(prompts, signatures, strict=True))
        zeros = np.zeros(len(successes))
        return make_candidates(
            {
                "unit": [UNIT] * len(successes),
                "entry_id": [s.entry_id for s in successes],
                "prompt_id": prompts,
                "difficulty": [""] * len(successes),
                "value": zeros + 1,
                "prompt_value": zeros,
                "p_hat": [self._p_hat(s) for s in successes],
                "is_ever_solved": zeros + 1,
                "state_ok": zeros,
                "state_tries": zeros,
                "age": [iteration - s.iteration for s in successes],
                "signature": signatures,
                "signature_count": [counts[pair] for pair in zip(prompts, signatures, strict=True)],
                "is_eligible": zeros + 1,
            }
        )
