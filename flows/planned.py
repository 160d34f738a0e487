"""What an iteration planned to learn from, read back from the log: the only source of the learner.

Nothing here looks at a session: `rrl audit` and a replayed step read the same way.
"""

from collections.abc import Iterable
from functools import partial

import storage
from flows.batching import Scored, picks_by_rollout
from flows.translate import Row, distill_sample, learn_sample
from rrl_core.policy.learner import LearnSample
from storage import Store

TRAINED_ROLES = ("attempt", "continuation", "retry")


def scored_samples(
    store: Store, run_id: str, iteration: int, scorer: tuple[str, str]
) -> list[Scored]:
    """Return the iteration's rollouts in order, then its replayed trajectories, with their rewards.

    Args:
        store: the store.
        run_id: the run.
        iteration: which.
        scorer: name and version of the scorer whose value is the reward.
    """
    read = partial(store.read, run_id=run_id, iteration=iteration)
    rollouts = [r for r in read("rollouts") if r["role"] in TRAINED_ROLES and r["status"] == "ok"]
    rewards = {
        row["target_id"]: row
        for row in read("scores")
        if (row["scorer"], row["scorer_version"]) == scorer
    }
    picks = read("picks")
    pick_of = picks_by_rollout(picks, rollouts)
    with_logprobs = _rollouts_with_logprobs(store, pick_of.values())
    samples = [
        Scored(
            rollout,
            rewards.get(rollout["event_id"]),
            pick := pick_of.get(rollout["event_id"]),
            pick is not None and pick["rollout_id"] in with_logprobs,
        )
        for rollout in rollouts
    ]
    return samples + _trajectories(store, picks)


def planned_steps(store: Store, run_id: str, iteration: int) -> list[tuple[str, list[LearnSample]]]:
    """Return (batch id, samples) of each planned step."""
    read = partial(store.read, run_id=run_id, iteration=iteration)
    replays = read("replays")
    rollouts = {row["event_id"]: row for row in read("rollouts")}
    targets = {row["event_id"]: row for row in read("distillations")}
    known = rollouts.keys() | targets.keys()
    old_ids = [r["rollout_id"] for r in replays if r["rollout_id"] not in known]
    rollouts |= {row["event_id"]: row for row in store.read("rollouts", event_ids=old_ids)}
    sources = source_rollouts(store, read("picks"))
    needed = [rollouts[r["rollout_id"]] for r in replays if r["rollout_id"] not in targets]
    needed += [rollouts[row["attempt_id"]] for row in targets.values()]
    tokens = tokens_of(store, [*needed, *sources.values()])
    source_of = {pick["event_id"]: pick["rollout_id"] for pick in read("picks")}
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
            logprobs = None if source is None else source["sampler_logprobs"]
            rollout_id = row["rollout_id"]
            samples.append(learn_sample(row, rollouts[rollout_id], tokens[rollout_id], logprobs))
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


def _rollouts_with_logprobs(store: Store, picks: Iterable[Row]) -> set[str]:
    sources = source_rollouts(store, picks)
    rows = tokens_of(store, sources.values())
    return {rollout_id for rollout_id, row in rows.items() if row["sampler_logprobs"] is not None}


def _trajectories(store: Store, picks: Iterable[Row]) -> list[Scored]:
    """Return the trajectories that were picked, with the score they were picked under."""
    chosen = sorted(
        (pick for pick in picks if pick["unit"] == "trajectory"), key=lambda pick: pick["position"]
    )
    rollouts = source_rollouts(store, chosen)
    score_ids = [pick["score_id"] for pick in chosen]
    scores = {row["event_id"]: row for row in store.read("scores", event_ids=score_ids)}
    return [Scored(rollouts[pick["rollout_id"]], scores[pick["score_id"]], pick) for pick in chosen]
