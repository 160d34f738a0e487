"""A value model as a judge of history: responses are cut into states, and each state is judged.

Our choice:
1. A response that no stream has cut before is cut here; one that was keeps its states.
2. A prompt is judged with the first of its rollouts that the slice has left: the first state that
   is known of it, else a new one. Further states that other runs made of it go with their own.
3. A response without any cut gets the state of its prompt, which says that it was looked at.
4. What the backbone cannot read is unscorable, and that is its verdict: its states, or that of its
   prompt where there are none, are scored so. Such a state never stands for the prompt.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import storage
from flows.judging import Judged, Kind, ShardPlace, TargetKind
from flows.states import PROMPT_CUT, state_row
from flows.translate import Row, value_row
from flows.wiring import model_spec, stored_config
from rrl_core.policy.model import Policy, load_policy_model
from rrl_core.value.cuts import cut_points
from rrl_core.value.features import StateSequence, backbone_digest, state_features
from rrl_core.value.model import ValueModel
from storage import StorageError, Store
from storage.slices import ShardRows

MAX_CUTS = 4  # of a response that no stream cut before; in training `value.cuts` says it
MAX_TOKENS = {"cpu": 1_024, "cuda": 16_384}  # of a forward pass
OTHER_MODEL = "its token ids are not those of the base model"
NO_PROMPT = "the token ids of its prompt are not stored"
TOO_LONG = "its prompt fills the model's context"
STATE_TOO_LONG = "a state is longer than the model's context"


@dataclass(frozen=True)
class _Target:
    """A state to be judged; it is the prompt of `response` and `prefix_tokens` of its tokens."""

    state_id: str
    attempt: int
    response: Row
    prefix_tokens: int


class ValueJudge:
    """One version of a value model over the states of responses.

    Args:
        policy: its reference policy is the backbone the model was fitted to.
        model: the value model.
        version: the version it scores under.
        unfit_runs: those with another base model, whose token ids mean something else, and imports
            that name none.
        notices: what a reader of its scores should know.
    """

    name = "value"
    kind: Kind = "value"
    target_kind: TargetKind = "state"

    def __init__(
        self,
        policy: Policy,
        model: ValueModel,
        version: str,
        unfit_runs: tuple[str, ...] = (),
        notices: tuple[str, ...] = (),
    ) -> None:
        self.version = version
        self.unfit_runs = unfit_runs
        self.notices = notices
        self._policy = policy
        self._model = model

    def judge(self, shard: ShardRows, place: ShardPlace) -> Judged:
        """Cut what was not cut before, and return one score per state without one."""
        started = time.perf_counter()
        judged = Judged()
        unread = {r["event_id"]: reason for r in shard.rollouts if (reason := self._problem(r))}
        responses = [r for r in shard.rollouts if r["event_id"] not in unread]
        readable = [s for s in shard.states if s["rollout_id"] not in unread]
        self._give_up(shard, unread, place, judged)
        targets = list(self._targets(responses, readable, place, judged))
        values = self._values(targets)
        elapsed_ms = (time.perf_counter() - started) * 1e3 / max(1, len(targets))
        judged.scores += [
            self._score_row(place.iteration, target, value, elapsed_ms)
            for target, value in zip(targets, values, strict=True)
        ]
        return judged

    def _problem(self, response: Row) -> str | None:
        """Return why the backbone cannot read a response; None: it can."""
        vocabulary = int(self._policy.model.get_base_model().config.vocab_size)
        if max([*response["prompt_ids"], *response["completion_ids"]], default=0) >= vocabulary:
            return OTHER_MODEL
        if not len(response["prompt_ids"]):
            return NO_PROMPT
        fits = len(response["prompt_ids"]) <= self._policy.context_tokens
        return None if fits else TOO_LONG

    def _give_up(
        self, shard: ShardRows, unread: Mapping[str, str], place: ShardPlace, judged: Judged
    ) -> None:
        """Let verdicts on what cannot be read (a reason by rollout id) enter `judged`."""
        states: dict[str, list[Row]] = {}
        for state in shard.states:
            states.setdefault(state["rollout_id"], []).append(state)
        for response in shard.rollouts:
            rollout_id = response["event_id"]
            if rollout_id not in unread:
                continue
            judged.skipped[unread[rollout_id]] += 1
            own = states.get(rollout_id, [])
            if not own:
                row = state_row(place.iteration, response, response["completion_ids"], PROMPT_CUT)
                judged.states.append(row | {"run_id": place.run_id})
                own = [{"event_id": storage.event_id("states", judged.states[-1])}]
            judged.scores += [
                _unscorable_row(place.iteration, state, self.version, unread[rollout_id])
                for state in own
                if not state.get("is_judged")
            ]

    def _targets(
        self, responses: Sequence[Row], states: Sequence[Row], place: ShardPlace, judged: Judged
    ) -> Iterator[_Target]:
        """Yield the states to judge, those of a response together; new ones enter `judged`."""
        known: dict[str, list[Row]] = {}
        prompts: dict[str, list[Row]] = {}
        for state in states:
            known.setdefault(state["rollout_id"], []).append(state)
            if state["prefix_tokens"] == 0 and not state["is_unreadable"]:
                prompts.setdefault(state["prompt_id"], []).append(state)
        for response in responses:
            own = known.get(response["event_id"], [])
            of_prompt = prompts.get(response["prompt_id"], [])
            is_first = response["is_first_of_prompt"]
            # The first state of a prompt belongs to the first rollout, the others to their own; so
            # does the first where another run's state of the prompt was judged already.
            shared = [] if any(state["is_judged"] for state in of_prompt) else of_prompt[:1]
            wanted = [s for s in own if not s["is_judged"] and s not in shared]
            wanted += shared if is_first else []
            new = self._new_states(response, place, bool(own), is_first and not of_prompt)
            judged.states += new
            wanted += [row | {"event_id": storage.event_id("states", row)} for row in new]
            for state in wanted:
                prefix_tokens = state["prefix_tokens"]
                if self._is_within(response, prefix_tokens):
                    attempt = state.get("attempt", 0)
                    yield _Target(state["event_id"], attempt, response, prefix_tokens)
                else:
                    judged.skipped[STATE_TOO_LONG] += 1
                    row = _unscorable_row(place.iteration, state, self.version, STATE_TOO_LONG)
                    judged.scores.append(row)

    def _new_states(
        self, response: Row, place: ShardPlace, is_cut: bool, is_prompt_new: bool
    ) -> list[Row]:
        """Return the states of a response that was not cut before, or of its prompt alone."""
        ids = response["completion_ids"]
        cuts = []
        if not is_cut:
            found = cut_points(
                ids,
                self._policy.decode,
                MAX_CUTS,
                turn_token_ids=self._policy.eos_token_ids,
                bounds=response["sampled_bounds"],
            )
            cuts = [cut for cut in found if self._is_within(response, cut.prefix_tokens)]
        if is_prompt_new or not (is_cut or cuts):
            cuts = [PROMPT_CUT, *cuts]
        return [
            state_row(place.iteration, response, ids, cut) | {"run_id": place.run_id}
            for cut in cuts
        ]

    def _is_within(self, response: Row, prefix_tokens: int) -> bool:
        return len(response["prompt_ids"]) + prefix_tokens <= self._policy.context_tokens

    def _values(self, targets: Sequence[_Target]) -> list[float | None]:
        """Return V of each state; None where the backbone made no number of it."""
        prefixes: dict[str, list[int]] = {}
        responses: dict[str, Row] = {}
        for target in targets:  # those of a response stand together
            responses[target.response["event_id"]] = target.response
            prefixes.setdefault(target.response["event_id"], []).append(target.prefix_tokens)
        sequences = [
            StateSequence(
                tuple(responses[rollout_id]["prompt_ids"]),
                tuple(responses[rollout_id]["completion_ids"]),
                tuple(tokens),
            )
            for rollout_id, tokens in prefixes.items()
        ]
        budget = MAX_TOKENS[self._policy.device.type]
        features_SD = state_features(self._policy, sequences, budget)
        finite = np.flatnonzero(np.isfinite(features_SD).all(axis=1))
        prompt_ids = [targets[number].response["prompt_id"] for number in finite]
        values: list[float | None] = [None] * len(targets)
        predicted = self._model.predict(features_SD[finite], prompt_ids)
        for number, value in zip(finite, predicted, strict=True):
            values[number] = float(value)
        return values

    def _score_row(
        self, iteration: int, target: _Target, value: float | None, elapsed_ms: float
    ) -> Row:
        row = value_row(iteration, target.state_id, self.version, value)
        return row | {"attempt": target.attempt, "elapsed_ms": elapsed_ms}


def _unscorable_row(iteration: int, state: Row, version: str, reason: str) -> Row:
    """Return the `scores` row of a state that the backbone cannot read."""
    row = value_row(iteration, state["event_id"], version, None)
    verdict = {"status": "unscorable", "feedback": reason}
    return row | verdict | {"attempt": state.get("attempt", 0)}


def load_value_judge(store: Store, run_id: str | None, version: str | None) -> ValueJudge:
    """Load a value model and the backbone it was fitted to.

    Args:
        store: holds it.
        run_id: whose newest model is meant; None: the newest of all.
        version: that version instead of the newest.

    Raises:
        StorageError: there is no such model, or its artifact is missing.
        ValueModelError: its artifact is damaged, or the run's backbone is another by now.
    """
    row = _model_row(store, run_id, version)
    data = store.artifacts.get(row["artifact"])
    config = stored_config(store, _training_run(store, row["run_id"]) or run_id or row["run_id"])
    policy = load_policy_model(model_spec(config), seed=0)  # of an adapter that is never used
    model = ValueModel.from_bytes(data, backbone_digest(policy))
    notices: tuple[str, ...] = ()
    if row["verdict"] != "healthy":
        notices = (
            f"value model {row['scorer_version']} is {row['verdict']}: its scores are recorded, "
            "but the replay buffer judges by the success rates of prompts instead",
        )
    others = {
        published["run_id"]: None
        for published in store.read("policies")
        if published["base_digest"] != policy.base_digest
    }
    others |= {
        part["run_id"]: None
        for part in store.read("imports")
        if part["base_digest"] != policy.base_digest
    }
    return ValueJudge(policy, model, row["scorer_version"], tuple(others), notices)


def _model_row(store: Store, run_id: str | None, version: str | None) -> Row:
    rows = [row for row in store.read("value_models") if row["scorer"] == ValueJudge.name]
    if version is not None:
        found = [row for row in rows if row["scorer_version"] == version]
    else:
        found = [
            r for r in rows if run_id in (None, r["run_id"], _training_run(store, r["run_id"]))
        ]
    if not found:
        known = ", ".join(row["scorer_version"] for row in rows) or "none"
        whose = f" of {run_id}" if run_id is not None else ""
        wanted = "a value model" if version is None else f"value model {version!r}"
        raise StorageError(
            f"expected {wanted}{whose} in {store.path}, which has: {known}; "
            "train with `value.every` set, or fit one"
        )
    return found[-1]


def _training_run(store: Store, run_id: str) -> str | None:
    """Return the run whose configuration says what the backbone is: itself, or its parent."""
    opened = store.read("runs", run_id=run_id)[:1]
    if not opened or opened[0]["kind"] == "train":
        return run_id
    parent: str | None = opened[0]["parent_run_id"]
    return parent
