"""What an iteration planned to learn from, read back from the log: the only source of the learner.

Nothing here looks at a session: `rrl audit` and a replayed step read the same way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import storage
from flows.batching import SUBSTITUTE, Scored, picks_by_rollout
from flows.translate import Row, distill_sample, learn_sample
from rrl_core.policy.learner import LearnSample
from storage import Store

TRAINED_ROLES = ("attempt", "continuation", "retry")


@dataclass(frozen=True)
class OldRows:
    """What an iteration's picks refer to of earlier iterations.

    `rollouts` and `tokens` are by rollout id: the rollouts that picks were taken from, and the
    tokens of those that are learned from or continued. `scores` are by their own id: those that
    trajectories were picked under, and every old rollout's reward by the present scorer.
    """

    rollouts: dict[str, Row] = field(default_factory=dict)
    tokens: dict[str, Row] = field(default_factory=dict)
    scores: dict[str, Row] = field(default_factory=dict)

    def __or__(self, others: "OldRows") -> "OldRows":
        """Return the rows of both."""
        return OldRows(
            self.rollouts | others.rollouts,
            self.tokens | others.tokens,
            self.scores | others.scores,
        )


def old_rows(store: Store, picks: Sequence[Row], scorer: tuple[str, str]) -> OldRows:
    """Return what `picks` refer to; `scorer` is name and version of the present reward scorer."""
    rollouts = source_rollouts(store, picks)
    with_tokens = {pick["rollout_id"] for pick in picks if pick["unit"] != "prompt"}
    needed = [row for rollout_id, row in rollouts.items() if rollout_id in with_tokens]
    score_ids = {pick["score_id"] for pick in picks if pick["unit"] == "trajectory"}
    score_ids |= {reward_id(row, scorer) for row in rollouts.values()}
    scores = store.read("scores", event_ids=score_ids) if score_ids else []
    return OldRows(
        rollouts, tokens_of(store, needed), {score["event_id"]: score for score in scores}
    )


def reward_id(rollout: Row, scorer: tuple[str, str]) -> str:
    """Return the id of the reward that a scorer gave a rollout in its own iteration."""
    judge = {"scorer": scorer[0], "scorer_version": scorer[1], "attempt": 0}
    place = {**rollout, **judge, "target_id": rollout["event_id"]}
    return storage.event_id("scores", place)


def scored_samples(
    store: Store, run_id: str, iteration: int, scorer: tuple[str, str], old: OldRows
) -> list[Scored]:
    """Return the iteration's rollouts in order, then its replayed trajectories, with their rewards.

    Substitutes are not among them: they follow from these (`substituting.py`).

    Args:
        store: the store.
        run_id: the run.
        iteration: which.
        scorer: name and version of the scorer whose value is the reward.
        old: what the iteration's picks refer to.
    """
    read = partial(store.read, run_id=run_id, iteration=iteration)
    rollouts = [r for r in read("rollouts") if r["role"] in TRAINED_ROLES and r["status"] == "ok"]
    rewards = {
        row["target_id"]: row
        for row in read("scores")
        if (row["scorer"], row["scorer_version"]) == scorer
    }
    picks = picks_before_sampling(store, run_id, iteration)
    pick_of = picks_by_rollout(picks, rollouts)
    with_logprobs = {i for i, row in old.tokens.items() if row["sampler_logprobs"] is not None}
    samples = [
        Scored(
            rollout,
            rewards.get(rollout["event_id"]),
            pick := pick_of.get(rollout["event_id"]),
            pick is not None and pick["rollout_id"] in with_logprobs,
        )
        for rollout in rollouts
    ]
    return samples + trajectories(picks, old)


def picks_before_sampling(store: Store, run_id: str, iteration: int) -> list[Row]:
    """Return the iteration's picks but its substitutes, in order."""
    picks = store.read("picks", run_id=run_id, iteration=iteration)
    chosen = [pick for pick in picks if pick["pick_kind"] != SUBSTITUTE]
    return sorted(chosen, key=lambda pick: int(pick["position"]))


def trajectories(picks: Iterable[Row], old: OldRows) -> list[Scored]:
    """Return the trajectories among picks, with the score each was picked under."""
    return [
        Scored(old.rollouts[pick["rollout_id"]], old.scores[pick["score_id"]], pick)
        for pick in picks
        if pick["unit"] == "trajectory"
    ]


def planned_steps(
    store: Store, run_id: str, iteration: int, old: OldRows | None = None
) -> list[tuple[str, list[LearnSample]]]:
    """Return (batch id, samples) of each planned step; what `old` holds is not read again."""
    read = partial(store.read, run_id=run_id, iteration=iteration)
    replays, picks = read("replays"), read("picks")
    held = old or OldRows()
    targets = {row["event_id"]: row for row in read("distillations")}
    rollouts = {row["event_id"]: row for row in read("rollouts")} | held.rollouts
    source_of = {p["event_id"]: p["rollout_id"] for p in picks if p["unit"] != "prompt"}
    needed = [row["rollout_id"] for row in replays if row["rollout_id"] not in targets]
    needed += [source_of[row["pick_id"]] for row in replays if row["pick_id"] in source_of]
    needed += [row["attempt_id"] for row in targets.values()]
    missing = [rollout_id for rollout_id in needed if rollout_id not in rollouts]
    found = store.read("rollouts", event_ids=missing) if missing else []
    rollouts |= {row["event_id"]: row for row in found}
    unread = {i: rollouts[i] for i in needed if i not in held.tokens}
    tokens = held.tokens | tokens_of(store, unread.values())
    steps: dict[int, list[Row]] = {}
    for row in replays:
        steps.setdefault(row["step"], []).append(row)
    planned = []
    for step in sorted(steps):
        rows = sorted(steps[step], key=lambda row: int(row["position"]))
        samples = []
        for row in rows:
            if (target := targets.get(row["rollout_id"])) is not None:
                second, attempt = rollouts[target["rollout_id"]], tokens[target["attempt_id"]]
                samples.append(distill_sample(row, second, tokens[second["event_id"]], attempt))
                continue
            source = tokens.get(source_of.get(row["pick_id"], ""))
            rollout_id = row["rollout_id"]
            samples.append(learn_sample(row, rollouts[rollout_id], tokens[rollout_id], source))
        planned.append((rows[0]["batch_id"], samples))
    return planned


def source_rollouts(store: Store, picks: Iterable[Row]) -> dict[str, Row]:
    """Return the old rollouts that picks were taken from, by id."""
    ids = {pick["rollout_id"] for pick in picks if pick["rollout_id"] is not None}
    return {row["event_id"]: row for row in store.read("rollouts", event_ids=ids)} if ids else {}


def tokens_of(store: Store, rollouts: Iterable[Row]) -> dict[str, Row]:
    """Return the `rollout_tokens` rows of rollouts, by rollout id."""
    ids = [
        storage.event_id("rollout_tokens", {**rollout, "rollout_id": rollout["event_id"]})
        for rollout in rollouts
    ]
    rows = store.read("rollout_tokens", event_ids=ids) if ids else []
    return {row["rollout_id"]: row for row in rows}
