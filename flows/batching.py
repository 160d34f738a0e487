"""From scored groups to the batch of each optimizer step: who enters, with what advantage, when."""

import hashlib
from collections.abc import Mapping, Sequence

from flows.config import RunConfig
from flows.translate import Row
from rrl_core.algorithms.advantages import group_advantages
from rrl_core.algorithms.dapo import informative_rows
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.policy.learner import plan_steps
from rrl_core.seeds import derive_seed


def replay_rows(
    config: RunConfig, iteration: int, rollouts: Sequence[Row], scores: Mapping[str, Row]
) -> list[Row]:
    """Return the `replays` rows of an iteration, one per sample and optimizer step.

    Rollouts without a reward are left out; under an algorithm with dynamic sampling so are the
    groups whose rewards are all equal.

    Args:
        config: the run's configuration.
        iteration: the iteration that learns.
        rollouts: committed rows of `rollouts`, in order.
        scores: the reward scorer's committed row of `scores` by rollout id.
    """
    algorithm = ALGORITHMS[config.learner.algorithm]
    groups = [row["group_id"] for row in rollouts]
    rewards = [
        scores[r["event_id"]]["value"] if r["event_id"] in scores else None for r in rollouts
    ]
    advantages = group_advantages(rewards, groups, config.learner.algorithm)
    is_used = [reward is not None for reward in rewards]
    if algorithm.dynamic_sampling:
        is_used = informative_rows(rewards, groups)
    used = [i for i, use in enumerate(is_used) if use]
    seed = derive_seed(config.run.seed, "steps", iteration)
    steps = plan_steps([groups[i] for i in used], config.learner.steps, config.learner.epochs, seed)
    rows = []
    for step, chosen in enumerate(steps):
        batch = [used[i] for i in chosen]
        batch_id = _batch_id([rollouts[i]["event_id"] for i in batch])
        for position, i in enumerate(batch):
            facts = {"step": step, "batch_id": batch_id, "position": position}
            rows.append(facts | _fresh_row(rollouts[i], scores, iteration, advantages[i]))
    return rows


def _fresh_row(
    rollout: Row, scores: Mapping[str, Row], iteration: int, advantage: float | None
) -> Row:
    score = scores[rollout["event_id"]]
    return {
        "iteration": iteration,
        "rollout_id": rollout["event_id"],
        "unit": "fresh",
        "source_run_id": rollout["run_id"],
        "group_id": rollout["group_id"],
        "score_id": score["event_id"],
        "reward": score["value"],
        "advantage": advantage,
        "priority": None,
        "probability": None,
        "pick_kind": "fresh",
        "age": iteration - 1 - rollout["policy_version"],
    }


def _batch_id(rollout_ids: Sequence[str]) -> str:
    return "b-" + hashlib.sha256("\n".join(rollout_ids).encode()).hexdigest()[:32]
