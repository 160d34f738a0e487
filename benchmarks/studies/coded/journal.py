"""What a run did, as events of the product's log: its views answer questions about the study.

Problems that training goes back to are in `forgetting`, held-out ones in `lost_prompts` (role
evaluation: several samples each), iterations in `training_history`, what came of replay in
`retries`. Rows are gathered while a run goes on and appended at its end, in one commit. Tokens and
weights are not kept: an answer is its text, a policy its version and digest.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import storage
from benchmarks.studies.coded.learning import Rollouts
from benchmarks.studies.coded.policy import Policy
from benchmarks.studies.coded.replaying import Entry
from benchmarks.studies.coded.world import (
    Floats,
    Ints,
    Problems,
    World,
    answer_ids,
    decode,
)
from rrl_core.policy.digest import tensors_digest
from rrl_core.replay.outcomes import compare
from rrl_core.replay.picks import Pick
from rrl_core.value.cuts import prefix_sha256

Row = dict[str, Any]
Role = Literal["attempt", "retry", "continuation", "review", "second_attempt", "evaluation"]

SCORER = {"scorer": "exact", "scorer_version": "1"}


class Journal:
    """The events of one run."""

    def __init__(self, run_id: str, world: World, temperature: float) -> None:
        self.run_id = run_id
        self._world, self._temperature = world, temperature
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self._prompts: dict[str, Row] = {}
        self._numbers: Counter[tuple[Any, ...]] = Counter()
        self._attempts: dict[int, list[tuple[str, float]]] = {}
        """Id and reward of each attempt of an iteration."""
        self._iteration, self._version, self._digest = 0, 0, ""

    def sample_from(self, policy: Policy, version: int) -> None:
        """What is noted from now on is sampled from this policy."""
        self._version, self._digest = version, tensors_digest(policy.state_dict())

    def begin(self, iteration: int) -> None:
        """Begin an iteration; 0 is before any learning."""
        self._iteration = iteration
        pin = {"iteration": iteration, "as_of": 0, "as_of_sha256": ""}
        self.rows["views_pinned"].append(pin | {"scorer_versions_json": '{"exact":"1"}'})

    def note(
        self,
        role: Role,
        problems: Problems,
        part: Rollouts,
        rewards_B: Floats | None,
        parents: Sequence[str] = (),
        given: Ints | None = None,
    ) -> list[str]:
        """Note samples of the policy, and return their ids.

        Args:
            role: what was sampled.
            problems: [B], whose answers or reviews these are.
            part: the samples.
            rewards_B: of whole answers; None: of reviews, which have none.
            parents: ids of what each continues or answers; none by default.
            given: [L] tokens of the response that each continues.
        """
        names = self._names(problems, "eval" if role == "evaluation" else "train")
        start = "" if given is None else decode(given)
        ids = []
        for row, (name, completion) in enumerate(zip(names, part.completions, strict=True)):
            parent = parents[row] if parents else ""
            rollout = {
                "iteration": self._iteration, "role": role, "prompt_id": name,
                "sample_index": self._next(role, name, parent), "parent_id": parent, "attempt": 0,
                "group_id": f"{self._iteration}-{role}-{name}{parent}",
                "policy_version": self._version, "policy_digest": self._digest,
                "num_prompt_tokens": part.prompts.shape[1], "prefix_tokens": len(start),
                "num_completion_tokens": len(completion), "finish_reason": "stop",
                "status": "ok", "completion": start + decode(completion),
                "temperature": 1.0 if role == "evaluation" else self._temperature, "top_p": 1.0,
                "top_k": 0, "max_tokens": len(completion), "seed": 0, "engine": "transformers",
                "sync": "shared", "logprob_mode": "none",
                "batch_key": f"{self._iteration}-{role}", "generate_s": 0.0,
            }  # fmt: skip
            self.rows["rollouts"].append(rollout)
            ids.append(storage.event_id("rollouts", rollout | {"run_id": self.run_id}))
        if rewards_B is not None:
            scored = zip(ids, rewards_B.tolist(), strict=True)
            self.rows["scores"] += [
                _score(target, self._iteration, value) for target, value in scored
            ]
        if role in ("attempt", "retry"):
            noted = zip(ids, [] if rewards_B is None else rewards_B.tolist(), strict=True)
            self._attempts.setdefault(self._iteration, []).extend(noted)
        return ids

    def pick(self, pick: Pick, entry: Entry) -> str:
        """Note what was picked, and a state with it; return the id of what was picked."""
        (name,) = self._names(entry.problems, "train")
        rollout_id, _ = self._attempts[entry.iteration][entry.row]
        entry_id = {"trajectory": rollout_id, "prompt": name}.get(pick.unit)
        entry_id = entry_id or self._state(entry, name, rollout_id)
        facts = asdict(pick) | {"entry_id": entry_id, "prompt_id": name, "rollout_id": rollout_id}
        facts |= {"source_run_id": self.run_id, "iteration": self._iteration}
        facts["prefix_tokens"] = len(entry.tokens) if pick.unit == "state" else 0
        self.rows["picks"].append(facts | {"p_hat": entry.tried.p_hat})
        return entry_id

    def _state(self, entry: Entry, name: str, rollout_id: str) -> str:
        row = {
            "iteration": entry.iteration, "rollout_id": rollout_id,
            "prefix_tokens": len(entry.tokens), "source_run_id": self.run_id, "prompt_id": name,
            "prefix_sha256": prefix_sha256(entry.tokens.tolist()), "cut": entry.cut,
        }  # fmt: skip
        self.rows["states"].append(row)
        return storage.event_id("states", row | {"run_id": self.run_id})

    def compare(self, entry: Entry, ids: Sequence[str], rewards_B: Floats) -> None:
        """Note what new answers are to the one that the newest pick comes from."""
        old_id, old_reward = self._attempts[entry.iteration][entry.row]
        pick = self.rows["picks"][-1]
        pick_id = storage.event_id("picks", pick | {"run_id": self.run_id})
        for new_id, reward in zip(ids, rewards_B.tolist(), strict=True):
            scores = {
                "old_score_id": self._score_id(old_id, entry.iteration),
                "new_score_id": self._score_id(new_id, self._iteration),
            }
            row = {"iteration": self._iteration, "old_rollout_id": old_id, "new_rollout_id": new_id}
            row |= {"prompt_id": pick["prompt_id"], "unit": pick["unit"], "pick_id": pick_id}
            row |= {"outcome": compare(old_reward, reward)}
            self.rows["retries"].append(row | SCORER | scores)

    def write(self, path: Path, config: Mapping[str, Any], seed: int) -> None:
        """Append everything to a store; a run that is there already is not written again."""
        store = storage.open(path, create=True)
        opened = {
            "config_json": json.dumps(config, sort_keys=True), "seed_root": seed,
            "planned_iterations": self._iteration, "code_version": "study", "packages_json": "{}",
            "kind": "train",
        }  # fmt: skip
        rows = {"prompts": list(self._prompts.values()), **self.rows}
        store.open_stream(self.run_id, opened).append(rows, batch_key="run")

    def _names(self, problems: Problems, split: str) -> list[str]:
        names = [decode(ids) for ids in problems.ids()]
        for row, name in enumerate(names):
            if name not in self._prompts:
                rule = self._world.true_rule_C[problems.class_B[row : row + 1]]
                answer = decode(answer_ids(rule, problems.digits_B5[row : row + 1])[0, 1:-1])
                message = {"role": "user", "content": f"{name}="}
                self._prompts[name] = {
                    "prompt_id": name, "task": "coded-transforms", "split": split,
                    "messages_json": json.dumps([message]), "answer": answer, "meta_json": "{}",
                    "difficulty": "rare" if problems.is_rare()[row] else "common",
                }  # fmt: skip
        return names

    def _next(self, role: str, name: str, parent: str) -> int:
        place = (self._iteration, role, name, parent)
        self._numbers[place] += 1
        return self._numbers[place] - 1

    def _score_id(self, target: str, iteration: int) -> str:
        place = _score(target, iteration, 0.0) | {"run_id": self.run_id}
        return storage.event_id("scores", place)


def _score(target: str, iteration: int, value: float) -> Row:
    return {
        "iteration": iteration, "target_id": target, **SCORER, "attempt": 0,
        "target_kind": "rollout", "kind": "reward", "value": value, "status": "ok",
        "components_json": "{}", "feedback": "", "elapsed_ms": 0.0,
    }  # fmt: skip
