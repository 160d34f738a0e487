"""Rows of what replay is about: states, value models, picks; and a run that appends them."""

from hashlib import sha256
from typing import Any

import storage
from tests.storage.rows import (
    OPENED,
    Row,
    pin,
    planned,
    prompt,
    rollout,
    score,
    tokens,
    update,
)


def state(rollout_id: str, prefix_tokens: int, iteration: int = 1, **facts: Any) -> Row:
    """A state of prompt p1; states of one rollout differ, its prompt state is that of any other."""
    of = f"{rollout_id} {prefix_tokens}" if prefix_tokens else ""
    return {
        "iteration": iteration,
        "rollout_id": rollout_id,
        "prefix_tokens": prefix_tokens,
        "source_run_id": "r1",
        "prompt_id": "p1",
        "prefix_sha256": sha256(of.encode()).hexdigest(),
        "cut": "line" if prefix_tokens else "prompt",
    } | facts


def value(state_id: str, value_: float | None, version: str, iteration: int = 1) -> Row:
    return score(
        state_id,
        value_,
        iteration,
        target_kind="state",
        kind="value",
        scorer="value",
        scorer_version=version,
    )


def model(version: str, iteration: int, verdict: str = "healthy") -> Row:
    return {
        "iteration": iteration,
        "scorer": "value",
        "scorer_version": version,
        "as_of": 0,
        "artifact": "heads",
        "backbone_digest": "b0",
        "num_states": 4,
        "num_prompts": 2,
        "num_mixed_prompts": 1,
        "mean_target": 0.25,
        "verdict": verdict,
        "metrics_json": "{}",
        "fit_s": 0.5,
    }


def pick(unit: str, entry_id: str, iteration: int, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "unit": unit,
        "entry_id": entry_id,
        "position": 0,
        "prompt_id": "p1",
        "prefix_tokens": 0,
        "value": 0.5,
        "prompt_value": 0.25,
        "p_hat": 0.25,
        "base": 0.25,
        "freshness": 1.0,
        "rarity": 1.0,
        "priority": 2.0,
        "probability": 0.125,
        "gumbel_key": 1.0,
        "pick_kind": "prioritised",
        "age": 0,
    } | facts


def policy(version: int) -> Row:
    return {
        "policy_version": version,
        "iteration": version,
        "base_digest": "b0",
        "adapter_digest": f"a{version}",
        "policy_digest": f"d{version}",
        "adapter_artifact": "a",
    }


class Run:
    """A stream of a store that appends one thing after the other; every method is one commit."""

    def __init__(
        self, store: storage.Store, run_id: str = "r1", kind: str | None = None, **facts: Any
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.writer = store.open_stream(run_id, OPENED | {"kind": kind} | facts)
        self._num_appends = 0
        self._num_samples: dict[tuple[int, str, str], int] = {}

    def append(self, **tables: list[Row]) -> list[str]:
        """Append rows, and return the event ids of the last table's."""
        self._num_appends += 1
        self.writer.append(tables, f"a{self._num_appends}")
        name, rows = list(tables.items())[-1]
        return [self.writer.event_id_of(name, row) for row in rows]

    def pin(self, iteration: int) -> None:
        self.append(views_pinned=[pin(iteration)])

    def prompt(self, prompt_id: str = "p1", difficulty: str = "easy") -> None:
        self.append(prompts=[prompt(prompt_id) | {"difficulty": difficulty}])

    def sample(
        self,
        rewards: list[float | None],
        prompt_id: str = "p1",
        iteration: int = 1,
        *,
        signature: str | None = None,
        with_tokens: bool = True,
        **facts: Any,
    ) -> list[str]:
        """One rollout for each reward (None: it got none) with its score; return their ids."""
        role, parent = facts.get("role", "attempt"), facts.get("parent_id", "")
        first = self._num_samples.get((iteration, role, prompt_id + parent), 0)
        self._num_samples[iteration, role, prompt_id + parent] = first + len(rewards)
        rows = [rollout(prompt_id, first + n, iteration, **facts) for n in range(len(rewards))]
        ids = [self.writer.event_id_of("rollouts", row) for row in rows]
        scores = [
            score(i, reward, iteration, signature=signature)
            for i, reward in zip(ids, rewards, strict=True)
        ]
        given = {"rollout_tokens": [tokens(i, iteration) for i in ids]} if with_tokens else {}
        self.append(scores=scores, **given, rollouts=rows)
        return ids

    def cut(self, rollout_id: str, prefix_tokens: int = 5, iteration: int = 1, **facts: Any) -> str:
        [state_id] = self.append(states=[state(rollout_id, prefix_tokens, iteration, **facts)])
        return state_id

    def judge(self, version: str, values: dict[str, float | None], iteration: int = 1) -> None:
        """Append the judgements of states by a version of the value model."""
        self.append(scores=[value(i, v, version, iteration) for i, v in values.items()])

    def fit(self, version: str, iteration: int = 1, verdict: str = "healthy") -> None:
        self.append(value_models=[model(version, iteration, verdict)])

    def use(self, unit: str, entry_id: str, iteration: int, **facts: Any) -> str:
        """Pick an entry and take a step with it; return the id of the pick."""
        pick_id = self.pick(unit, entry_id, iteration, **facts)
        self.learn(pick_id, iteration)
        return pick_id

    def pick(self, unit: str, entry_id: str, iteration: int, **facts: Any) -> str:
        [pick_id] = self.append(picks=[pick(unit, entry_id, iteration, **facts)])
        return pick_id

    def learn(self, pick_id: str, iteration: int, **facts: Any) -> None:
        batch = {"iteration": iteration, "step": self._num_appends, "batch_id": f"b-{pick_id}"}
        sample = planned(f"ro-{pick_id}", 0, unit="state", pick_id=pick_id) | batch
        self.append(replays=[sample], updates=[update() | batch | facts])

    def buffer(self, as_of: int | None = None, **arguments: Any) -> list[Row]:
        """Return the rows of `replay_buffer`."""
        return self.store.view("replay_buffer", arguments=arguments, as_of=as_of)

    def entry(self, entry_id: str, **arguments: Any) -> Row:
        """Return the row of one entry."""
        [row] = [row for row in self.buffer(**arguments) if row["entry_id"] == entry_id]
        return row

    def reason(self, entry_id: str, **arguments: Any) -> str:
        reason: str = self.entry(entry_id, **arguments)["eligibility_reason"]
        return reason
