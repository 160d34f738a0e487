"""States of rollouts: where responses are cut, and what the backbone makes of the pieces."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flows.lineage import Lineage
from flows.planned import tokens_of
from flows.translate import Row
from rrl_core.policy.model import Policy
from rrl_core.value.cuts import Cut, cut_points, prefix_sha256
from rrl_core.value.features import StateSequence, state_features
from storage import Store

CUT_ROLES = ("attempt", "retry")  # whose responses begin at the prompt
PROMPT_CUT = Cut(0, "prompt")
_MAX_CACHED_STATES = 65_536

Features = NDArray[np.float32]


def state_rows(
    policy: Policy,
    iteration: int,
    rollouts: Sequence[Row],
    tokens: Mapping[str, Row],
    max_cuts: int,
    roles: Sequence[str] = CUT_ROLES,
) -> list[Row]:
    """Return the `states` rows of rollouts: each prompt once, then the cuts of every response.

    Args:
        policy: whose tokenizer reads the responses.
        iteration: of the stream that cuts.
        rollouts: rows of `rollouts`; those that do not begin at a prompt, or hold no token ids, are
            left out.
        tokens: their `rollout_tokens` rows, by rollout id.
        max_cuts: most cuts of a response.
        roles: whose responses are cut.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    for rollout in rollouts:
        held = tokens.get(rollout["event_id"])
        if rollout["role"] not in roles or held is None or not held["completion_ids"]:
            continue
        ids = held["completion_ids"]
        cuts = cut_points(
            ids,
            policy.decode,
            max_cuts,
            turn_token_ids=policy.eos_token_ids,
            bounds=held["sampled_bounds"],
        )
        if rollout["prompt_id"] not in seen:
            cuts = [PROMPT_CUT, *cuts]
            seen.add(rollout["prompt_id"])
        rows += [state_row(iteration, rollout, ids, cut) for cut in cuts]
    return rows


def state_row(iteration: int, rollout: Row, ids: Sequence[int], cut: Cut) -> Row:
    """Return the `states` row of one cut of a rollout with the completion `ids`."""
    return {
        "iteration": iteration,
        "rollout_id": rollout["event_id"],
        "prefix_tokens": cut.prefix_tokens,
        "source_run_id": rollout["run_id"],
        "prompt_id": rollout["prompt_id"],
        "prefix_sha256": prefix_sha256(ids[: cut.prefix_tokens])[:32],
        "cut": cut.cut,
    }


def features_of(
    policy: Policy, states: Sequence[Row], tokens: Mapping[str, Row], max_tokens: int
) -> Features:
    """Return the features [S, D] of states, in their order.

    Args:
        policy: its reference policy makes the features.
        states: rows of `states`; the states of a response stand together.
        tokens: `rollout_tokens` rows of their rollouts, by rollout id.
        max_tokens: budget of a forward pass.
    """
    prefixes: dict[str, list[int]] = {}
    for state in states:
        prefixes.setdefault(state["rollout_id"], []).append(state["prefix_tokens"])
    sequences = [
        StateSequence(
            tuple(tokens[rollout_id]["prompt_ids"]),
            tuple(tokens[rollout_id]["completion_ids"]),
            tuple(cuts),
        )
        for rollout_id, cuts in prefixes.items()
    ]
    return state_features(policy, sequences, max_tokens)


@dataclass(frozen=True)
class Outcome:
    """How a response ended that went through a state: what a value model learns from."""

    feature_D: Features
    prompt_id: str
    target: float
    policy_version: int
    is_replayed: bool
    prefix_tokens: int
    signature: str | None
    is_examined: bool
    """True for a cut response of the policy's own: what the model's health is measured on."""


def cut_iteration(every: int, iteration: int) -> int:
    """Return the iteration that cuts the rollouts of `iteration`: the next one with a refit."""
    return -(-iteration // every) * every


def states_in_training(
    store: Store, lineage: Lineage, every: int | None
) -> Callable[[int], list[Row]]:
    """Return how the states of an iteration are found: a refit cuts those since the one before."""

    def states_of(iteration: int) -> list[Row]:
        cut_in = cut_iteration(every or 1, iteration)
        return store.read("states", run_id=lineage.run_of(cut_in), iteration=cut_in)

    return states_of


class StateFeatures:
    """Features of a run's states by id, made group by group.

    `states_of` returns the states of an iteration's rollouts, maybe with those of others. A group's
    features do not depend on what else is asked for, to the last bit, so a resumed run fits the
    same value model. The states that were asked for longest ago are forgotten; those few that were
    made by themselves stay.
    """

    def __init__(
        self,
        store: Store,
        lineage: Lineage,
        policy: Policy,
        max_tokens: int,
        states_of: Callable[[int], list[Row]],
    ) -> None:
        self.states_of = states_of
        self._store = store
        self._lineage = lineage
        self._policy = policy
        self._max_tokens = max_tokens
        self._cached: OrderedDict[int, dict[str, Features]] = OrderedDict()
        self._alone: dict[str, Features] = {}

    def of_iteration(self, iteration: int) -> dict[str, Features]:
        """Return the features of the states of an iteration's rollouts, by state id."""
        if iteration not in self._cached:
            self._cached[iteration] = self._made(iteration)
        self._cached.move_to_end(iteration)
        while sum(map(len, self._cached.values())) > _MAX_CACHED_STATES and len(self._cached) > 1:
            self._cached.popitem(last=False)
        return self._cached[iteration]

    def of_states(self, iteration: int, state_ids: Sequence[str]) -> list[Features]:
        """Return the features [D] of states by id, of rollouts of `iteration`.

        Those that were cut later, or by another stream, are each made by themselves.
        """
        known = self.of_iteration(iteration)
        missing = [i for i in state_ids if i not in known and i not in self._alone]
        for state in self._store.read("states", event_ids=missing) if missing else []:
            self._alone[state["event_id"]] = self._made_alone(state)
        return [known[i] if i in known else self._alone[i] for i in state_ids]

    def _made_alone(self, state: Row) -> Features:
        rollouts = self._store.read("rollouts", event_ids=[state["rollout_id"]])
        tokens = tokens_of(self._store, rollouts)
        feature_D: Features = features_of(self._policy, [state], tokens, self._max_tokens)[0]
        return feature_D

    def _made(self, iteration: int) -> dict[str, Features]:
        run_id = self._lineage.run_of(iteration)
        read = partial(self._store.read, run_id=run_id, iteration=iteration)
        tokens = {row["rollout_id"]: row for row in read("rollout_tokens")}
        group_of = {row["event_id"]: row["group_id"] for row in read("rollouts")}
        groups: dict[str, list[Row]] = {}
        for state in self.states_of(iteration):
            if state["rollout_id"] in group_of:
                groups.setdefault(group_of[state["rollout_id"]], []).append(state)
        found: dict[str, Features] = {}
        for states in groups.values():
            features_SD = features_of(self._policy, states, tokens, self._max_tokens)
            found |= {s["event_id"]: f for s, f in zip(states, features_SD, strict=True)}
        return found


def cut_before(
    store: Store, lineage: Lineage, iteration: int, column: str, values: Sequence[str]
) -> set[str]:
    """Return the rollouts that a history's earlier refits cut into states with such a `column`."""
    wanted, found = pa.array(values, pa.string()), set[str]()
    for batch in store.batches("states"):
        cut = batch.filter(pc.is_in(batch[column], wanted))
        found |= {
            row["rollout_id"]
            for row in cut.select(["rollout_id", "run_id", "iteration"]).to_pylist()
            if row["iteration"] < iteration and lineage.run_of(row["iteration"]) == row["run_id"]
        }
    return found
