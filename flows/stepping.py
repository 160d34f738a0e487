"""Optimizer steps that were taken before, taken again from events and artifacts alone."""

from dataclasses import dataclass

import storage
from flows.config import RunConfig
from flows.planned import planned_steps
from flows.progress import Progress
from flows.wiring import learner_config, model_spec
from rrl_core.policy.learner import Learner, take_steps
from rrl_core.policy.model import load_policy_model
from rrl_core.seeds import derive_seed
from storage import Store

LOSS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class StepComparison:
    """A step as recorded and as taken again."""

    step: int
    num_samples: int
    recorded_loss: float
    loss: float

    @property
    def is_same(self) -> bool:
        """Whether the losses agree."""
        return abs(self.recorded_loss - self.loss) <= LOSS_TOLERANCE


@dataclass(frozen=True)
class Retaken:
    """An iteration's steps taken again, and the adapter they end in."""

    iteration: int
    steps: list[StepComparison]
    recorded_digest: str
    digest: str

    @property
    def is_same(self) -> bool:
        """Whether every loss and the adapter are as recorded."""
        return self.digest == self.recorded_digest and all(step.is_same for step in self.steps)


def retake(
    store: Store, run_id: str, config: RunConfig, iteration: int, progress: Progress
) -> Retaken:
    """Take the optimizer steps of an iteration again, from events and artifacts alone.

    Raises:
        StorageError: the iteration published nothing, or an artifact it needs is gone.
        DamagedError: a segment it reads was changed.
    """
    storage.require_whole(store)
    policies = {row["policy_version"]: row for row in store.read("policies", run_id=run_id)}
    if iteration not in policies or iteration < 1:
        raise storage.QueryError(
            f"expected an iteration that run {run_id} learned in, 1 to {max(policies, default=0)}; "
            f"came {iteration}"
        )
    before, after = policies[iteration - 1], policies[iteration]
    adapter = _artifact(store, before["adapter_artifact"], "adapter", iteration - 1)
    state = before["optimizer_artifact"]
    optimizer = state and _artifact(store, state, "optimizer state", iteration - 1)
    with progress.status(f"loading {config.model.name}"):
        policy = load_policy_model(model_spec(config), seed=derive_seed(config.run.seed, "adapter"))
        learner = Learner(policy, learner_config(config))
    policy.load_adapter_bytes(adapter)
    if optimizer is not None:
        learner.load_optimizer_state(optimizer)
    updates = store.read("updates", run_id=run_id, iteration=iteration)
    updates.sort(key=lambda row: int(row["step"]))
    planned = planned_steps(store, run_id, iteration)
    steps = []
    with progress.phase(f"steps of iteration {iteration}", len(planned)) as advance:
        results = take_steps(learner, [samples for _, samples in planned])
        for row, result in zip(updates, results, strict=True):
            steps.append(
                StepComparison(row["step"], result.num_sequences, row["loss"], result.loss)
            )
            advance(1)
    return Retaken(iteration, steps, after["adapter_digest"], policy.adapter_digest())


def _artifact(store: Store, name: str, what: str, version: int) -> bytes:
    if not store.artifacts.has(name):
        raise storage.QueryError(
            f"the {what} of policy version {version} is no longer kept: train with "
            '`tracking.keep_optimizer = "all"` to take any step again'
        )
    return store.artifacts.get(name)
