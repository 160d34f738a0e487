"""What became of old answers: each is compared with the new ones, under one scorer version.

An old answer that the present scorer has not judged is judged first: the comparison is never
between two judges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import storage
from flows.batching import Scored
from flows.planned import source_rollouts
from flows.translate import Row, score_row
from flows.wiring import Session
from rrl_core.replay.outcomes import compare
from rrl_core.tasks.scorers import score_one


@dataclass(frozen=True)
class Comparisons:
    """Rows of `retries`, and rows of `scores` that had to be made for them."""

    retries: list[Row] = field(default_factory=list)
    scores: list[Row] = field(default_factory=list)


def compare_with_old(session: Session, iteration: int, scored: Sequence[Scored]) -> Comparisons:
    """Compare the old answer of every pick with the iteration's new ones.

    New are the continuations of a state, the retries of a prompt, and for a trajectory the fresh
    attempts at its prompt. What has no judgement is left out.
    """
    picks = session.store.read("picks", run_id=session.run_id, iteration=iteration)
    old = source_rollouts(session.store, picks)
    old_scores, made = _old_scores(session, iteration, list(old.values()))
    retries = []
    for pick in picks:
        before = old_scores.get(pick["rollout_id"] or "")
        if before is None or before["value"] is None:
            continue
        retries += [
            _retry_row(session, iteration, pick, before, new)
            for new in _new_answers(pick, scored)
            if new.reward is not None
        ]
    return Comparisons(retries, made)


def _new_answers(pick: Row, scored: Sequence[Scored]) -> list[Scored]:
    if pick["unit"] == "trajectory":
        fresh = [s for s in scored if s.unit == "fresh"]
        return [s for s in fresh if s.rollout["prompt_id"] == pick["prompt_id"]]
    return [s for s in scored if s.pick is not None and s.pick["event_id"] == pick["event_id"]]


def _old_scores(
    session: Session, iteration: int, rollouts: list[Row]
) -> tuple[dict[str, Row], list[Row]]:
    """Return the reward row of each rollout by the present scorer, and those made just now."""
    scorer = session.reward_scorer
    judge = {"scorer": scorer.name, "scorer_version": scorer.version, "attempt": 0}
    ids = [
        storage.event_id("scores", {**rollout, **judge, "target_id": rollout["event_id"]})
        for rollout in rollouts
    ]
    rows = session.store.read("scores", event_ids=ids) if ids else []
    found = {row["target_id"]: row for row in rows}
    prompts = {prompt.prompt_id: prompt for prompt in session.prompts("train")}
    made = []
    for rollout in rollouts:
        if rollout["event_id"] not in found:
            judged = score_one(scorer, prompts[rollout["prompt_id"]], rollout["completion"])
            row = score_row(rollout, scorer, judged, 0.0, iteration)
            made.append(row)
            event_id = session.writer.event_id_of("scores", row)
            found[rollout["event_id"]] = row | {"event_id": event_id}
    return found, made


def _retry_row(session: Session, iteration: int, pick: Row, old: Row, new: Scored) -> Row:
    assert new.score is not None
    return {
        "iteration": iteration,
        "old_rollout_id": pick["rollout_id"],
        "new_rollout_id": new.rollout["event_id"],
        "scorer": session.reward_scorer.name,
        "scorer_version": session.reward_scorer.version,
        "prompt_id": pick["prompt_id"],
        "unit": pick["unit"],
        "pick_id": pick["event_id"],
        "old_score_id": old["event_id"],
        "new_score_id": new.score["event_id"],
        "outcome": compare(old["value"], new.score["value"]),
    }
