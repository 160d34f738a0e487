"""Schedule: how many groups of each unit an iteration replays, and why not more.

Our choice throughout (the paper publishes no schedule):
1. Replay takes a share of the iteration's groups, annealed linearly to 0 over the last fifth of
   the planned iterations, rounded to the nearest group and never more than half of them.
2. `state` and `prompt` start with the first verdict on a value model, whatever it says: an
   unhealthy one is replaced by p_hat. Without a value model they start at iteration 2.
   `trajectory` starts after the first iteration whose pass@1 exceeds 0.35, or at iteration 10; what
   has started stays started.
3. The units that have started share the groups evenly, as far as their eligible entries reach. The
   odd group goes to another unit each iteration.
4. Substitutes, where they are switched on, begin and end with trajectories, and come on top of the
   share: together with what is replayed they take half of the groups at most, annealed like it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rrl_core.replay.factors import UNITS

MAX_SHARE = 0.5
ANNEALED_FRACTION = 0.2
FIRST_ITERATION = 2  # nothing is remembered before
TRAJECTORY_ITERATION = 10
TRAJECTORY_PASS_AT_1 = 0.35
CURRICULUM_FLOOR = 0.1

WaitingReason = Literal[
    "off",
    "first iteration",
    "before the first refit",
    "before pass@1 0.35 or iteration 10",
    "annealed",
    "share below one group",
    "nothing eligible",
    "fewer eligible than the share",
]


@dataclass(frozen=True)
class Situation:
    """Where a run stands when an iteration is planned."""

    iteration: int
    """From 1."""
    planned_iterations: int
    num_groups: int
    """Groups of the iteration, fresh and replayed."""
    has_value_model: bool
    """True when the run is to fit one."""
    is_judged: bool
    """True when a value model has a verdict, whatever it is."""
    best_pass_at_1: float | None
    """Highest success rate of an earlier iteration's attempts; None where unknown."""
    num_eligible: Mapping[str, int]
    """Entries that could be picked, by unit."""


@dataclass(frozen=True)
class ReplayPlan:
    """What an iteration is to replay."""

    num_groups: Mapping[str, int]
    """Groups by unit; every unit is named."""
    share: float
    """Share of the groups that the schedule gives to replay now."""
    most_substitutes: int
    """Fresh groups of equal rewards that may give way to a trajectory of their prompt."""
    waiting_reason: WaitingReason | None
    """Why less is replayed than the configured share; None when it is not less."""

    def reason_after(self, num_picked: int) -> WaitingReason | None:
        """Return the waiting reason once the picks are made: caps may have left slots empty."""
        if num_picked < sum(self.num_groups.values()):
            return "fewer eligible than the share" if num_picked else "nothing eligible"
        return self.waiting_reason


def plan_replay(units: Collection[str], share: float, situation: Situation) -> ReplayPlan:
    """Return how many groups of each unit the iteration replays.

    Args:
        units: the units that are switched on.
        share: configured share of the groups, in [0, 0.5].
        situation: where the run stands.

    Raises:
        ValueError: an unknown unit, or a number out of range.
    """
    _check(units, share, situation)
    anneal_now = anneal(situation.iteration, situation.planned_iterations)
    share_now = share * anneal_now
    most = int(MAX_SHARE * situation.num_groups)
    total = min(int(share_now * situation.num_groups + 0.5), most)
    full = min(int(share * situation.num_groups + 0.5), most)
    started = [unit for unit in UNITS if unit in units and not _waits(unit, situation)]
    room = {unit: max(0, situation.num_eligible.get(unit, 0)) for unit in started}
    groups = _split(total, room, situation.iteration)
    reason: WaitingReason | None = None
    if not units or share == 0:
        reason = "off"
    elif not started:
        reason = next(filter(None, (_waits(u, situation) for u in UNITS if u in units)))
    elif full == 0:
        reason = "share below one group"
    elif not any(room.values()):
        reason = "nothing eligible"
    elif sum(groups.values()) < total:
        reason = "fewer eligible than the share"
    elif total < full:
        reason = "annealed"
    room_left = int(anneal_now * most + 0.5) - sum(groups.values())
    return ReplayPlan(
        num_groups={unit: groups.get(unit, 0) for unit in UNITS},
        share=share_now,
        most_substitutes=max(0, room_left) if "trajectory" in started else 0,
        waiting_reason=reason,
    )


def anneal(iteration: int, planned_iterations: int) -> float:
    """Return the factor of the share: 1, then linearly to 0 at the last planned iteration."""
    left = planned_iterations - iteration
    return min(1.0, max(0.0, left / (ANNEALED_FRACTION * planned_iterations)))


def curriculum_weights(pass_rates: Mapping[str, float]) -> dict[str, float]:
    """Return a factor of the priority by difficulty bucket: 4 p (1 - p), 0.1 at least.

    Buckets that the policy now solves half of the time get most. Off by default, since it is not in
    the formula of P(i): it takes from the prompts that are never solved.

    Args:
        pass_rates: recent success rate of each bucket, in [0, 1].
    """
    return {bucket: max(4 * p * (1 - p), CURRICULUM_FLOOR) for bucket, p in pass_rates.items()}


def _check(units: Collection[str], share: float, situation: Situation) -> None:
    if set(units) - set(UNITS) or not 0 <= share <= MAX_SHARE:
        raise ValueError(
            f"expected units of {UNITS} and a share in [0, {MAX_SHARE}]; "
            f"came {sorted(units)} and {share}"
        )
    s = situation
    if s.iteration < 1 or s.planned_iterations < 1 or s.num_groups < 0:
        raise ValueError(
            f"expected iteration >= 1, planned iterations >= 1 and groups >= 0; came "
            f"{s.iteration}, {s.planned_iterations} and {s.num_groups}"
        )


def _waits(unit: str, situation: Situation) -> WaitingReason | None:
    """Return why a unit has not started; None when it has."""
    if situation.iteration < FIRST_ITERATION:
        return "first iteration"
    if unit == "trajectory":
        best = situation.best_pass_at_1
        is_able = best is not None and best > TRAJECTORY_PASS_AT_1
        is_late = situation.iteration >= TRAJECTORY_ITERATION
        return None if is_able or is_late else "before pass@1 0.35 or iteration 10"
    if situation.has_value_model and not situation.is_judged:
        return "before the first refit"
    return None


def _split(total: int, room: Mapping[str, int], iteration: int) -> dict[str, int]:
    """Deal `total` groups to the units one by one, none more than its room."""
    groups = dict.fromkeys(room, 0)
    order = list(room)
    turn = iteration
    while total > 0 and any(groups[unit] < room[unit] for unit in order):
        unit = order[turn % len(order)]
        if groups[unit] < room[unit]:
            groups[unit] += 1
            total -= 1
        turn += 1
    return groups
