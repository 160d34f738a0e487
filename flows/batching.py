"""From scored groups to the batch of each optimizer step: who enters, with what advantage, when.

A replayed trajectory joins the fresh group of its prompt, so it is compared with what the policy
does today. Continuations of a state are a group, and so are the retries of a prompt.

Our choices:
1. A substitute takes the place of the last fresh rollout of its group (`substituting.py`).
2. raft learns from what did better than its group. Where a state's continuations are all equal they
   are compared with their prompt instead, as their prefix is: their advantage is its credit.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flows.config import RunConfig
from flows.reviewed import ReviewedGroup, review_samples
from flows.translate import Row
from rrl_core.algorithms.advantages import group_advantages
from rrl_core.algorithms.dapo import informative_rows
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.policy.learner import plan_steps
from rrl_core.replay.credit import prefix_advantage
from rrl_core.seeds import derive_seed

UNITS = {"attempt": "fresh", "continuation": "state", "retry": "prompt"}
SUBSTITUTE = "substitute"  # kind of a pick that takes the place of a fresh rollout


@dataclass(frozen=True)
class Scored:
    """A committed rollout, the score that is its reward, and the pick that brought it, if one did.

    `prefix_has_logprobs` tells of a continuation whether its given tokens have stored log-probs.
    """

    rollout: Row
    score: Row | None
    pick: Row | None = None
    prefix_has_logprobs: bool = False

    @property
    def reward(self) -> float | None:
        """The reward; None where there is no judgement."""
        return None if self.score is None else self.score["value"]

    @property
    def unit(self) -> str:
        """The unit of replay it belongs to, or fresh."""
        is_old = self.pick is not None and self.pick["unit"] == "trajectory"
        return "trajectory" if is_old else UNITS[self.rollout["role"]]

    @property
    def is_substitute(self) -> bool:
        """True for a trajectory that takes the place of a fresh rollout."""
        return self.pick is not None and self.pick["pick_kind"] == SUBSTITUTE


def replay_rows(
    config: RunConfig,
    iteration: int,
    scored: Sequence[Scored],
    is_old: bool = False,
    reviewed: Sequence[ReviewedGroup] = (),
) -> list[Row]:
    """Return the `replays` rows of an iteration, one per sample and optimizer step.

    Rollouts without a reward are left out; under an algorithm with dynamic sampling so are the
    groups whose rewards are all equal.

    Args:
        config: the run's configuration.
        iteration: the iteration that learns.
        scored: the iteration's rollouts in order, then the replayed trajectories.
        is_old: the iteration was begun before pins named views: its groups met by their ids.
        reviewed: what it reviewed, and what that led to.
    """
    groups = _group_ids(scored)
    displaced = _displaced(scored, groups)
    rewards = [None if i in displaced else s.reward for i, s in enumerate(scored)]
    credits = _prefix_advantages(config, scored, groups)
    informative = informative_rows(rewards, groups)
    advantages = group_advantages(rewards, groups, config.learner.algorithm)
    algorithm = ALGORITHMS[config.learner.algorithm]
    if algorithm.only_positive:
        compared = zip(advantages, credits, informative, strict=True)
        advantages = [c if c > 0 and not i else a for a, c, i in compared]
    is_used = [reward is not None for reward in rewards]
    if algorithm.dynamic_sampling:
        is_used = [
            i or (u and c > 0) for i, u, c in zip(informative, is_used, credits, strict=True)
        ]
    keys = groups if is_old else _step_keys(scored, groups)
    samples = [
        (key, _sample_row(s, iteration, credit) | {"group_id": group, "advantage": advantage})
        for key, s, credit, group, advantage, use in zip(
            keys, scored, credits, groups, advantages, is_used, strict=True
        )
        if use
    ]
    weight = config.review.attempt_coef
    if weight != 1:
        samples = [
            (key, row | {"weight": weight} if row["unit"] == "fresh" else row)
            for key, row in samples
        ]
    samples += review_samples(config, iteration, reviewed)
    return _placed(config, iteration, samples)


def _placed(config: RunConfig, iteration: int, samples: Sequence[tuple[str, Row]]) -> list[Row]:
    """Return samples, each with what decides its step, at their places in the steps' batches."""
    seed = derive_seed(config.run.seed, "steps", iteration)
    steps = plan_steps(
        [key for key, _ in samples], config.learner.steps, config.learner.epochs, seed
    )
    rows = []
    for step, chosen in enumerate(steps):
        batch = [samples[i][1] for i in chosen]
        batch_id = batch_id_of([row["rollout_id"] for row in batch])
        for position, row in enumerate(batch):
            place = {"iteration": iteration, "step": step, "position": position}
            rows.append(place | {"batch_id": batch_id} | row)
    return rows


