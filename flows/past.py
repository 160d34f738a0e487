"""A value model fitted on a run from outside: whether it trains now, or ended long ago.

It is written into a stream of its own, `refit-<run>-<number>`, and changes nothing in the run: a
training run judges by the models of its own history.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import storage
from flows.config import RunConfig
from flows.lineage import Lineage, lineage_of
from flows.machine import code_version, package_versions
from flows.progress import Progress
from flows.refitting import fit, recent_iterations
from flows.states import CUT_ROLES, Outcome, StateFeatures, state_rows
from flows.translate import Row
from flows.wiring import model_spec, stored_config
from rrl_core.policy.model import Policy, load_policy_model
from rrl_core.seeds import derive_seed
from storage import Store, StreamWriter


@dataclass(frozen=True)
class JudgeName:
    """A scorer by name and version."""

    name: str
    version: str


@dataclass
class PastRun:
    """A run's past as `refitting.fit` wants it."""

    store: Store
    config: RunConfig
    policy: Policy
    lineage: Lineage
    reward_scorer: JudgeName
    state_features: StateFeatures = field(init=False)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)


def refit_history(store: Store, run_id: str, progress: Progress) -> Row:
    """Fit and examine a value model on all that a run did so far; return its `value_models` row.

    Raises:
        StorageError: there is no such run, or nothing of it was scored yet.
        DamagedError: a segment it reads was changed.
    """
    storage.require_whole(store)
    config = stored_config(store, run_id)
    lineage = lineage_of(store, run_id)
    pins = store.read("views_pinned", run_id=run_id)
    newest = max((row["iteration"] for row in pins), default=0)
    if newest < 1:
        raise storage.StorageError(
            f"run {run_id} has not sampled anything yet: let it train for an iteration first"
        )
    with progress.status(f"loading {config.model.name}"):
        policy = load_policy_model(model_spec(config), seed=derive_seed(config.run.seed, "adapter"))
    judge = JudgeName(*next(iter(json.loads(pins[-1]["scorer_versions_json"]).items())))
    stream = f"refit-{run_id}-{_num_refits(store, run_id) + 1}"
    past = PastRun(store, config, policy, lineage, judge)
    with storage.hold_run(store, stream):
        opened = _opened(config, run_id, newest)
        writer = store.open_stream(stream, opened)
        ended = opened | {"run_epoch": writer.epoch, "what": "finished"}
        try:
            with progress.status(f"value model of {run_id}"):
                row = _fitted(past, writer, newest)
        except BaseException as error:
            reason = {"what": "failed", "reason": f"{type(error).__name__}: {error}"[:2000]}
            with suppress(storage.StorageError, OSError):  # the first error is the one to show
                writer.append({"runs": [ended | reason]}, batch_key="failed")
            raise
        row |= {"scorer_version": f"{stream}-{row['scorer_version']}"}
        written = writer.append({"value_models": [row], "runs": [ended]}, batch_key="refit")
    return dict(written.rows["value_models"][0])


def _fitted(past: PastRun, writer: StreamWriter, newest: int) -> Row:
    """Cut what no stream cut before, fit, and return the row of the model."""
    store, lineage, config = past.store, past.lineage, past.config
    states = _known_states(store, lineage, recent_iterations(config, newest))
    new = _missing_states(past, newest, states)
    for state in writer.append({"states": new}, batch_key="states").rows["states"]:
        states.setdefault(state["rollout_id"], []).append(state)
    past.state_features = StateFeatures(
        store, lineage, past.policy, config.learner.micro_batch_tokens,
        _by_iteration(store, lineage, states),
    )  # fmt: skip
    row = fit(past, newest)
    if row is None:
        raise storage.StorageError(
            "nothing of the run has a reward: there is nothing to learn from"
        )
    return row


def _num_refits(store: Store, run_id: str) -> int:
    streams = {row["run_id"] for row in store.read("runs") if row["kind"] == "refit"}
    return sum(stream.startswith(f"refit-{run_id}-") for stream in streams)


def _opened(config: RunConfig, run_id: str, newest: int) -> Row:
    return {
        "kind": "refit",
        "parent_run_id": run_id,
        "parent_iteration": newest,
        "config_json": json.dumps({"run_id": run_id, "iteration": newest}),
        "seed_root": config.run.seed,
        "planned_iterations": newest,
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions(), sort_keys=True),
    }


def _known_states(
    store: Store, lineage: Lineage, iterations: Iterable[int]
) -> dict[str, list[Row]]:
    """Return the states that any stream cut of the iterations' rollouts, by rollout id.

    Of several streams that cut a rollout the first counts.
    """
    wanted = {
        row["event_id"]
        for iteration in iterations
        for row in store.read("rollouts", run_id=lineage.run_of(iteration), iteration=iteration)
    }
    ids = pa.array(sorted(wanted), pa.string())
    found: dict[str, list[Row]] = {}
    for batch in store.batches("states"):
        for row in batch.filter(pc.is_in(batch["rollout_id"], value_set=ids)).to_pylist():
            held = found.setdefault(row["rollout_id"], [])
            if not held or held[0]["run_id"] == row["run_id"]:
                held.append(row)
    return found


def _missing_states(past: PastRun, newest: int, known: dict[str, list[Row]]) -> list[Row]:
    """Return the states of the recent rollouts that no stream has cut."""
    rows: list[Row] = []
    for iteration in recent_iterations(past.config, newest):
        read = partial(past.store.read, run_id=past.lineage.run_of(iteration), iteration=iteration)
        rollouts = [
            row
            for row in read("rollouts")
            if row["role"] in CUT_ROLES and row["status"] == "ok" and row["event_id"] not in known
        ]
        if rollouts:
            by_rollout = {row["rollout_id"]: row for row in read("rollout_tokens")}
            cuts = past.config.value.cuts
            rows += state_rows(past.policy, newest, rollouts, by_rollout, cuts)
    return rows


def _by_iteration(store: Store, lineage: Lineage, states: dict[str, list[Row]]) -> Any:
    def states_of(iteration: int) -> list[Row]:
        rows = store.read("rollouts", run_id=lineage.run_of(iteration), iteration=iteration)
        return [state for row in rows for state in states.get(row["event_id"], [])]

    return states_of
