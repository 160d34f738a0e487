"""What a policy is worth now, on problems it never trains on, sampled at temperature 1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.learning import Rollouts
from benchmarks.studies.coded.memory import Memory
from benchmarks.studies.coded.policy import Policy, token_logprobs
from benchmarks.studies.coded.stages import Sampler, attempt, feedback_on, try_again
from benchmarks.studies.coded.world import (
    Floats,
    Ints,
    Problems,
    World,
    decode,
    held_out_problems,
    rewards,
)
from rrl_core.algorithms.ratios import entropy_from_logprobs
from rrl_core.exploration import distinct_n, pass_at_k
from rrl_core.replay.outcomes import SUCCESS
from rrl_core.review.lift import paired_lift
from rrl_core.seeds import derive_seed

CONTROLS = ("retry", "blank")


@dataclass(frozen=True)
class Variety:
    """Several samples of each of some held-out problems, rare ones first."""

    num_samples: int
    """Of each problem."""
    num_ok: list[int]
    """Successes of each problem."""
    pass_at_1: float
    """Of rare problems, as all that follows; unbiased."""
    pass_at_8: float
    distinct: float
    """Different answers over all of a problem, mean."""
    entropy: float
    """Of the policy at the tokens of the answers, mean, in nats."""


@dataclass(frozen=True)
class Evaluation:
    """Shares of problems that are solved."""

    num_sequences: int
    """Sampled in training so far."""
    rare: float
    common: float
    lifts: dict[str, float | None]
    """By how much a second attempt of the arm beats each control on failed rare problems."""
    internalised: float | None
    """Of the problems whose second attempt was distilled: share a first attempt solves now."""
    variety: Variety | None = None
    """None between start, middle and end."""


@dataclass(frozen=True)
class ExamSettings:
    """How much is evaluated."""

    rare_problems: int = 240
    common_problems: int = 80
    distilled_problems: int = 240
    """The last distilled ones are tried again, at most so many."""
    varied_rare: int = 40
    varied_common: int = 20
    samples: int = 16
    """Of each of these problems, 8 or more: as many failures mean that a problem is lost."""


class Examiner:
    """Evaluates the policies of a run; its draws are none of the run's."""

    def __init__(self, settings: ExamSettings, arm: Arm, seed: int, world: World) -> None:
        self._settings, self._arm, self._seed, self._world = settings, arm, seed, world
        self._problems = held_out_problems(seed, settings.rare_problems, settings.common_problems)
        self._distilled = self._problems.take(slice(0))
        common = settings.rare_problems + np.arange(settings.varied_common)
        self._varied = self._problems.take(
            np.concatenate([np.arange(settings.varied_rare), common])
        )

    def watch(self, problems: Problems) -> None:
        """Remember problems whose second attempts were distilled."""
        self._distilled = self._distilled.join(problems)

    def examine(
        self, policy: Policy, memory: Memory, num_sequences: int, is_whole: bool
    ) -> Evaluation:
        """Evaluate; `is_whole` adds lifts and what was internalised."""
        place = derive_seed(self._seed, "evaluation", num_sequences)
        sampler = Sampler(policy, torch.Generator().manual_seed(place))
        answers_B7 = attempt(sampler, self._problems).completions
        rewards_B = rewards(self._world, self._problems, answers_B7)
        is_rare_B = self._problems.is_rare()
        failed = np.flatnonzero(is_rare_B & (rewards_B < SUCCESS))
        lifts: dict[str, float | None] = {}
        if is_whole and self._arm.second is not None and len(failed):
            lifts = self._lifts(sampler, failed, answers_B7[failed], memory)
        return Evaluation(
            num_sequences=num_sequences,
            rare=float(rewards_B[is_rare_B].mean()),
            common=float(rewards_B[~is_rare_B].mean()),
            lifts=lifts,
            internalised=self._internalised(sampler) if is_whole else None,
        )

    def vary(
        self, policy: Policy, num_sequences: int
    ) -> tuple[Variety, Problems, Rollouts, Floats]:
        """Sample several answers to each of some problems; return them with their rewards too."""
        place = derive_seed(self._seed, "variety", num_sequences)
        sampler = Sampler(policy, torch.Generator().manual_seed(place))
        num, size = len(self._varied), self._settings.samples
        problems = self._varied.take(np.repeat(np.arange(num), size))
        answers = attempt(sampler, problems)
        rewards_B = rewards(self._world, problems, answers.completions)
        num_ok = (rewards_B.reshape(num, size) >= SUCCESS).sum(1).tolist()
        texts = [decode(answer) for answer in answers.completions]
        num_rare = int(self._varied.is_rare().sum())
        of_rare = [texts[size * n : size * (n + 1)] for n in range(num_rare)]
        variety = Variety(
            num_samples=size,
            num_ok=num_ok,
            pass_at_1=_mean([pass_at_k(size, ok, 1) for ok in num_ok[:num_rare]]),
            pass_at_8=_mean([pass_at_k(size, ok, min(8, size)) for ok in num_ok[:num_rare]]),
            distinct=_mean([distinct_n(each, 1) for each in of_rare]),
            entropy=_entropy(policy, answers.take(np.arange(size * num_rare))),
        )
        return variety, problems, answers, rewards_B

    def _lifts(
        self, sampler: Sampler, rows: Ints, answers_B7: Ints, memory: Memory
    ) -> dict[str, float | None]:
        arm, problems = self._arm, self._problems.take(rows)
        draws = np.random.default_rng(derive_seed(self._seed, "lifts"))
        lying = None if arm.has_feedback else draws
        failures = feedback_on(self._world, problems, answers_B7, lying)
        shown = memory if arm.has_memory else None
        outcomes = {}
        for kind in dict.fromkeys((str(arm.second), *CONTROLS)):
            seconds = try_again(kind, sampler, failures, shown, draws)
            outcomes[kind] = rewards(self._world, problems, seconds.answers.completions).tolist()
        own = outcomes[str(arm.second)]
        return {
            kind: paired_lift(list(zip(own, outcomes[kind], strict=True))).lift
            for kind in CONTROLS
            if kind != arm.second
        }

    def _internalised(self, sampler: Sampler) -> float | None:
        if not len(self._distilled):
            return None
        last = self._distilled.take(slice(-self._settings.distilled_problems, None))
        return float(rewards(self._world, last, attempt(sampler, last).completions).mean())


def _entropy(policy: Policy, part: Rollouts) -> float:
    ids_BT = torch.from_numpy(np.concatenate([part.prompts, part.completions], axis=1))
    with torch.no_grad():
        logprobs_BLV = token_logprobs(policy, ids_BT)[:, -part.completions.shape[1] :]
    return float(entropy_from_logprobs(logprobs_BLV).mean())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
