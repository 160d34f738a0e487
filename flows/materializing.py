"""The replay buffer of a run as of any commit, under any judge, with each entry's factors."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flows.config import RunConfig
from flows.replaying import (
    ELIGIBLE,
    VIEW,
    Attempts,
    candidates_of,
    is_eligible,
    pick_rule,
    reasons_of,
)
from flows.translate import Row
from rrl_core.replay.factors import PriorityRule, base, log_freshness, log_priority, rarity
from storage import Store

SHOWN = (
    "unit", "entry_id", "prompt_id", "eligibility_reason", "value", "prompt_value", "p_hat", "base",
    "freshness", "rarity", "priority", "age", "num_uses", "scorer_version",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When a buffer is looked at, and by whose judgement (None: the newest healthy model then)."""

    as_of: int
    version: str | None


@dataclass
class Materialized:
    """The best entries of a buffer, best first, and how many there are of what kind and why."""

    moment: Moment
    best: list[Row] = field(default_factory=list)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)


def materialize(
    store: Store, run_id: str, config: RunConfig, moment: Moment, limit: int
) -> Materialized:
    """Return the `limit` eligible entries of the highest priority, holding no more than these."""
    found = Materialized(moment)
    rule = _rule(store, run_id, config, moment)
    heap: list[tuple[float, str, Row]] = []
    for batch in _batches(store, run_id, moment):
        found.reasons.update(reasons_of(batch))
        for row in _with_factors(batch.filter(is_eligible(batch)), rule):
            item = (row["log_priority"], row["entry_id"], row)
            (heapq.heappush if len(heap) < limit else heapq.heappushpop)(heap, item)
    found.best = [row for _, _, row in sorted(heap, reverse=True)]
    return found


def _batches(store: Store, run_id: str, moment: Moment) -> Iterator[pa.RecordBatch]:
    return store.batches(VIEW, {"run": run_id, "version": moment.version}, moment.as_of)


def _rule(store: Store, run_id: str, config: RunConfig, moment: Moment) -> PriorityRule:
    """Return how priorities are made; a curriculum needs another look at the buffer first."""
    attempts = Attempts()
    for batch in _batches(store, run_id, moment) if config.replay.curriculum else ():
        attempts.add(batch)
    return pick_rule(config, attempts.pass_rates()).priority


def _with_factors(batch: pa.RecordBatch, rule: PriorityRule) -> Iterator[Row]:
    """Yield the rows of a batch with the factors of their priorities."""
    candidates = candidates_of(batch)
    log_priority_N = log_priority(candidates, rule)
    factors = {
        "base": base(candidates, rule),
        "freshness": np.exp(log_freshness(candidates, rule)),
        "rarity": rarity(candidates),
        "log_priority": log_priority_N,
        "priority": np.exp(np.clip(log_priority_N, -700, 700)),
    }
    columns = {name: values.tolist() for name, values in factors.items()}
    for number, row in enumerate(batch.to_pylist()):
        own = {name: values[number] for name, values in columns.items()}
        yield row | {k: None if math.isnan(v) else v for k, v in own.items()}


@dataclass(frozen=True)
class Change:
    """An entry that another moment or judge sees differently; positive `rise` = worth more."""

    kind: str
    rise: float
    why: str
    before: Row | None
    after: Row | None


def compare_moments(
    store: Store, run_id: str, config: RunConfig, before: Moment, after: Moment
) -> list[Change]:
    """Return what of the buffer changed between two moments or judges, the largest changes first.

    Entries that are eligible at neither are left out; of the others the facts of both are held.
    """
    old: dict[str, Row] = {}
    rule = _rule(store, run_id, config, before)
    for batch in _batches(store, run_id, before):
        for row in _with_factors(batch.filter(is_eligible(batch)), rule):
            old[row["entry_key"]] = row
    changes, seen = [], set()
    keys = pa.array(list(old), pa.string())
    rule = _rule(store, run_id, config, after)
    for batch in _batches(store, run_id, after):
        is_known = pc.is_in(batch["entry_key"], value_set=keys)
        for row in _with_factors(batch.filter(pc.or_(is_eligible(batch), is_known)), rule):
            seen.add(row["entry_key"])
            changes.append(_change(old.get(row["entry_key"]), row))
    changes += [_change(row, None) for key, row in old.items() if key not in seen]
    kept = [c for c in changes if c.kind != "same"]
    return sorted(kept, key=lambda c: (-abs(c.rise), _id_of(c)))


def _change(before: Row | None, after: Row | None) -> Change:
    """Say what happened to an entry: entered, left, rose, fell, same."""
    is_in = after is not None and after["eligibility_reason"] == ELIGIBLE
    if before is None:
        assert after is not None
        return Change("entered", after["base"], "it may be picked now", None, after)
    if not is_in:
        why = "it is no candidate" if after is None else after["eligibility_reason"]
        return Change("left", -before["base"], why, before, after)
    assert after is not None
    rise = after["base"] - before["base"]
    kind = "rose" if rise > 0 else "fell" if rise < 0 else "same"
    return Change(kind, rise, _moved(before, after), before, after)


def _moved(before: Row, after: Row) -> str:
    """Name the facts that moved the base."""
    parts = [
        f"{name} {before[name]:.3f} to {after[name]:.3f}"
        for name in ("value", "prompt_value", "p_hat")
        if before[name] != after[name]
    ]
    counts = ("state_ok", "state_tries", "prompt_ok", "prompt_tries", "scorer_version")
    parts += [
        f"{name} {before[name]} to {after[name]}" for name in counts if before[name] != after[name]
    ]
    return ", ".join(parts)


def _id_of(change: Change) -> str:
    row = change.after or change.before
    assert row is not None
    return str(row["entry_id"])
