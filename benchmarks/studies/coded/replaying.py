"""What an iteration goes back to: states, old successes or problems, picked as in the product.

A run replays one unit. Eligibility, by the reasons of the product: a problem solved by p_hat is not
gone back to, nor is an entry twice in a row, nor one that was picked eight times without a success
since it was judged. A trajectory's problem is rarely solved; a state with a value of 0.75 or more
by two judgements in a row is mastered.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.learning import Rollouts
from benchmarks.studies.coded.values import PROMPT, CountedValues, Key, Place
from benchmarks.studies.coded.world import (
    NUM_DIGITS,
    Floats,
    Ints,
    Problems,
    attempt_prompts,
    decode,
)
from rrl_core.replay.credit import (
    RARELY_SOLVED,
    RECENT_ATTEMPTS,
    prefix_advantage,
    recent_mean_reward,
)
from rrl_core.replay.factors import Candidates, PriorityRule, default_horizon, make_candidates
from rrl_core.replay.outcomes import SUCCESS
from rrl_core.replay.picks import Pick, PickRule, pick_entries, signature_cap
from rrl_core.replay.schedule import Situation, plan_replay
from rrl_core.value.counts import posterior_value, success_rate
from rrl_core.value.cuts import CutKind, cut_points

SHARE = 0.25
SOLVED = 0.75
MAX_USES = 8
MAX_CUTS = 4
"""Of an answer; its seven characters have one cut, after the third, unless it lost its form."""


@dataclass
class Tried:
    """A problem's own attempts."""

    rewards: list[float] = field(default_factory=list)
    p_hat: float = float(success_rate(0, 0))
    last_ok: int = 0
    """Iteration of its last success, 0 before."""

    def add(self, reward: float, iteration: int) -> None:
        self.rewards.append(reward)
        recent = self.rewards[-RECENT_ATTEMPTS:]
        self.p_hat = float(success_rate(sum(r >= SUCCESS for r in recent), len(recent)))
        if reward >= SUCCESS:
            self.last_ok = iteration


@dataclass(eq=False)
class Entry:
    """Something that can be replayed."""

    entry_id: str
    problem: Key
    tried: Tried
    iteration: int
    """That sampled it."""
    row: int
    """Of the attempt it comes from, in that iteration."""
    tokens: Ints
    """Of the answer: all of a trajectory's, the given ones of a state, none of a problem."""
    logprobs: Floats
    """Of these tokens when they were sampled."""
    cut: CutKind = "prompt"
    """Why a state ends where it does."""
    places: tuple[Place, Place] = ((0, 0), (0, 0))
    """Of a state and of its problem in `CountedValues`."""
    p_hat: float = 0.0
    """Of the problem when the entry was made."""
    values: tuple[float, float] = (0.0, 0.0)
    """V(s) and V(x) then."""
    earlier: float = 0.0
    """V(s) by the judgement before the newest; 0 before there was one."""
    continued: list[bool] = field(default_factory=list)
    """Whether each continuation of a state was a success."""
    uses: list[int] = field(default_factory=list)
    """Iterations that picked it."""

    @property
    def problems(self) -> Problems:
        """The problem, as a row."""
        return Replayed([self]).problems

    @property
    def signature(self) -> str:
        return decode(self.tokens)


@dataclass(frozen=True)
class Replayed:
    """What was picked [K], of one unit."""

    entries: Sequence[Entry]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def problems(self) -> Problems:
        keys = np.array([e.problem for e in self.entries], dtype=np.int64)
        keys = keys.reshape(-1, 1 + NUM_DIGITS)
        return Problems(keys[:, 0], keys[:, 1:])

    @property
    def tokens(self) -> Ints:
        """Of entries with answers of one length: those that were sampled, [K, L]."""
        return np.array([e.tokens for e in self.entries], dtype=np.int64)

    def rollouts(self, advantages: Floats) -> Rollouts:
        """Return trajectories as part of a batch."""
        logprobs = np.array([e.logprobs for e in self.entries])
        prompts = attempt_prompts(self.problems)
        return Rollouts("trajectory", prompts, self.tokens, logprobs, advantages)


