"""What became of old answers: each is compared with the new ones, under one scorer version.

An old answer that the present scorer has not judged is judged first: the comparison is never
between two judges. The rows follow from the log alone, so `rrl audit` derives them again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flows.batching import Scored
from flows.judged import judge_rollouts
from flows.planned import OldRows, reward_id
from flows.substituting import Samples
from flows.translate import Row, score_row
from flows.wiring import Session
from rrl_core.replay.outcomes import compare
from storage import Store


@dataclass(frozen=True)
class Comparisons:
    """Rows of `retries`, and rows of `scores` that had to be made for them."""

    retries: list[Row] = field(default_factory=list)
    scores: list[Row] = field(default_factory=list)


def compare_with_old(session: Session, iteration: int, samples: Samples) -> Comparisons:
    """Compare the old answer of every pick with the iteration's new ones; judge what was not."""
    scorer = session.reward_scorer
    judge = (scorer.name, scorer.version)
    found = old_rewards(session.store, session.run_id, iteration, samples.old, judge)
    prompts = {prompt.prompt_id: prompt for prompt in session.prompts("train")}
    missing = [old for rollout_id, old in samples.old.rollouts.items() if rollout_id not in found]
    asked = [prompts[old["prompt_id"]] for old in missing]
    judged = judge_rollouts(session.store, scorer, asked, missing)
    made = [score_row(old, scorer, j, iteration) for old, j in zip(missing, judged, strict=True)]
    for row in made:
        found[row["target_id"]] = row | {"event_id": session.writer.event_id_of("scores", row)}
    return Comparisons(retry_rows(iteration, samples, found), made)


def old_rewards(
    store: Store, run_id: str, iteration: int, old: OldRows, judge: tuple[str, str]
) -> dict[str, Row]:
    """Return the reward row of each old rollout by `judge`, where it is in the log, by rollout id.

    It was made in the rollout's own iteration, or for a comparison in this one.
    """
    own = {
        row["target_id"]: row
        for row in store.read("scores", run_id=run_id, iteration=iteration)
        if (row["scorer"], row["scorer_version"]) == judge
    }
    first = {i: old.scores.get(reward_id(row, judge)) for i, row in old.rollouts.items()}
    found = {rollout_id: row or own.get(rollout_id) for rollout_id, row in first.items()}
    return {rollout_id: row for rollout_id, row in found.items() if row is not None}


def retry_rows(iteration: int, samples: Samples, old_rewards: Mapping[str, Row]) -> list[Row]:
    """Return the `retries` rows of an iteration; `old_rewards` are by id of the old rollout.

    New are the continuations of a state, the retries of a prompt, and for a trajectory the fresh
    attempts at its prompt. What has no judgement is left out.
    """
    retries = []
    for pick in samples.picks:
        before = old_rewards.get(pick["rollout_id"] or "")
        if before is None or before["value"] is None:
            continue
        retries += [
            _retry_row(iteration, pick, before, new.rollout, new.score)
            for new in _new_answers(pick, samples.scored)
            if new.score is not None and new.reward is not None
        ]
    return retries


def _new_answers(pick: Row, scored: Sequence[Scored]) -> list[Scored]:
    if pick["unit"] == "trajectory":
        fresh = [s for s in scored if s.unit == "fresh"]
        return [s for s in fresh if s.rollout["prompt_id"] == pick["prompt_id"]]
    return [s for s in scored if s.pick is not None and s.pick["event_id"] == pick["event_id"]]


def _retry_row(iteration: int, pick: Row, old: Row, rollout: Row, new: Row) -> Row:
    return {
        "iteration": iteration,
        "old_rollout_id": pick["rollout_id"],
        "new_rollout_id": rollout["event_id"],
        "scorer": old["scorer"],
        "scorer_version": old["scorer_version"],
        "prompt_id": pick["prompt_id"],
        "unit": pick["unit"],
        "pick_id": pick["event_id"],
        "old_score_id": old["event_id"],
        "new_score_id": new["event_id"],
        "outcome": compare(old["value"], new["value"]),
    }
