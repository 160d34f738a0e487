"""What the groups of an iteration are, and the sequences that are drawn for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.studies.forgetting.policy import Sequences, draw
from benchmarks.studies.forgetting.world import (
    SAFE,
    Flags,
    Floats,
    Ints,
    Parts,
    Settings,
    World,
)


@dataclass(frozen=True)
class Layout:
    """Groups of an iteration: D of drills, G of hard prompts, B sequences each."""

    class_SD: Ints
    """Class of each drill group."""
    prompt_SG: Ints
    given_SG: Ints
    """Idea that is given; SAFE = none: the prompt's own attempts."""
    success_SG: Ints
    """Kept success that takes the place of the group's first sequence; -1 = none."""
    group_size: int

    @property
    def is_old_SH(self) -> Flags:
        """True for sequences that are not sampled now: old successes."""
        is_old_SGB = np.zeros((*self.prompt_SG.shape, self.group_size), dtype=bool)
        is_old_SGB[..., 0] = self.success_SG >= 0
        return is_old_SGB.reshape(len(is_old_SGB), -1)

    @property
    def is_own_SH(self) -> Flags:
        """True for sequences that are sampled now from the prompt alone."""
        return (self.repeat(self.given_SG) == SAFE) & ~self.is_old_SH

    def repeat(self, column_SG: Ints) -> Ints:
        """Return a number of each group for each of its sequences."""
        return np.repeat(column_SG, self.group_size, axis=1)


def lay_out(
    settings: Settings, iteration: int, uniform_SX: Floats, picks: Sequence[Ints], unit: str | None
) -> Layout:
    """Choose prompts at random, the last groups by the picks.

    Args:
        settings: sizes.
        iteration: from 1; decides which drills are open.
        uniform_SX: [S, N + D] uniform numbers.
        picks: of each seed, rows (prompt, entry).
        unit: what the entries are.
    """
    s = settings
    num_open = min(s.num_classes, 1 + (iteration - 1) // s.stagger if s.stagger else s.num_classes)
    class_SD = (uniform_SX[:, s.num_prompts :] * num_open).astype(np.int64)
    prompt_SG = np.argsort(uniform_SX[:, : s.num_prompts], axis=1)[:, : s.hard_groups]
    given_SG, success_SG = np.full_like(prompt_SG, SAFE), np.full_like(prompt_SG, -1)
    for seed, rows in enumerate(picks):
        last = slice(s.hard_groups - len(rows), s.hard_groups)
        prompt_SG[seed, last] = rows[:, 0]
        if unit == "state":
            given_SG[seed, last] = rows[:, 1]
        elif unit == "trajectory":
            success_SG[seed, last] = rows[:, 1]
    return Layout(class_SD, prompt_SG, given_SG, success_SG, s.group_size)


def sample(world: World, layout: Layout, chances: Parts, uniform_SX: Floats) -> Sequences:
    """Draw the sequences of a layout, [S, Q (L + 2)] uniform numbers; old ones are put in place."""
    class_SH = world.class_N[layout.prompt_SG]
    class_SQ = layout.repeat(np.concatenate([layout.class_SD, class_SH], axis=1))
    prompt_SH = layout.repeat(layout.prompt_SG)
    num_hard = prompt_SH.shape[1]
    idea_SH, finish_SH, skill_SX = np.split(uniform_SX, [num_hard, 2 * num_hard], axis=1)
    skill_SQL = skill_SX.reshape(*class_SQ.shape, -1)
    drawn = draw(chances, class_SQ, prompt_SH, Parts(idea_SH, skill_SQL, finish_SH))
    idea, skill, finish = drawn.tokens
    given_SH, is_old_SH = layout.repeat(layout.given_SG), layout.is_old_SH
    idea[given_SH != SAFE] = given_SH[given_SH != SAFE]
    seed, place = np.nonzero(is_old_SH)
    prompt = prompt_SH[seed, place]
    idea[seed, place] = world.right_idea_SN[seed, prompt]
    skill[:, -num_hard:][seed, place] = world.key_SCL[seed, world.class_N[prompt]]
    finish[seed, place] = world.finish_SN[seed, prompt]
    return drawn
