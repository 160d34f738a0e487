"""The replay buffer of a run as of any commit, under any judge, with each entry's factors."""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flows.config import RunConfig
from flows.replaying import (
    BEYOND_CAPACITY,
    ELIGIBLE,
    VIEW,
    Buffer,
    Pin,
    candidates_of,
    pick_rule,
    read_buffer,
)
from flows.translate import Row
from rrl_core.replay.factors import PriorityRule, base, log_freshness, log_priority, rarity
from storage import Store

_CHUNK_ROWS = 4_096
SHOWN = (
    "unit", "entry_id", "prompt_id", "eligibility_reason", "value", "prompt_value", "p_hat", "base",
    "freshness", "rarity", "curriculum", "priority", "age", "num_uses", "scorer_version",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When a buffer is looked at, and by whose judgement."""

    as_of: int
    version: str


@dataclass
class Materialized:
    """The best entries of a buffer, best first, and how many there are of what kind and why."""

    moment: Moment
    best: list[Row]
    reasons: Counter[tuple[str, str]]


def materialize(
    store: Store, run_id: str, config: RunConfig, moment: Moment, limit: int
) -> Materialized:
    """Return the `limit` entries of the highest priority that an iteration could pick then.

    What lies beyond `replay.capacity` is counted as such, as in `replay_plans`.
    """
    buffer, rows = _buffer(store, run_id, config, moment)
    best = heapq.nlargest(limit, rows, key=lambda row: (row["log_priority"], row["entry_id"]))
    return Materialized(moment, best, buffer.reasons)


def _buffer(
    store: Store, run_id: str, config: RunConfig, moment: Moment
) -> tuple[Buffer, Iterator[Row]]:
    """Return the buffer at a moment, and the rows that may be picked with their factors."""
    buffer = read_buffer(store, run_id, Pin(moment.as_of, moment.version), config)
    rule = pick_rule(config, buffer.pass_rates).priority
    batches = buffer.eligible.to_batches(max_chunksize=_CHUNK_ROWS)
    return buffer, (row for batch in batches for row in _with_factors(batch, rule))


def _with_factors(batch: pa.RecordBatch, rule: PriorityRule) -> Iterator[Row]:
    """Yield the rows of a batch with the factors of their priorities."""
    candidates = candidates_of(batch)
    log_priority_N = log_priority(candidates, rule)
    weights = rule.curriculum or {}
    factors = {
        "base": base(candidates, rule),
        "freshness": np.exp(log_freshness(candidates, rule)),
        "rarity": rarity(candidates),
        "curriculum": np.array([weights.get(bucket, 1.0) for bucket in candidates.difficulty]),
        "log_priority": log_priority_N,
        "priority": np.exp(np.clip(log_priority_N, -700, 700)),
    }
    columns = {name: values.tolist() for name, values in factors.items()}
    for number, row in enumerate(batch.to_pylist()):
        own = {name: values[number] for name, values in columns.items()}
        yield row | {k: None if math.isnan(v) else v for k, v in own.items()}


@dataclass(frozen=True)
class Change:
    """An entry that another moment or judge sees differently; `rise` is that of its priority."""

    kind: str
    rise: float
    why: str
    before: Row | None
    after: Row | None


def compare_moments(
    store: Store, run_id: str, config: RunConfig, before: Moment, after: Moment
) -> list[Change]:
    """Return what of the buffer changed between two moments or judges, the largest changes first.

    Entries that could be picked at neither are left out; of the others the facts of both are held.
    """
    old, new = (
        {row["entry_key"]: row for row in _buffer(store, run_id, config, moment)[1]}
        for moment in (before, after)
    )
    was = _reasons(store, run_id, before, new.keys() - old.keys())
    now = _reasons(store, run_id, after, old.keys() - new.keys())
    kept = [change for key in old.keys() & new.keys() if (change := _moved(old[key], new[key]))]
    kept += [
        Change("entered", new[key]["priority"], f"{why} before", None, new[key])
        for key, why in was.items()
    ]
    kept += [
        Change("left", -old[key]["priority"], f"{why} now", old[key], None)
        for key, why in now.items()
    ]
    return sorted(kept, key=lambda c: (-abs(c.rise), _id_of(c)))


def _reasons(store: Store, run_id: str, moment: Moment, keys: Collection[str]) -> dict[str, str]:
    """Return why each of the entries `keys` may not be picked at a moment."""
    reasons = dict.fromkeys(keys, "no candidate")
    wanted = pa.array(list(keys), pa.string())
    arguments = {"run": run_id, "version": moment.version}
    for batch in store.batches(VIEW, arguments, moment.as_of) if keys else ():
        found = batch.filter(pc.is_in(batch["entry_key"], value_set=wanted))
        for row in found.select(["entry_key", "eligibility_reason"]).to_pylist():
            reason = row["eligibility_reason"]
            reasons[row["entry_key"]] = BEYOND_CAPACITY if reason == ELIGIBLE else reason
    return reasons


def _moved(before: Row, after: Row) -> Change | None:
    """Say how the priority of an entry that may be picked at both moments moved, if it did."""
    rise = after["priority"] - before["priority"]
    if rise == 0:
        return None
    parts = [
        f"{name} {before[name]:.3f} to {after[name]:.3f}"
        for name in ("value", "prompt_value", "p_hat", "freshness", "rarity", "curriculum")
        if before[name] != after[name]
    ]
    counts = (
        "is_ever_solved", "state_ok", "state_tries", "prompt_ok", "prompt_tries", "scorer_version",
    )  # fmt: skip
    parts += [
        f"{name} {before[name]} to {after[name]}" for name in counts if before[name] != after[name]
    ]
    return Change("rose" if rise > 0 else "fell", rise, ", ".join(parts), before, after)


def _id_of(change: Change) -> str:
    row = change.after or change.before
    assert row is not None
    return str(row["entry_id"])