def _group_ids(scored: Sequence[Scored]) -> list[str]:
    """Return the group of each: a trajectory's is the fresh one of its prompt."""
    fresh = {s.rollout["prompt_id"]: s.rollout["group_id"] for s in scored if s.unit == "fresh"}
    groups = []
    for s in scored:
        own: str = s.rollout["group_id"]
        groups.append(fresh.get(s.rollout["prompt_id"], own) if s.unit == "trajectory" else own)
    return groups


def _displaced(scored: Sequence[Scored], groups: Sequence[str]) -> set[int]:
    """Return which rollouts give their places to substitutes: the last with a reward of a group."""
    last = {
        group: number
        for number, (group, s) in enumerate(zip(groups, scored, strict=True))
        if s.unit == "fresh" and s.reward is not None
    }
    return {last[g] for g, s in zip(groups, scored, strict=True) if s.is_substitute}


def _step_keys(scored: Sequence[Scored], groups: Sequence[str]) -> list[str]:
    """Return what decides which groups meet in a step: the same in a fork as in its original."""
    keys: dict[str, str] = {}
    for group, s in zip(groups, scored, strict=True):
        if s.unit != "trajectory":
            parts = (s.rollout["role"], s.rollout["prompt_id"], s.rollout["prefix_tokens"])
            keys[group] = " ".join(map(str, parts))
    return [keys.get(group, group) for group in groups]


def _prefix_advantages(
    config: RunConfig, scored: Sequence[Scored], groups: Sequence[str]
) -> list[float]:
    """Return what the given tokens of each continuation enter the loss with; 0 for all others."""
    rewards: dict[str, list[float]] = {}
    for group, s in zip(groups, scored, strict=True):
        if s.unit == "state" and s.reward is not None:
            rewards.setdefault(group, []).append(s.reward)
    credits = []
    for group, s in zip(groups, scored, strict=True):
        credit = 0.0
        mean = None if s.pick is None else s.pick["prompt_mean_reward"]
        if s.pick is not None and mean is not None and group in rewards and _may_credit(config, s):
            own, reward_range = fmean(rewards[group]), config.replay.reward_range
            credit = float(prefix_advantage(own, mean, s.pick["p_hat"], reward_range))
        credits.append(credit)
    return credits


def _may_credit(config: RunConfig, scored: Scored) -> bool:
    credit = config.replay.credit
    is_known = credit == "direct" or (credit == "corrected" and scored.prefix_has_logprobs)
    return scored.unit == "state" and is_known


def _sample_row(scored: Scored, iteration: int, credit: float) -> Row:
    rollout, pick, score = scored.rollout, scored.pick, scored.score
    assert score is not None
    is_state = scored.unit == "state"
    return {
        "rollout_id": rollout["event_id"],
        "unit": scored.unit,
        "source_run_id": rollout["run_id"],
        "score_id": score["event_id"],
        "reward": score["value"],
        "priority": None if pick is None else pick["priority"],
        "probability": None if pick is None else pick["probability"],
        "pick_kind": "fresh" if pick is None else pick["pick_kind"],
        "age": iteration - 1 - rollout["policy_version"],
        "pick_id": None if pick is None else pick["event_id"],
        "prefix_tokens": rollout["prefix_tokens"] if is_state else None,
        "prefix_advantage": credit if is_state else None,
    }


def picks_by_rollout(picks: Sequence[Row], rollouts: Sequence[Row]) -> Mapping[str, Row]:
    """Return the pick that brought each replayed rollout of the iteration, by rollout id."""
    of_unit = {(p["unit"], p["entry_id"]): p for p in picks}
    found = {}
    for rollout in rollouts:
        key = {
            "continuation": ("state", rollout["parent_id"]),
            "retry": ("prompt", rollout["prompt_id"]),
        }.get(rollout["role"])
        if key in of_unit:
            found[rollout["event_id"]] = of_unit[key]
    return found


def batch_id_of(rollout_ids: Sequence[str]) -> str:
    """Return the id of a batch: the hash of its rollouts' ids, in order."""
    return "b-" + hashlib.sha256("\n".join(rollout_ids).encode()).hexdigest()[:32]
