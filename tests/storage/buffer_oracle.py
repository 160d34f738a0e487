"""The replay buffer worked out from plain rows by loops, as the contract says it in words."""

from collections import Counter
from typing import Any

import storage
from tests.storage.rows import Row

Key = tuple[str, str, str]


def _rank(score: Row) -> tuple[bool, int]:
    return score["status"] in ("ok", "unscorable"), score["attempt"]


def all_rows(store: storage.Store) -> dict[str, list[Row]]:
    return {name: store.read(name) for name in storage.TABLES}


class Oracle:
    """Everything the buffer of one run depends on, read row by row in the order of the log."""

    def __init__(
        self,
        store: storage.Store,
        run_id: str,
        version: str | None,
        rows: dict[str, list[Row]] | None = None,
    ) -> None:
        self.run_id = run_id
        self.rows = rows or all_rows(store)
        own = {name: [r for r in rows if r["run_id"] == run_id] for name, rows in self.rows.items()}
        order = store.sql("select event_id from rollouts order by _commit, _row").fetchall()
        self.commits = {
            event_id: commit
            for name in ("rollouts", "scores", "picks", "value_models")
            for event_id, commit in store.sql(f"select event_id, _commit from {name}").fetchall()
        }
        by_id = {row["event_id"]: row for row in own["rollouts"]}
        self.rollouts = [by_id[event_id] for [event_id] in order if event_id in by_id]
        self.own = own
        self.next_iteration = 1 + max(pin["iteration"] for pin in own["views_pinned"])
        models = [m for m in own["value_models"] if m["verdict"] == "healthy"]
        versions = [m["scorer_version"] for m in models]
        self.version = versions[-1] if version is None and versions else version
        self.version = None if self.version == "none" else self.version
        before = versions[: versions.index(self.version)] if self.version in versions else []
        self.earlier = before[-1] if before else None
        self.uses = self._uses()
        self.judgements: dict[Key, Row] = {}
        for row in self.rows["scores"]:  # in the order of the log: the first of equals stays
            key = (row["target_id"], row["scorer"], row["scorer_version"])
            if key not in self.judgements or _rank(row) > _rank(self.judgements[key]):
                self.judgements[key] = row

    def _uses(self) -> dict[tuple[str, str], list[Row]]:
        steps = {(u["iteration"], u["step"], u["batch_id"]) for u in self.own["updates"]}
        learned = {
            r["pick_id"]
            for r in self.own["replays"]
            if (r["iteration"], r["step"], r["batch_id"]) in steps
        }
        published = {policy["iteration"] for policy in self.own["policies"]}
        uses: dict[tuple[str, str], list[Row]] = {}
        for pick in self.own["picks"]:
            if pick["event_id"] in learned or pick["iteration"] in published:
                uses.setdefault((pick["unit"], pick["entry_id"]), []).append(pick)
        return uses

    def judgement(self, target_id: str, scorer: str, version: str | None) -> Row | None:
        row = self.judgements.get((target_id, scorer, version or ""))
        return None if row is None or row["value"] is None else row

    def reward(self, rollout: Row) -> Row | None:
        return self.judgement(rollout["event_id"], "exact", "1")

    def outcomes(self, roles: tuple[str, ...], **facts: Any) -> list[tuple[Row, Row]]:
        """Rollouts of these roles with their reward, in the order of the log."""
        return [
            (rollout, reward)
            for rollout in self.rollouts
            if rollout["role"] in roles and facts.items() <= rollout.items()
            if (reward := self.reward(rollout)) is not None
        ]

    def buffer(self) -> list[Row]:
        entries = [*self._states(), *self._trajectories(), *self._prompts()]
        return sorted(entries, key=lambda row: (row["unit"], row["entry_id"]))

    def _tries(self, prompt_id: str) -> list[tuple[Row, Row]]:
        return self.outcomes(("attempt", "retry"), prompt_id=prompt_id)

    def _of_prompt(self, prompt_id: str) -> Row:
        tried = self._tries(prompt_id)
        ok = [reward["value"] >= 0.999 for _, reward in tried]
        num, num_ok = len(ok[-16:]), sum(ok[-16:])
        p_hat = (num_ok + 0.5) / (num + 2)
        alone = [
            s
            for s in self.rows["states"]
            if s["source_run_id"] == self.run_id
            if s["prompt_id"] == prompt_id and s["prefix_tokens"] == 0
        ]
        sampled = {r["event_id"]: r["iteration"] for r in self.rollouts}
        openings = [self.judgement(s["event_id"], "value", self.version) for s in alone]
        recent = [reward["value"] for _, reward in tried][-16:]
        opening = next((o for o in openings if o is not None), None)
        v = p_hat if opening is None else opening["value"]
        difficulty = [p["difficulty"] for p in self.own["prompts"] if p["prompt_id"] == prompt_id]
        return {
            "run_id": self.run_id,
            "prompt_id": prompt_id,
            "difficulty": difficulty[0] if difficulty else None,
            "prompt_tries": num,
            "prompt_ok": num_ok,
            "p_hat": p_hat,
            "prompt_mean_reward": sum(recent) / len(recent) if recent else None,
            "prompt_state_id": alone[0]["event_id"] if alone else None,
            "prompt_state_iteration": sampled[alone[0]["rollout_id"]] if alone else None,
            "is_ever_solved": any(ok),
            "raw_prompt_value": v,
            "prompt_value": p_hat if opening is None else (num_ok + 2 * v) / (num + 2),
        }

    def _of_rollout(self, rollout: Row) -> Row:
        score = self.judgements.get((rollout["event_id"], "exact", "1"))
        signature = None if score is None else score["signature"]
        same = Counter(
            reward["signature"]
            for _, reward in self._tries(rollout["prompt_id"])
            if reward["value"] >= 0.999 and reward["signature"] is not None
        )
        newest = max((p["policy_version"] for p in self.own["policies"]), default=None)
        return self._of_prompt(rollout["prompt_id"]) | {
            "rollout_id": rollout["event_id"],
            "source_run_id": self.run_id,
            "sampled_iteration": rollout["iteration"],
            "policy_version": rollout["policy_version"],
            "age": 0 if newest is None else newest - rollout["policy_version"],
            "signature": signature,
            "signature_count": same.get(signature, 1),
        }

    def _use(self, unit: str, entry_id: str) -> Row:
        uses = self.uses.get((unit, entry_id), [])
        return {
            "unit": unit,
            "entry_id": entry_id,
            "num_uses": len(uses),
            "last_used_iteration": max((u["iteration"] for u in uses), default=None),
        }

    def _cuts(self) -> list[Row]:
        order = [s for s in self.rows["states"] if s["source_run_id"] == self.run_id]
        first: dict[Key, Row] = {}
        for row in order:
            first.setdefault((row["source_run_id"], row["prompt_id"], row["prefix_sha256"]), row)
        return list(first.values())

    def _states(self) -> list[Row]:
        found = []
        for cut in self._cuts():
            rollout = [r for r in self.rollouts if r["event_id"] == cut["rollout_id"]]
            if cut["prefix_tokens"] == 0 or not rollout:
                continue
            entry_id = cut["event_id"]
            outcomes = self.outcomes(("continuation",), parent_id=entry_id)
            ok = [reward["value"] >= 0.999 for _, reward in outcomes]
            num, num_ok = len(ok[-16:]), sum(ok[-16:])
            row = self._of_rollout(rollout[0]) | self._use("state", entry_id)
            row["entry_key"] = f"{cut['prompt_id']}:{cut['prefix_sha256']}"
            score = self.judgements.get((entry_id, "value", self.version or ""))
            v = row["p_hat"] if self.version is None else score and score["value"]
            older = self.judgement(entry_id, "value", self.earlier)
            older_v = None if older is None else older["value"]
            estimates = [None if x is None else (num_ok + 2 * x) / (num + 2) for x in (v, older_v)]
            row |= {
                "prefix_tokens": cut["prefix_tokens"],
                "state_tries": num,
                "state_ok": num_ok,
                "raw_value": v,
                "value": estimates[0],
                "score_id": score and score["event_id"],
                "scorer": score and "value",
                "scorer_version": score and self.version,
            }
            last_ok = max(
                (
                    self.commits[r["event_id"]]
                    for (r, _), good in zip(outcomes, ok, strict=True)
                    if good
                ),
                default=0,
            )
            row["eligibility_reason"] = self._reason(row, last_ok, score, estimates)
            found.append(row)
        return found

    def _trajectories(self) -> list[Row]:
        found = []
        stored = {
            t["rollout_id"] for t in self.own["rollout_tokens"] if t["sampler_logprobs"] is not None
        }
        for rollout, reward in self.outcomes(("attempt", "retry"), finish_reason="stop"):
            if reward["value"] < 0.999:
                continue
            row = self._of_rollout(rollout) | self._use("trajectory", rollout["event_id"])
            row |= self._plain(reward["value"], reward)
            row["entry_key"] = f"{rollout['prompt_id']}:{rollout['seed']}"
            last_ok = self._last_ok(rollout["prompt_id"])
            has_tokens = rollout["event_id"] in stored
            row["eligibility_reason"] = self._reason(row, last_ok, reward, [], has_tokens)
            found.append(row)
        return found

    def _prompts(self) -> list[Row]:
        found = []
        for prompt_id in dict.fromkeys(r["prompt_id"] for r in self.rollouts):
            if not (tried := self._tries(prompt_id)):
                continue
            row = self._of_prompt(prompt_id) | self._use("prompt", prompt_id)
            row |= self._plain(row["p_hat"], None) | {
                "rollout_id": tried[-1][0]["event_id"], "source_run_id": self.run_id,
                "entry_key": prompt_id, "sampled_iteration": None,
                "policy_version": None, "age": 0, "signature": None, "signature_count": 1,
            }  # fmt: skip
            row["eligibility_reason"] = self._reason(row, self._last_ok(prompt_id), None, [])
            found.append(row)
        return found

    def _last_ok(self, prompt_id: str) -> int:
        ok = [r["event_id"] for r, reward in self._tries(prompt_id) if reward["value"] >= 0.999]
        return max((self.commits[i] for i in ok), default=0)

    def _plain(self, value: float, score: Row | None) -> Row:
        return {
            "prefix_tokens": 0,
            "state_tries": 0,
            "state_ok": 0,
            "raw_value": value,
            "value": value,
            "score_id": score and score["event_id"],
            "scorer": score and score["scorer"],
            "scorer_version": score and score["scorer_version"],
        }

    def _reason(
        self,
        row: Row,
        last_ok: int,
        score: Row | None,
        estimates: list[float | None],
        has_tokens: bool = True,
    ) -> str:
        if row["p_hat"] >= 0.75:
            return "prompt_solved"
        if row["value"] is None:
            return "not_judged"
        if row["unit"] == "trajectory" and row["p_hat"] > 0.25:
            return "not_rare"
        if not has_tokens:
            return "no_logprobs"
        if row["last_used_iteration"] == self.next_iteration - 1:
            return "cooldown"
        judged = 0 if score is None else self.commits[score["event_id"]]
        uses = self.uses.get((row["unit"], row["entry_id"]), [])
        if sum(self.commits[u["event_id"]] > max(last_ok, judged) for u in uses) >= 8:
            return "retired"
        if estimates and all(e is not None and e >= 0.75 for e in estimates):
            return "mastered"
        return "eligible"
