"""What of its history an iteration goes back to: the buffer at the pin, picks, groups to sample.

The facts are a view as of the pin (`storage/sql/replay_buffer.sql`); which of them are picked is
decided in `rrl_core.replay`. Both are functions of the log and of the seed, so `rrl audit` derives
them again.

Our choice: `replay.capacity` bounds the entries of each unit that may be picked, also where no
value model judges them; the same stay as at a refit (`rrl_core/replay/retention.py`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.batching import SUBSTITUTE
from flows.config import RunConfig
from flows.conversing import given_turns
from flows.generation import Group
from flows.lineage import lineage_of
from flows.planned import source_rollouts, tokens_of
from flows.translate import Row
from flows.wiring import Session
from rrl_core.replay.factors import (
    UNITS,
    Candidates,
    PriorityRule,
    default_horizon,
    make_candidates,
)
from rrl_core.replay.picks import Pick, PickRule, Picks, pick_entries, signature_cap
from rrl_core.replay.retention import retained
from rrl_core.replay.schedule import (
    TRAJECTORY_ITERATION,
    ReplayPlan,
    Situation,
    curriculum_weights,
    plan_replay,
)
from rrl_core.sampling.protocol import Turn
from rrl_core.tasks.protocol import Prompt, environment_of
from rrl_core.tasks.selection import select_prompts
from storage import Store

VIEW = "replay_buffer"
PINNED_VIEWS = (VIEW, "prompt_history")
VALUE_SCORER = "value"
NO_MODEL = "none"  # a version: judge states by success rates alone
ELIGIBLE = "eligible"
BEYOND_CAPACITY = "beyond_capacity"  # eligible, but `replay.capacity` others are worth more
_HASHED = ("prompt_tries", "prompt_ok", "state_tries", "state_ok", "num_uses", "signature_count")
_CHUNK_ROWS = 4_096


@dataclass(frozen=True)
class Pin:
    """What an iteration reads: the commit, and the value model version it judges states by."""

    as_of: int
    value_version: str

    @classmethod
    def of_row(cls, row: Row) -> "Pin":
        """Return the pin of a `views_pinned` row."""
        versions = json.loads(row["scorer_versions_json"])
        return cls(int(row["as_of"]), versions.get(VALUE_SCORER, NO_MODEL))


@dataclass
class Buffer:
    """A run's replay buffer at a pin: what may be picked, and how many may not and why.

    Only eligible rows are held, of each unit `replay.capacity` at most. `pass_rates` is the recent
    success rate of the prompts of each difficulty.
    """

    eligible: pa.Table
    reasons: Counter[tuple[str, str]]
    pass_rates: dict[str, float]

    @property
    def num_candidates(self) -> int:
        """Rows of the view."""
        return self.reasons.total()

    def num_eligible(self) -> dict[str, int]:
        """Return the eligible rows by unit."""
        return {unit: n for (unit, reason), n in self.reasons.items() if reason == ELIGIBLE}

    def reasons_json(self) -> str:
        """Return the counts as JSON: unit, then reason."""
        by_unit: dict[str, dict[str, int]] = {}
        for (unit, reason), number in sorted(self.reasons.items()):
            by_unit.setdefault(unit, {})[reason] = number
        return json.dumps(by_unit)

    def sha256(self) -> str:
        """Return the hash of the numbers by reason, and of ids and counts of what may be picked."""
        rows = self.eligible.select(["entry_id", *_HASHED]).to_pylist()
        content = [self.reasons_json(), *(list(row.values()) for row in rows)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def chunks(self) -> list[Candidates]:
        """Return what may be picked, as `rrl_core.replay` wants it."""
        batches = self.eligible.to_batches(max_chunksize=_CHUNK_ROWS)
        return [candidates_of(batch) for batch in batches if len(batch)]


def read_buffer(store: Store, run_id: str, pin: Pin, config: RunConfig) -> Buffer:
    """Return the buffer of a run at a pin; rows that may not be picked are counted, not held."""
    arguments = {"run": run_id, "version": pin.value_version}
    reasons: Counter[tuple[str, str]] = Counter()
    attempts = Attempts()
    kept: list[pa.Table] = []
    num_held, num_eligible = 0, Counter[str]()
    for batch in store.batches(VIEW, arguments, pin.as_of):
        found = reasons_of(batch)
        reasons.update(found)
        num_eligible.update({unit: n for (unit, reason), n in found.items() if reason == ELIGIBLE})
        attempts.add(batch)
        kept.append(pa.Table.from_batches([batch.filter(is_eligible(batch))]))
        num_held += len(kept[-1])
        if num_held > (1 + len(UNITS)) * config.replay.capacity:
            kept = [_within_capacity(pa.concat_tables(kept), config)]
            num_held = len(kept[0])
    eligible = _within_capacity(pa.concat_tables(kept), config)
    for unit, number in num_eligible.items():
        num_beyond = number - min(number, config.replay.capacity)
        if num_beyond:
            reasons[unit, ELIGIBLE] -= num_beyond
            reasons[unit, BEYOND_CAPACITY] = num_beyond
    ordered = eligible.sort_by([("unit", "ascending"), ("entry_id", "ascending")])
    return Buffer(ordered, reasons, attempts.pass_rates())


def _within_capacity(eligible: pa.Table, config: RunConfig) -> pa.Table:
    """Return the rows with the best `replay.capacity` of each unit."""
    capacity, priority = config.replay.capacity, pick_rule(config).priority
    kept = []
    for unit in UNITS:
        rows = eligible.filter(pc.equal(eligible["unit"], unit))
        if len(rows) > capacity:
            chunks = map(candidates_of, rows.to_batches(max_chunksize=_CHUNK_ROWS))
            keys = pa.array(retained(chunks, capacity, priority), pa.string())
            rows = rows.filter(pc.is_in(rows["entry_key"], value_set=keys))
        kept.append(rows)
    return pa.concat_tables(kept)


class Attempts:
    """Recent attempts and successes by difficulty, summed over the prompts of a buffer."""

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()
        self._ok: Counter[str] = Counter()

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the prompts among rows of the view."""
        prompts = batch.filter(pc.equal(batch["unit"], "prompt"))
        for row in prompts.select(["difficulty", "prompt_tries", "prompt_ok"]).to_pylist():
            bucket = row["difficulty"] or ""
            self._tries[bucket] += row["prompt_tries"]
            self._ok[bucket] += row["prompt_ok"]

    def pass_rates(self) -> dict[str, float]:
        """Return the success rate of each difficulty that was tried."""
        return {bucket: self._ok[bucket] / tries for bucket, tries in self._tries.items() if tries}


