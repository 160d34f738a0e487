"""Old successes in place of fresh completions, before TRL scores and compares a group.

Which ones is decided as for our own runs: the candidates are `replay_buffer` as of the step's pin,
the draw is `rrl_core.replay`. A pick takes the place of the last completion of its prompt's group;
TRL's reward functions judge it anew and its advantage is TRL's, over the whole group.

Our choices:
1. Trajectories alone: a state or a prompt asks for fresh completions, which TRL samples itself.
2. A share of a step's groups, annealed like our own schedule, but at least one group until it is
   annealed to nothing: TRL's batches often hold few groups, and G - 1 completions stay fresh.
3. Age is the number of optimizer steps since a rollout was sampled: TRL publishes no policies.
4. What TRL of today would not train on as stored (other prompt tokens, another temperature, longer
   than it samples) is left out.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from flows.integrations.trl_rows import Sample
from flows.planned import source_rollouts, tokens_of
from flows.replaying import (
    NO_MODEL,
    VIEW,
    Buffer,
    is_eligible,
    pick_rows,
    reasons_of,
)
from flows.translate import Row
from rrl_core.replay.factors import PriorityRule, default_horizon
from rrl_core.replay.picks import PickRule, Picks, pick_entries, signature_cap
from rrl_core.replay.schedule import TRAJECTORY_ITERATION, anneal
from storage import Store, StreamWriter

UNIT = "trajectory"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayOptions:
    """How much of a TRL run is replayed."""

    share: float = 0.25
    """Share of a step's groups in which one completion is replayed, in (0, 1]."""
    first_step: int = TRAJECTORY_ITERATION
    """Optimizer step from which it begins, 2 or later."""
    beta: float = 10.0
    """Sharpness of the priority, per unit of reward; 0 or more."""
    uniform_share: float = 0.1
    """Probability that a pick is drawn uniformly, in [0, 1]."""
    horizon: float | None = None
    """Steps over which a success fades to 1/e; None: a quarter of the planned ones."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.first_step < 2:
            raise ValueError(
                f"expected a share in (0, 1] and a first step of 2 or later; came {self.share} and "
                f"{self.first_step}"
            )


@dataclass(frozen=True)
class Situation:
    """The step a batch is sampled for."""

    run_id: str
    iteration: int
    planned_iterations: int
    as_of: int
    seed: int


@dataclass(frozen=True)
class Fit:
    """What TRL samples today, which a stored success must fit."""

    num_samples: int
    """Completions of the batch."""
    prompt_ids: dict[str, list[int]]
    temperature: float
    max_tokens: int


def decide(
    store: Store, writer: StreamWriter, options: ReplayOptions, now: Situation, fit: Fit
) -> list[Sample]:
    """Decide what a step replays, commit that, and return it: one sample a prompt at most."""
    buffer = _read_buffer(store, now, list(fit.prompt_ids))
    factor = anneal(now.iteration, now.planned_iterations)
    most = max(1, int(options.share * factor * len(fit.prompt_ids) + 0.5)) if factor else 0
    total = most if now.iteration >= options.first_step else 0
    rule = PickRule(
        PriorityRule(options.horizon or default_horizon(now.planned_iterations), options.beta),
        max_per_signature=signature_cap(fit.num_samples),
        uniform_share=options.uniform_share,
        max_per_prompt=1,
    )
    picked = pick_entries(lambda: buffer.chunks, {UNIT: total}, rule, now.seed, now.iteration)
    rows = pick_rows(now.iteration, picked.picks, buffer)
    samples = _samples(store, rows, fit)
    kept = [row for row in rows if row["rollout_id"] in samples]
    reason = _waiting_reason(len(kept), total, now.iteration < options.first_step)
    plan = _plan_row(now.iteration, buffer, options.share * factor, picked)
    plan |= {"num_picked": len(kept), "waiting_reason": reason}
    key = f"i{now.iteration:06d}-pick"
    written = writer.append({"replay_plans": [plan], "picks": kept}, batch_key=key)
    for pick in written.rows["picks"]:
        samples[pick["rollout_id"]].pick = pick
    return [samples[row["rollout_id"]] for row in kept]


def _read_buffer(store: Store, now: Situation, prompt_ids: Sequence[str]) -> Buffer:
    """Return the run's buffer; of its trajectories those of the step's prompts may be picked."""
    asked = pa.array(prompt_ids, pa.string())
    reasons: Counter[tuple[str, str]] = Counter()
    kept = []
    for batch in store.batches(VIEW, {"run": now.run_id, "version": NO_MODEL}, now.as_of):
        reasons.update(reasons_of(batch))
        is_asked = pc.and_(pc.equal(batch["unit"], UNIT), pc.is_in(batch["prompt_id"], asked))
        kept.append(pa.Table.from_batches([batch.filter(pc.and_(is_asked, is_eligible(batch)))]))
    eligible = pa.concat_tables(kept).sort_by("entry_id")
    ages = pc.subtract(now.iteration - 1, eligible["policy_version"])
    index = eligible.schema.get_field_index("age")
    return Buffer(eligible.set_column(index, "age", ages), reasons, {})


def _samples(store: Store, picks: Sequence[Row], fit: Fit) -> dict[str, Sample]:
    """Return what was picked, by rollout id; what does not fit is left out."""
    rollouts = source_rollouts(store, picks)
    tokens = tokens_of(store, rollouts.values())
    samples = {}
    for rollout_id, rollout in rollouts.items():
        stored = tokens[rollout_id]
        sample = Sample(
            rollout, "", stored["prompt_ids"], stored["completion_ids"],
            stored["sampler_logprobs"], rollout["completion"], is_committed=True,
        )  # fmt: skip
        wrong = _misfit(sample, fit)
        if wrong is None:
            samples[rollout_id] = sample
        else:
            _logger.warning("rollout %s is not replayed: %s", rollout_id, wrong)
    return samples


def _misfit(sample: Sample, fit: Fit) -> str | None:
    if sample.prompt_ids != fit.prompt_ids[sample.rollout["prompt_id"]]:
        return "its prompt has other token ids now"
    if sample.rollout["temperature"] != fit.temperature:
        return f"it was sampled at temperature {sample.rollout['temperature']}"
    if len(sample.completion_ids) > fit.max_tokens:
        return f"it has {len(sample.completion_ids)} tokens, more than `max_completion_length`"
    return None


def _waiting_reason(num_picked: int, total: int, is_early: bool) -> str | None:
    if is_early:
        return "before the first step of replay"
    if not total:
        return "annealed"
    if num_picked < total:
        return "fewer eligible than the share" if num_picked else "nothing eligible"
    return None


def _plan_row(iteration: int, buffer: Buffer, share: float, picked: Picks) -> Row:
    return {
        "iteration": iteration,
        "num_candidates": buffer.num_candidates,
        "num_eligible": picked.num_eligible,
        "share": share,
        "priority_entropy": picked.priority_entropy,
        "reasons_json": buffer.reasons_json(),
        "buffer_sha256": buffer.sha256(),
    }
