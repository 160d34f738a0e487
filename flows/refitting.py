"""Judging history by today's standard: a value model is fitted, examined, and scores old states.

RRL's first step (arXiv 2504.14363): what is promising is decided by the value model of today. Its
features are the backbone's; its labels are outcomes, recent ones and those of replay above all.
"""

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flows.config import RunConfig
from flows.dropping import DROP, drop_rows
from flows.lineage import Lineage
from flows.mining import imported_states
from flows.planned import TRAINED_ROLES, source_rollouts
from flows.replaying import NO_MODEL, VIEW, candidates_of, pick_rule
from flows.states import CUT_ROLES, Features, Outcome, StateFeatures, state_rows
from flows.translate import Row, value_model_row, value_row
from flows.wiring import Session
from rrl_core.policy.model import Policy
from rrl_core.replay.outcomes import is_success
from rrl_core.replay.retention import retained
from rrl_core.value.features import backbone_digest
from rrl_core.value.health import Health, health
from rrl_core.value.model import ValueModel, example_weight, fit_value_model
from storage import Store

_PLACES = (
    "entry_id", "prompt_id", "sampled_iteration", "prompt_state_id", "prompt_state_iteration",
)  # fmt: skip


class Judge(Protocol):
    """A named, versioned scorer."""

    @property
    def name(self) -> str:
        """Name it scores under."""

    @property
    def version(self) -> str:
        """Version it scores under."""


class History(Protocol):
    """What a value model is fitted on: a run's past, in training or long after."""

    store: Store
    config: RunConfig
    policy: Policy
    lineage: Lineage
    state_features: StateFeatures
    outcomes: dict[int, list[Outcome]]

    @property
    def reward_scorer(self) -> Judge:
        """Whose value is the reward."""


def refit(session: Session, iteration: int) -> str:
    """Cut the newest responses into states, fit a value model, and commit it with its verdict."""
    read = partial(session.store.read, run_id=session.run_id, iteration=iteration)
    if models := read("value_models"):
        return str(models[0]["verdict"])
    _cut(session, iteration)
    with session.progress.status(f"value model of iteration {iteration}"):
        row = fit(session, iteration)
    if row is None:  # nothing could be scored: the iterations say so themselves
        return "insufficient_data"
    session.writer.append({"value_models": [row]}, batch_key=f"i{iteration:06d}-refit")
    return str(row["verdict"])


def fit(history: History, iteration: int) -> Row | None:
    """Fit a value model on the history up to `iteration` and store it; return its row.

    None where there is no outcome to learn from.
    """
    started = time.monotonic()
    outcomes = _recent_outcomes(history, iteration)
    if not outcomes:
        return None
    targets = np.array([o.target for o in outcomes])
    ages = [iteration - o.policy_version for o in outcomes]
    weights = np.array(
        [example_weight(a, o.is_replayed) for a, o in zip(ages, outcomes, strict=True)]
    )
    model = fit_value_model(
        np.stack([o.feature_D for o in outcomes]),
        [o.prompt_id for o in outcomes],
        targets,
        weights,
        backbone_digest(history.policy),
        history.config.value.l2,
    )
    artifact = history.store.artifacts.put(model.to_bytes(), "value_model")
    facts = {
        "iteration": iteration,
        "scorer_version": f"i{iteration}-{artifact.rpartition('-')[2][:12]}",
        "as_of": history.store.head().number,
        "artifact": artifact,
        "backbone_digest": model.backbone_digest,
        "mean_target": float(np.average(targets, weights=weights)),
    }
    row = value_model_row(facts, _examined(model, outcomes, iteration))
    return row | {"fit_s": time.monotonic() - started}


def rescore(session: Session, iteration: int) -> int:
    """Judge the states worth it by the model of `iteration`, and all their prompts."""
    read = partial(session.store.read, run_id=session.run_id, iteration=iteration)
    models = read("value_models")
    if not models or any(row["kind"] == "value" for row in read("scores")):
        return 0
    [model_row] = models
    data = session.store.artifacts.get(model_row["artifact"])
    model = ValueModel.from_bytes(data, backbone_digest(session.policy))
    version = model_row["scorer_version"]
    rows: list[Row] = []
    with session.progress.status(f"judging history at iteration {iteration}"):
        for sampled, states in _retained_states(session, iteration).items():
            features = session.state_features.of_states(sampled, [i for i, _ in states])
            values = model.predict(np.stack(features), [prompt_id for _, prompt_id in states])
            rows += [
                value_row(iteration, state_id, version, value)
                for (state_id, _), value in zip(states, values.tolist(), strict=True)
            ]
    session.writer.append({"scores": rows}, batch_key=f"i{iteration:06d}-values")
    return len(rows)


