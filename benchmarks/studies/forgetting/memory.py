"""What runs remember of their samples, as far as replay needs it."""

import numpy as np

from benchmarks.studies.forgetting.critic import Critic
from benchmarks.studies.forgetting.policy import Sequences
from benchmarks.studies.forgetting.world import (
    SAFE,
    Flags,
    Floats,
    Ints,
    Parts,
    World,
    right_token_chances,
)
from rrl_core.replay.credit import RECENT_ATTEMPTS
from rrl_core.replay.outcomes import SUCCESS

KEPT = 4  # successes a prompt


class Memory:
    """History of S seeds. U = RECENT_ATTEMPTS, newest last; V = KEPT, newest first."""

    def __init__(self, world: World):
        s = world.settings
        prompts = world.right_idea_SN.shape
        ideas, kept = (*prompts, s.num_ideas + 1), (*prompts, KEPT)
        self._world = world
        self.seen_SNA = np.zeros(ideas, dtype=np.int64)
        """Iteration of the first own sample of an idea; 0 = never."""
        self.chance_SNA = np.ones(ideas)
        """Its probability then."""
        self.value_SNA = np.zeros(ideas)
        """V(x, a) then."""
        self.prompt_value_SNA = np.zeros(ideas)
        """V(x) then."""
        self.recent_SNU = np.full((*prompts, RECENT_ATTEMPTS), np.nan)
        """Rewards of a prompt's own attempts."""
        self.continued_SNAU = np.full((*ideas, RECENT_ATTEMPTS), np.nan)
        """Rewards of an idea's continuations."""
        self.solved_SNV = np.zeros(kept, dtype=np.int64)
        """Iterations of own successes; 0 = none."""
        self.solved_chances = Parts(np.ones(kept), np.ones((*kept, s.skill_tokens)), np.ones(kept))
        """Probabilities of their tokens then."""

    def recent_mean(self) -> Floats:
        """Return m_x, [S, N]; 0 before the first attempt."""
        return np.nansum(self.recent_SNU, -1) / np.maximum(1, counts(self.recent_SNU)[1])

    def add_ideas(
        self, iteration: int, sequences: Sequences, is_own_SH: Flags, chances: Parts, critic: Critic
    ) -> None:
        """Remember ideas that were sampled for the first time."""
        seed, prompt_SH = sequences.contexts.idea
        at = (np.broadcast_to(seed, prompt_SH.shape), prompt_SH, sequences.tokens.idea)
        is_new_SH = is_own_SH & (sequences.tokens.idea != SAFE) & (self.seen_SNA[at] == 0)
        new = tuple(index[is_new_SH] for index in at)
        self.seen_SNA[new] = iteration
        self.chance_SNA[new] = chances.idea[new]
        self.value_SNA[new] = critic.idea_values()[new]
        self.prompt_value_SNA[new] = critic.prompt_values()[new[:2]]

    def add_rewards(
        self, prompt_SG: Ints, given_SG: Ints, is_own_SGB: Flags, rewards_SGB: Floats
    ) -> None:
        """Remember rewards: of own attempts by prompt, of continuations by idea."""
        seeds = np.arange(len(prompt_SG))
        own_SGB = np.where(is_own_SGB, rewards_SGB, np.nan)
        continued_SGB = np.where(given_SG[..., None] != SAFE, rewards_SGB, np.nan)
        for g in range(prompt_SG.shape[1]):  # one by one: a prompt may come twice
            prompt_S = prompt_SG[:, g]
            _push(self.recent_SNU, (seeds, prompt_S), own_SGB[:, g])
            _push(self.continued_SNAU, (seeds, prompt_S, given_SG[:, g]), continued_SGB[:, g])

    def add_successes(
        self, iteration: int, prompt_SG: Ints, is_solved_SG: Flags, chances: Parts
    ) -> None:
        """Remember one success of each group that has one: all of an iteration are alike."""
        right = right_token_chances(self._world, chances)
        for seed, g in np.argwhere(is_solved_SG):
            at = (seed, prompt_SG[seed, g])
            for kept, new in zip(self.solved_chances, right, strict=True):
                kept[at] = np.concatenate([new[at][None], kept[at][:-1]])
            self.solved_SNV[at] = [iteration, *self.solved_SNV[at][:-1]]


def counts(rewards_U: Floats) -> tuple[Floats, Floats]:
    """Return successes and tries of windows [..., U]."""
    return (rewards_U >= SUCCESS).sum(-1), (~np.isnan(rewards_U)).sum(-1)


def _push(windows: Floats, at: tuple[Ints, ...], new_SB: Floats) -> None:
    """Append the rewards that are no NaN; NaN stands for room, which is at the front."""
    joined = np.concatenate([windows[at], new_SB], axis=-1)
    order = np.argsort(~np.isnan(joined), axis=-1, kind="stable")
    windows[at] = np.take_along_axis(joined, order, -1)[:, -windows.shape[-1] :]
