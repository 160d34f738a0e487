"""Substitutes: an old success in the place of one rollout of a fresh group that teaches nothing.

Where all rewards of a fresh group are equal, every advantage is 0. If the buffer at the pin holds a
trajectory of that prompt, an old verified success, it takes the place of the group's last rollout:
one success among seven failures has the advantage 2.4742 (grpo). As many sequences are sampled, and
as many learned from, as without.

Our choices:
1. Substitutes are drawn when the rewards are known, not before sampling as all other picks. Nothing
   that is sampled depends on them, so none has to be held in reserve: each is needed, and a use.
   The rewards say which prompts get one; which trajectory it is follows from buffer and seed, so
   the draw is that of a reserve, and `rrl audit` derives it from the pin and the scored rollouts.
2. A group that failed, of two rewards or more, gets one, if nothing else was picked of its prompt.
   Groups that succeeded get none: another success would teach as little.
3. They come on top of `replay.share`: with what is replayed they take half of the groups at most,
   annealed like the share (`rrl_core/replay/schedule.py`). Among more groups the draw decides.
4. The rollout that leaves the batch stays in the log and counts for the success rate of its prompt.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

import storage
from flows.batching import SUBSTITUTE, Scored
from flows.config import RunConfig
from flows.planned import OldRows, old_rows, picks_before_sampling, scored_samples, trajectories
from flows.replaying import Decision, candidates_of, pick_rows, pick_rule
from flows.translate import Row
from rrl_core.algorithms.dapo import informative_rows
from rrl_core.replay.outcomes import is_success
from rrl_core.replay.picks import pick_substitutes
from storage import Store


@dataclass(frozen=True)
class Past:
    """What an iteration's batch needs of earlier ones.

    `old`: what its picks refer to. `decided`: what it decided at its pin; None without substitutes.
    """

    old: OldRows
    decided: Decision | None


@dataclass(frozen=True)
class Samples:
    """What an iteration may learn from: its rollouts, then trajectories, substitutes last.

    `picks` are all that brought them, `substitutes` those of them that were drawn for this batch,
    and `old` is what they refer to.
    """

    scored: list[Scored]
    picks: list[Row]
    substitutes: list[Row]
    old: OldRows


def samples_of(
    store: Store, config: RunConfig, place: tuple[str, int], scorer: tuple[str, str], past: Past
) -> Samples:
    """Return what an iteration may learn from, substitutes included: a function of the log.

    Args:
        store: the store.
        config: the run's configuration.
        place: run id and iteration.
        scorer: name and version of the scorer whose value is the reward.
        past: what it needs of earlier iterations.
    """
    scored = scored_samples(store, *place, scorer, past.old)
    rows = [] if past.decided is None else substitutes(config, past.decided, scored)
    identified = [
        row | {"event_id": storage.event_id("picks", row | {"run_id": place[0]})} for row in rows
    ]
    samples = _joined(store, place, scorer, past.old, scored, identified)
    return replace(samples, substitutes=rows)


def stored_samples(
    store: Store, place: tuple[str, int], scorer: tuple[str, str], old: OldRows
) -> Samples:
    """Return what an iteration may learn from, with the substitutes that were stored for it."""
    scored = scored_samples(store, *place, scorer, old)
    picks = store.read("picks", run_id=place[0], iteration=place[1])
    drawn = [pick for pick in picks if pick["pick_kind"] == SUBSTITUTE]
    drawn.sort(key=lambda pick: int(pick["position"]))
    return _joined(store, place, scorer, old, scored, drawn)


def _joined(
    store: Store,
    place: tuple[str, int],
    scorer: tuple[str, str],
    old: OldRows,
    scored: list[Scored],
    drawn: list[Row],
) -> Samples:
    """Return the samples with the substitutes `drawn` for them, which have their ids."""
    of_drawn = old_rows(store, drawn, scorer)
    picks = picks_before_sampling(store, *place) + drawn
    return Samples(scored + trajectories(drawn, of_drawn), picks, drawn, old | of_drawn)


def substitutes(config: RunConfig, decided: Decision, scored: Sequence[Scored]) -> list[Row]:
    """Return the `picks` rows of what takes the places of fresh rollouts.

    Args:
        config: the run's configuration.
        decided: what the iteration decided at its pin.
        scored: the iteration's rollouts, without substitutes.
    """
    iteration, eligible = decided.plan["iteration"], decided.buffer.eligible
    prompts = _failed_prompts(scored) if decided.most_substitutes else []
    candidates = eligible.filter(
        pc.and_(
            pc.equal(eligible["unit"], "trajectory"),
            pc.is_in(eligible["prompt_id"], value_set=pa.array(prompts, pa.string())),
        )
    )
    if not len(candidates):
        return []
    picked = pa.array([pick["entry_id"] for pick in decided.picks], pa.string())
    picks = pick_substitutes(
        candidates_of(candidates),
        decided.most_substitutes,
        pick_rule(config, decided.buffer.pass_rates),
        config.run.seed,
        iteration,
        candidates_of(eligible.filter(pc.is_in(eligible["entry_id"], value_set=picked))),
    )
    return pick_rows(iteration, picks, decided.buffer)


def _failed_prompts(scored: Sequence[Scored]) -> list[str]:
    """Return the prompts whose fresh group has two rewards or more, all equal and no success."""
    fresh = [(s, s.reward) for s in scored if s.unit == "fresh" and s.reward is not None]
    groups = [s.rollout["group_id"] for s, _ in fresh]
    sizes = Counter(groups)
    has_signal = informative_rows([reward for _, reward in fresh], groups)
    return sorted(
        {
            s.rollout["prompt_id"]
            for (s, reward), group, differs in zip(fresh, groups, has_signal, strict=True)
            if not differs and sizes[group] > 1 and not is_success(reward)
        }
    )