def _cut(session: Session, iteration: int) -> None:
    """Commit the states of all rollouts since the last refit, of lost successes, of imports."""
    every = session.config.value.every
    assert every is not None
    rows: list[Row] = []
    for sampled in range(max(1, iteration - every + 1), iteration + 1):
        run_id = session.lineage.run_of(sampled)
        read = partial(session.store.read, run_id=run_id, iteration=sampled)
        tokens = {row["rollout_id"]: row for row in read("rollout_tokens")}
        rollouts = [row for row in read("rollouts") if row["status"] == "ok"]
        cuts = session.config.value.cuts
        rows += state_rows(session.policy, iteration, rollouts, tokens, cuts)
    if "state" in session.config.replay.units:
        rows += drop_rows(session, iteration)
        rows += imported_states(session, iteration)
    session.writer.append({"states": rows}, batch_key=f"i{iteration:06d}-states")


def recent_iterations(config: RunConfig, newest: int) -> range:
    """Return the newest iterations that hold `value.fit_rollouts` rollouts or more."""
    per_iteration = config.sampler.prompts * config.sampler.group_size
    num_iterations = -(-config.value.fit_rollouts // per_iteration)
    return range(max(1, newest - num_iterations + 1), newest + 1)


def _recent_outcomes(history: History, iteration: int) -> list[Outcome]:
    """Return the outcomes of the newest iterations, `value.fit_rollouts` rollouts or more.

    Those of an iteration are gathered once, and kept while they are recent.
    """
    recent = recent_iterations(history.config, iteration)
    kept = {i: history.outcomes[i] for i in recent if i in history.outcomes}
    history.outcomes = {i: kept.get(i) or _outcomes(history, i) for i in recent}
    return [outcome for found in history.outcomes.values() for outcome in found]


def _outcomes(history: History, sampled: int) -> list[Outcome]:
    """Return every scored rollout of an iteration as an outcome of the states it went through."""
    run_id = history.lineage.run_of(sampled)
    read = partial(history.store.read, run_id=run_id, iteration=sampled)
    judge = (history.reward_scorer.name, history.reward_scorer.version)
    scores = {
        row["target_id"]: row
        for row in read("scores")
        if (row["scorer"], row["scorer_version"]) == judge and row["value"] is not None
    }
    features = history.state_features.of_iteration(sampled)
    own = _states_by_rollout(history, sampled)
    given = _given_states(history, read("picks"))
    prompt_states = {  # of this iteration: a refit cuts several together
        state["prompt_id"]: state
        for found in own.values()
        for state in found
        if _is_prompt(state) and state["event_id"] in features
    }
    outcomes = []
    for rollout in read("rollouts"):
        score = scores.get(rollout["event_id"])
        if rollout["role"] not in TRAINED_ROLES or score is None:
            continue
        if rollout["role"] in CUT_ROLES:
            cuts = [s for s in own.get(rollout["event_id"], []) if not _is_prompt(s)]
            start = prompt_states.get(rollout["prompt_id"])
            passed = [(s, features[s["event_id"]]) for s in ([start] if start else []) + cuts]
        else:
            passed = [given[rollout["parent_id"]]]
        outcomes += [_outcome(rollout, score, state, feature_D) for state, feature_D in passed]
    return outcomes


def _outcome(rollout: Row, score: Row, state: Row, feature_D: Features) -> Outcome:
    return Outcome(
        feature_D=feature_D,
        prompt_id=rollout["prompt_id"],
        target=float(is_success(score["value"])),
        policy_version=rollout["policy_version"],
        is_replayed=rollout["role"] != "attempt",
        prefix_tokens=state["prefix_tokens"],
        signature=score["signature"],
        is_examined=rollout["role"] in CUT_ROLES and not _is_prompt(state),
    )


def _is_prompt(state: Row) -> bool:
    return bool(state["prefix_tokens"] == 0)


def _given_states(history: History, picks: list[Row]) -> dict[str, tuple[Row, Features]]:
    """Return the states that an iteration continued, with their features, by state id."""
    picks = [pick for pick in picks if pick["unit"] == "state"]
    if not picks:
        return {}
    sources = source_rollouts(history.store, picks)
    found = {}
    for state in history.store.read("states", event_ids=[pick["entry_id"] for pick in picks]):
        sampled = sources[state["rollout_id"]]["iteration"]
        [feature_D] = history.state_features.of_states(sampled, [state["event_id"]])
        found[state["event_id"]] = (state, feature_D)
    return found


def _states_by_rollout(history: History, sampled: int) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for state in history.state_features.states_of(sampled):
        found.setdefault(state["rollout_id"], []).append(state)
    return found


def _examined(model: ValueModel, outcomes: list[Outcome], iteration: int) -> Health:
    """Return the health of a model on outcomes its heads did not see."""
    solutions = Counter((o.prompt_id, o.signature) for o in outcomes if o.target > 0)
    examined = [o for o in outcomes if o.is_examined]
    width = model.weights_KD.shape[1]
    features_ND = np.array([o.feature_D for o in examined], dtype=np.float32).reshape(-1, width)
    prompt_ids = [o.prompt_id for o in examined]
    return health(
        model.predict(features_ND, prompt_ids),
        [o.target for o in examined],
        prompt_ids,
        [o.prefix_tokens for o in examined],
        [iteration - o.policy_version for o in examined],
        [None if o.signature is None else solutions[o.prompt_id, o.signature] for o in examined],
    )


def _retained_states(session: Session, iteration: int) -> dict[int, list[tuple[str, str]]]:
    """Return (state id, prompt id) of what is judged, by the iteration that sampled it.

    These are the states that stay within the capacity by the standard of the model before, and the
    prompts they belong to. The buffer is read twice, and never held.
    """
    models = session.lineage.read(session.store, "value_models")[:-1]
    version = models[-1]["scorer_version"] if models else NO_MODEL
    priority = pick_rule(session.config).priority
    before = models[-1]["iteration"] if models else 0
    of_refit = session.store.read("states", run_id=session.run_id, iteration=iteration)
    imports = session.config.replay.imports
    late = pa.array(
        [s["event_id"] for s in of_refit if s["cut"] == DROP or s["source_run_id"] in imports],
        pa.string(),
    )
    batches = partial(_state_batches, session, version, before, late)
    chunks = (candidates_of(batch) for batch in batches())
    keys = pa.array(retained(chunks, session.config.replay.capacity, priority), pa.string())
    found: dict[int, dict[str, str]] = {}
    for batch in batches():
        kept = batch.filter(pc.is_in(batch["entry_key"], value_set=keys))
        for row in kept.select(_PLACES).to_pylist():
            prompt_id = row["prompt_id"]
            found.setdefault(row["sampled_iteration"], {})[row["entry_id"]] = prompt_id
            by_prompt = found.setdefault(row["prompt_state_iteration"], {})
            by_prompt[row["prompt_state_id"]] = prompt_id
    return {sampled: sorted(found[sampled].items()) for sampled in sorted(found)}


def _state_batches(
    session: Session, version: str, before: int, late: pa.Array
) -> Iterator[pa.RecordBatch]:
    """Yield the states of the run but those that an earlier refit left out for their worth.

    `before` is the iteration of the model before: what it could judge and did not was left out,
    but for the states `late`, which were cut out of older rollouts, or imported ones, since.
    """
    arguments = {"run": session.run_id, "version": version}
    for batch in session.store.batches(VIEW, arguments):
        is_late = pc.is_in(batch["entry_id"], value_set=late)
        is_new = pc.or_(pc.greater(batch["sampled_iteration"], before), is_late)
        is_kept = pc.or_(is_new, pc.is_valid(batch["raw_value"]))
        yield batch.filter(pc.and_(pc.equal(batch["unit"], "state"), is_kept))
