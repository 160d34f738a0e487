"""Judging history by today's standard: a value model is fitted, examined, and scores old states.

RRL's first step (arXiv 2504.14363): what is promising is decided by the value model of today. Its
features are the backbone's; its labels are outcomes, recent ones and those of replay above all.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flows.planned import TRAINED_ROLES
from flows.replaying import NO_MODEL, VIEW, candidates_of, pick_rule
from flows.states import CUT_ROLES, Features, state_rows
from flows.translate import Row, value_model_row, value_row
from flows.wiring import Session
from rrl_core.replay.outcomes import is_success
from rrl_core.replay.retention import retained
from rrl_core.value.features import backbone_digest
from rrl_core.value.health import Health, health
from rrl_core.value.model import ValueModel, example_weight, fit_value_model

_PLACES = (
    "entry_id", "prompt_id", "sampled_iteration", "prompt_state_id", "prompt_state_iteration",
)  # fmt: skip


@dataclass
class Examples:
    """What a value model learns from: one entry per outcome of a state, as columns."""

    features: list[Features] = field(default_factory=list)
    prompt_ids: list[str] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    prefix_tokens: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    signatures: list[str | None] = field(default_factory=list)
    is_examined: list[bool] = field(default_factory=list)
    """True for a cut response of the policy's own: what the model's health is measured on."""


def refit(session: Session, iteration: int) -> str:
    """Cut the newest responses into states, fit a value model, and commit it with its verdict."""
    read = partial(session.store.read, run_id=session.run_id, iteration=iteration)
    if models := read("value_models"):
        return str(models[0]["verdict"])
    _cut(session, iteration)
    started = time.monotonic()
    with session.progress.status(f"value model of iteration {iteration}"):
        examples = _examples(session, iteration)
        if not examples.features:  # nothing could be scored: the iterations say so themselves
            return "insufficient_data"
        features_ND = np.stack(examples.features)
        model = fit_value_model(
            features_ND,
            examples.prompt_ids,
            np.array(examples.targets),
            np.array(examples.weights),
            backbone_digest(session.policy),
            session.config.value.l2,
        )
        examined = _examined(model, features_ND, examples)
    artifact = session.store.artifacts.put(model.to_bytes(), "value_model")
    facts = {
        "iteration": iteration,
        "scorer_version": f"i{iteration}-{artifact.rpartition('-')[2][:12]}",
        "as_of": session.store.head().number,
        "artifact": artifact,
        "backbone_digest": model.backbone_digest,
        "mean_target": float(np.average(examples.targets, weights=examples.weights)),
        "fit_s": time.monotonic() - started,
    }
    row = value_model_row(facts, examined)
    session.writer.append({"value_models": [row]}, batch_key=f"i{iteration:06d}-refit")
    return examined.verdict


def rescore(session: Session, iteration: int) -> int:
    """Judge the states worth it by the model of `iteration`, and all their prompts."""
    read = partial(session.store.read, run_id=session.run_id, iteration=iteration)
    models = read("value_models")
    if not models:
        return 0
    [model_row] = models
    data = session.store.artifacts.get(model_row["artifact"])
    model = ValueModel.from_bytes(data, backbone_digest(session.policy))
    version = model_row["scorer_version"]
    rows: list[Row] = []
    with session.progress.status(f"judging history at iteration {iteration}"):
        for sampled, states in _retained_states(session, iteration).items():
            features = session.state_features.of_iteration(
                sampled, _cut_iteration(session, sampled)
            )
            values = model.predict(
                np.stack([features[state_id] for state_id, _ in states]),
                [prompt_id for _, prompt_id in states],
            )
            rows += [
                value_row(iteration, state_id, version, value)
                for (state_id, _), value in zip(states, values.tolist(), strict=True)
            ]
    session.writer.append({"scores": rows}, batch_key=f"i{iteration:06d}-values")
    return len(rows)


def _cut_iteration(session: Session, iteration: int) -> int:
    """Return the iteration that cuts the rollouts of `iteration`: the next one with a refit."""
    every = session.config.value.every
    assert every is not None
    return -(-iteration // every) * every


def _cut(session: Session, iteration: int) -> None:
    """Commit the states of every rollout since the last refit."""
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
    session.writer.append({"states": rows}, batch_key=f"i{iteration:06d}-states")


def _examples(session: Session, iteration: int) -> Examples:
    """Return the outcomes of the newest iterations, `value.fit_rollouts` rollouts or more."""
    sampler = session.config.sampler
    per_iteration = sampler.prompts * sampler.group_size
    num_iterations = -(-session.config.value.fit_rollouts // per_iteration)
    examples = Examples()
    for sampled in range(max(1, iteration - num_iterations + 1), iteration + 1):
        _add_outcomes(session, sampled, iteration, examples)
    return examples


def _add_outcomes(session: Session, sampled: int, iteration: int, examples: Examples) -> None:
    """Add every scored rollout of an iteration as an outcome of the states it went through."""
    run_id = session.lineage.run_of(sampled)
    read = partial(session.store.read, run_id=run_id, iteration=sampled)
    judge = (session.reward_scorer.name, session.reward_scorer.version)
    scores = {
        row["target_id"]: row
        for row in read("scores")
        if (row["scorer"], row["scorer_version"]) == judge and row["value"] is not None
    }
    features = session.state_features.of_iteration(sampled, _cut_iteration(session, sampled))
    states = _states_by_rollout(session, sampled)
    prompt_states = {
        state["prompt_id"]: state
        for found in states.values()
        for state in found
        if state["prefix_tokens"] == 0
    }
    for rollout in read("rollouts"):
        score = scores.get(rollout["event_id"])
        if rollout["role"] not in TRAINED_ROLES or score is None:
            continue
        age = iteration - rollout["policy_version"]
        if rollout["role"] in CUT_ROLES:
            own = [s for s in states.get(rollout["event_id"], []) if s["prefix_tokens"] > 0]
            passed = [*_some(prompt_states.get(rollout["prompt_id"])), *own]
        else:
            passed = session.store.read("states", event_ids=[rollout["parent_id"]])
        for state in passed:
            vector = features.get(state["event_id"])
            examples.features.append(
                session.state_features.of_state(state) if vector is None else vector
            )
            examples.prompt_ids.append(rollout["prompt_id"])
            examples.targets.append(float(is_success(score["value"])))
            examples.weights.append(example_weight(age, rollout["role"] != "attempt"))
            examples.prefix_tokens.append(state["prefix_tokens"])
            examples.ages.append(age)
            examples.signatures.append(score["signature"])
            is_own = rollout["role"] in CUT_ROLES and state["prefix_tokens"] > 0
            examples.is_examined.append(is_own)


def _some(state: Row | None) -> list[Row]:
    return [] if state is None else [state]


def _states_by_rollout(session: Session, sampled: int) -> dict[str, list[Row]]:
    cut_iteration = _cut_iteration(session, sampled)
    cutter = session.lineage.run_of(cut_iteration)
    found: dict[str, list[Row]] = {}
    for state in session.store.read("states", run_id=cutter, iteration=cut_iteration):
        found.setdefault(state["rollout_id"], []).append(state)
    return found


def _examined(model: ValueModel, features_ND: NDArray[np.float32], examples: Examples) -> Health:
    """Return the health of a model on outcomes its heads did not see."""
    kept = np.flatnonzero(np.array(examples.is_examined, dtype=bool))
    marked = list(zip(examples.prompt_ids, examples.signatures, examples.targets, strict=True))
    frequency = Counter((p, s) for p, s, target in marked if s is not None and target > 0)

    def column(values: list[Any]) -> list[Any]:
        return [values[row] for row in kept]

    prompt_ids = column(examples.prompt_ids)
    return health(
        model.predict(features_ND[kept], prompt_ids),
        column(examples.targets),
        prompt_ids,
        column(examples.prefix_tokens),
        column(examples.ages),
        [frequency.get((prompt_id, s)) for prompt_id, s, _ in (marked[row] for row in kept)],
    )


def _retained_states(session: Session, iteration: int) -> dict[int, list[tuple[str, str]]]:
    """Return (state id, prompt id) of what is judged, by the iteration that sampled it.

    These are the states that stay within the capacity by the standard of the model before, and the
    prompts they belong to. The buffer is read twice, and never held.
    """
    models = session.lineage.read(session.store, "value_models")[:-1]
    version = models[-1]["scorer_version"] if models else NO_MODEL
    priority = pick_rule(session.config).priority
    chunks = (candidates_of(batch) for batch in _state_batches(session, version))
    keys = pa.array(retained(chunks, session.config.replay.capacity, priority), pa.string())
    found: dict[int, dict[str, str]] = {}
    for batch in _state_batches(session, version):
        kept = batch.filter(pc.is_in(batch["entry_key"], value_set=keys))
        for row in kept.select(_PLACES).to_pylist():
            prompt_id = row["prompt_id"]
            found.setdefault(row["sampled_iteration"], {})[row["entry_id"]] = prompt_id
            by_prompt = found.setdefault(row["prompt_state_iteration"], {})
            by_prompt[row["prompt_state_id"]] = prompt_id
    return {sampled: list(found[sampled].items()) for sampled in sorted(found)}


def _state_batches(session: Session, version: str) -> Iterator[pa.RecordBatch]:
    arguments = {"run": session.run_id, "version": version}
    for batch in session.store.view_batches(VIEW, arguments):
        yield batch.filter(pc.equal(batch["unit"], "state"))