class Replayer:
    """The history of attempts, and what an iteration goes back to."""

    def __init__(self, arm: Arm, seed: int, group_size: int, num_iterations: int) -> None:
        self._arm, self._seed, self._num_iterations = arm, seed, num_iterations
        priority = PriorityRule(default_horizon(num_iterations))
        cap = signature_cap(arm.prompts * group_size)
        self._rule = PickRule(priority, cap, arm.uniform_share)
        self._tried: dict[Key, Tried] = {}
        self._entries: dict[str, Entry] = {}
        self._values = CountedValues(default_horizon(num_iterations))
        self._best_pass_at_1: float | None = None
        self.picks: tuple[Pick, ...] = ()
        """Those of the newest iteration."""

    def pick(self, iteration: int) -> Replayed:
        """Return what this iteration replays, counted from 1."""
        self.picks = ()
        if self._arm.unit is None:
            return Replayed([])
        unit, (entries, values) = self._arm.unit, self._eligible(iteration)
        situation = Situation(
            iteration=iteration,
            planned_iterations=self._num_iterations,
            num_groups=self._arm.prompts,
            has_value_model=False,
            is_judged=False,
            best_pass_at_1=self._best_pass_at_1,
            num_eligible={unit: len(entries)},
        )
        num_picks = plan_replay([unit], SHARE, situation).num_groups
        if not sum(num_picks.values()):
            return Replayed([])
        chunk = self._candidates(entries, values, iteration)
        found = pick_entries(lambda: [chunk], num_picks, self._rule, self._seed, iteration)
        self.picks = found.picks
        chosen = [self._entries[pick.entry_id] for pick in found.picks]
        for entry in chosen:
            entry.uses.append(iteration)
        return Replayed(chosen)

    def add(
        self, iteration: int, problems: Problems, attempts: Rollouts, rewards_B: Floats
    ) -> None:
        """Remember an iteration's attempts at these problems."""
        self._best_pass_at_1 = max(float(rewards_B.mean()), self._best_pass_at_1 or 0.0)
        keys = problem_keys(problems)
        for key, reward in zip(keys, rewards_B.tolist(), strict=True):
            self._tried.setdefault(key, Tried()).add(reward, iteration)
        if self._arm.unit == "prompt":
            for row, key in enumerate(keys):
                self._keep(str(key), key, iteration, row, attempts, 0)
        elif self._arm.unit == "trajectory":
            for row in np.flatnonzero(rewards_B >= SUCCESS).tolist():
                self._keep(f"{iteration}/{row}", keys[row], iteration, row, attempts, None)
        elif self._arm.unit == "state":
            self._add_states(iteration, keys, attempts, rewards_B)

    def add_continuations(self, iteration: int, state: Entry, rewards_B: Floats) -> float:
        """Remember what continuations of a state came to; return its prefix's advantage."""
        for is_ok in (rewards_B >= SUCCESS).tolist():
            state.continued.append(is_ok)
            self._values.add(state.places[0], is_ok, iteration, is_continuation=True)
        tried, mean = state.tried, float(rewards_B.mean())
        return float(prefix_advantage(mean, recent_mean_reward(tried.rewards) or 0.0, tried.p_hat))

    def _keep(
        self, entry_id: str, key: Key, iteration: int, row: int, attempts: Rollouts, num: int | None
    ) -> Entry | None:
        """Keep the first `num` tokens of an attempt; return the entry if it is new."""
        if entry_id in self._entries:
            return None
        tokens, logprobs = attempts.completions[row, :num], attempts.sampler_logprobs[row, :num]
        tried = self._tried[key]
        entry = Entry(entry_id, key, tried, iteration, row, tokens, logprobs, p_hat=tried.p_hat)
        self._entries[entry_id] = entry
        return entry

    def _add_states(
        self, iteration: int, keys: Sequence[Key], attempts: Rollouts, rewards_B: Floats
    ) -> None:
        made = []
        for row, (key, is_ok) in enumerate(zip(keys, rewards_B >= SUCCESS, strict=True)):
            answer = attempts.completions[row]
            for token in (int(answer[0]), PROMPT):
                place = self._values.place(key, token)
                self._values.add(place, bool(is_ok), iteration, is_continuation=False)
            if self._tried[key].p_hat >= SOLVED:
                continue
            for cut in cut_points(answer.tolist(), lambda ids: decode(np.array(ids)), MAX_CUTS):
                num = cut.prefix_tokens
                name = f"{key}/{decode(answer[:num])}"
                entry = self._keep(name, key, iteration, row, attempts, num)
                if entry is not None:
                    entry.cut = cut.cut
                    place = self._values.place(key, int(answer[0]))
                    entry.places = (place, self._values.place(key, PROMPT))
                    made.append(entry)
        values_2N = self._judge(made, iteration)
        for entry, value, prompt_value in zip(made, *values_2N, strict=True):
            entry.values = (float(value), float(prompt_value))

    def _judge(self, states: Sequence[Entry], iteration: int) -> Floats:
        """Return V(s) and V(x) of states [2, N], before their own outcomes are counted."""
        places = [[e.places[which] for e in states] for which in (0, 1)]
        return np.stack([self._values.judge(each, iteration) for each in places])

    def _eligible(self, iteration: int) -> tuple[list[Entry], Floats]:
        """Return what can be picked, with what the entries and their problems are worth [2, N]."""
        kept = [e for e in self._entries.values() if self._is_free(e, iteration)]
        if self._arm.unit == "trajectory":
            return kept, np.array([[1.0] * len(kept), [0.0] * len(kept)])
        if self._arm.unit == "prompt":
            return kept, np.array([[self._p_hat(e) for e in kept]] * 2)
        if self._arm.is_stale:
            return kept, np.array([e.values for e in kept]).reshape(-1, 2).T
        raw_2N = self._judge(kept, iteration)
        recent = [e.continued[-RECENT_ATTEMPTS:] for e in kept]
        ok_N, tries_N = (np.array([f(r) for r in recent], dtype=np.int64) for f in (sum, len))
        value_N = posterior_value(ok_N, tries_N, raw_2N[0])
        earlier_N = posterior_value(ok_N, tries_N, [e.earlier for e in kept])
        for entry, value in zip(kept, raw_2N[0].tolist(), strict=True):
            entry.earlier = value
        rewards = [e.tried.rewards[-RECENT_ATTEMPTS:] for e in kept]
        solved_N = [sum(r >= SUCCESS for r in each) for each in rewards]
        prompt_value_N = posterior_value(solved_N, [len(r) for r in rewards], raw_2N[1])
        rows = np.flatnonzero((value_N < SOLVED) | (earlier_N < SOLVED))
        return [kept[row] for row in rows], np.stack([value_N, prompt_value_N])[:, rows]

    def _is_free(self, entry: Entry, iteration: int) -> bool:
        p_hat = self._p_hat(entry)
        if p_hat >= SOLVED or (self._arm.unit == "trajectory" and p_hat > RARELY_SOLVED):
            return False
        uses = entry.uses
        is_judged_again = self._arm.unit == "state" and not self._arm.is_stale
        is_retired = len(uses) >= MAX_USES and uses[-MAX_USES] > entry.tried.last_ok
        is_cooling = bool(uses) and uses[-1] == iteration - 1
        return not is_cooling and (is_judged_again or not is_retired)

    def _p_hat(self, entry: Entry) -> float:
        return entry.p_hat if self._arm.is_stale else entry.tried.p_hat

    def _candidates(
        self, entries: Sequence[Entry], values_2N: Floats, iteration: int
    ) -> Candidates:
        prompts = [str(e.problem) for e in entries]
        signatures = [e.signature for e in entries]
        counts = Counter(zip(prompts, signatures, strict=True))
        zeros = np.zeros(len(entries))
        return make_candidates(
            {
                "unit": [self._arm.unit] * len(entries),
                "entry_id": [e.entry_id for e in entries],
                "prompt_id": prompts,
                "difficulty": [""] * len(entries),
                "value": values_2N[0],
                "prompt_value": values_2N[1],
                "p_hat": [self._p_hat(e) for e in entries],
                "is_ever_solved": [e.tried.last_ok > 0 for e in entries],
                "state_ok": zeros,
                "state_tries": zeros,
                "age": [iteration - e.iteration for e in entries],
                "signature": signatures,
                "signature_count": [counts[pair] for pair in zip(prompts, signatures, strict=True)],
                "is_eligible": zeros + 1,
            }
        )


def problem_keys(problems: Problems) -> list[Key]:
    """Return what tells the problems apart."""
    keys = np.concatenate([problems.class_B[:, None], problems.digits_B5], axis=1)
    return list(map(tuple, keys.tolist()))