def reasons_of(batch: pa.RecordBatch) -> dict[tuple[str, str], int]:
    """Return how many rows of the view have which unit and eligibility reason."""
    keys = ["unit", "eligibility_reason"]
    counted = pa.Table.from_batches([batch.select(keys)]).group_by(keys)
    rows = counted.aggregate([([], "count_all")]).to_pylist()
    return {(row["unit"], row["eligibility_reason"]): row["count_all"] for row in rows}


def is_eligible(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return which rows of the view may be picked."""
    return pc.equal(batch["eligibility_reason"], ELIGIBLE)


def candidates_of(batch: pa.RecordBatch | pa.Table) -> Candidates:
    """Return rows of the view as `rrl_core.replay` wants them.

    Entries are drawn by their `entry_key`, which names no run: a fork draws what its original did.
    """
    columns = {name: batch[name].to_pylist() for name in batch.schema.names}
    columns["entry_id"] = columns["entry_key"]
    columns["is_eligible"] = [reason == ELIGIBLE for reason in columns["eligibility_reason"]]
    return make_candidates(columns)


def pick_rule(config: RunConfig, pass_rates: Mapping[str, float] | None = None) -> PickRule:
    """Return how a run's picks are drawn; `pass_rates` weigh where the curriculum is on."""
    replay, sampler = config.replay, config.sampler
    horizon = replay.horizon or default_horizon(config.run.iterations)
    curriculum = curriculum_weights(pass_rates or {}) if replay.curriculum else None
    return PickRule(
        PriorityRule(horizon, replay.beta / replay.reward_range, replay.state_base, curriculum),
        max_per_signature=signature_cap(sampler.prompts * sampler.group_size),
        uniform_share=replay.uniform_share,
    )


@dataclass(frozen=True)
class Decision:
    """What an iteration decided at its pin: a row of `replay_plans`, and rows of `picks`.

    `most_substitutes`: fresh groups of equal rewards that may get a substitute out of `buffer`.
    """

    plan: Row
    picks: list[Row]
    buffer: Buffer
    most_substitutes: int


def decide(store: Store, run_id: str, config: RunConfig, iteration: int, pin: Pin) -> Decision:
    """Return what `iteration` replays: a function of the log up to the pin, and of the seed."""
    buffer = read_buffer(store, run_id, pin, config)
    situation = Situation(
        iteration=iteration,
        planned_iterations=config.run.iterations,
        num_groups=config.sampler.prompts,
        has_value_model=config.value.every is not None,
        is_judged=bool(lineage_of(store, run_id).read(store, "value_models", pin.as_of)),
        best_pass_at_1=_best_pass_at_1(store, run_id, iteration, pin.as_of)
        if iteration < TRAJECTORY_ITERATION  # later it decides nothing
        else None,
        num_eligible=buffer.num_eligible(),
    )
    plan = plan_replay(config.replay.units, config.replay.share, situation)
    rule = pick_rule(config, buffer.pass_rates)
    picked = pick_entries(lambda: buffer.chunks, plan.num_groups, rule, config.run.seed, iteration)
    return Decision(
        _plan_row(iteration, buffer, plan, picked),
        pick_rows(iteration, picked.picks, buffer),
        buffer,
        plan.most_substitutes if config.replay.replace_zero_variance else 0,
    )


def pick_rows(iteration: int, picks: Sequence[Pick], buffer: Buffer) -> list[Row]:
    """Return the `picks` rows: what each pick rests on, and the facts it was chosen under."""
    keys = pa.array([pick.entry_id for pick in picks], pa.string())
    found = buffer.eligible.filter(pc.is_in(buffer.eligible["entry_key"], value_set=keys))
    facts = {row["entry_key"]: row for row in found.to_pylist()}
    return [_pick_row(iteration, pick, facts[pick.entry_id]) for pick in picks]


def value_version(store: Store, run_id: str, as_of: int) -> str:
    """Return the version a run judges states by: its newest model's, if that one is healthy."""
    models = lineage_of(store, run_id).read(store, "value_models", as_of)
    if not models or models[-1]["verdict"] != "healthy":
        return NO_MODEL
    return str(models[-1]["scorer_version"])


def groups(session: Session, iteration: int) -> list[Group]:
    """Return what the iteration samples: as many groups as it has prompts, replayed ones included.

    A replayed state or prompt takes the place of a fresh group. A replayed trajectory brings its
    prompt, whose fresh group is smaller by what is replayed.
    """
    rows = session.store.read("picks", run_id=session.run_id, iteration=iteration)
    picks = [pick for pick in rows if pick["pick_kind"] != SUBSTITUTE]
    picks.sort(key=lambda pick: int(pick["position"]))
    prompts = {prompt.prompt_id: prompt for prompt in session.prompts("train")}
    size, per_iteration = session.config.sampler.group_size, session.config.sampler.prompts
    joined = Counter(pick["prompt_id"] for pick in picks if pick["unit"] == "trajectory")
    retried = {pick["prompt_id"] for pick in picks if pick["unit"] == "prompt"}
    num_fresh = per_iteration - len(joined) - sum(p["unit"] != "trajectory" for p in picks)
    others = [
        prompt
        for prompt in _fresh_prompts(session, iteration)
        if prompt.prompt_id not in joined and prompt.prompt_id not in retried
    ]
    found = [Group("attempt", prompt, size) for prompt in others[:num_fresh]]
    found += [
        Group("attempt", prompts[prompt_id], max(1, size - number))
        for prompt_id, number in joined.items()
    ]
    prefixes = _prefixes(session, [pick for pick in picks if pick["unit"] == "state"])
    for pick in picks:
        prompt = prompts[pick["prompt_id"]]
        if pick["unit"] == "state":
            given = prefixes[pick["entry_id"]]
            found.append(Group("continuation", prompt, size, pick["entry_id"], **given))
        elif pick["unit"] == "prompt":
            found.append(Group("retry", prompt, size))
    return found


def _fresh_prompts(session: Session, iteration: int) -> list[Prompt]:
    prompts = session.prompts("train")
    run, per_iteration = session.config.run, session.config.sampler.prompts
    return [prompts[i] for i in select_prompts(len(prompts), iteration, per_iteration, run.seed)]


def _prefixes(session: Session, picks: list[Row]) -> dict[str, dict[str, Any]]:
    """Return what is given of each picked state, by state id: fields of its group."""
    states = session.store.read("states", event_ids=[pick["entry_id"] for pick in picks])
    tokens = tokens_of(session.store, source_rollouts(session.store, picks).values())
    turns: dict[tuple[str, int], tuple[Turn, ...]] = {}
    if environment_of(session.task) is not None:
        turns = given_turns(session.store, tokens, [_given(state) for state in states])
    return {
        state["event_id"]: {
            "prefix_ids": tuple(
                tokens[state["rollout_id"]]["completion_ids"][: state["prefix_tokens"]]
            ),
            "prefix_sha256": state["prefix_sha256"],
            "turns": turns.get(_given(state), ()),
        }
        for state in states
    }


def _given(state: Row) -> tuple[str, int]:
    """Return whose first tokens a state is, and how many."""
    return state["rollout_id"], state["prefix_tokens"]


def _best_pass_at_1(store: Store, run_id: str, iteration: int, as_of: int) -> float | None:
    """Return the highest success rate of attempts in an iteration before `iteration`."""
    lineage = lineage_of(store, run_id)
    tried: Counter[int] = Counter()
    solved: Counter[int] = Counter()
    source_of = {earlier: lineage.run_of(earlier) for earlier in range(1, iteration)}
    for source in sorted(set(source_of.values())):
        for row in store.view("prompt_history", run_id=source, as_of=as_of):
            if source_of.get(row["iteration"]) == source:
                tried[row["iteration"]] += row["num_scored"]
                solved[row["iteration"]] += row["num_ok"]
    return max((solved[i] / tried[i] for i in tried if tried[i]), default=None)


def _plan_row(iteration: int, buffer: Buffer, plan: ReplayPlan, picked: Picks) -> Row:
    return {
        "iteration": iteration,
        "num_candidates": buffer.num_candidates,
        "num_eligible": picked.num_eligible,
        "num_picked": len(picked.picks),
        "share": plan.share,
        "priority_entropy": picked.priority_entropy,
        "waiting_reason": plan.reason_after(len(picked.picks)),
        "reasons_json": buffer.reasons_json(),
        "buffer_sha256": buffer.sha256(),
    }


def _pick_row(iteration: int, pick: Pick, facts: Row) -> Row:
    copied = (
        "entry_id", "rollout_id", "source_run_id", "prefix_tokens", "score_id", "scorer_version",
        "p_hat", "prompt_mean_reward",
    )  # fmt: skip
    return asdict(pick) | {"iteration": iteration} | {name: facts[name] for name in copied}
