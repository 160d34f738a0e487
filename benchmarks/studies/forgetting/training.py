"""An arm, trained on several seeds at once, and what came out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.studies.forgetting.arms import Arm
from benchmarks.studies.forgetting.critic import Critic
from benchmarks.studies.forgetting.layout import lay_out, sample
from benchmarks.studies.forgetting.learning import Batch, learn
from benchmarks.studies.forgetting.memory import Memory
from benchmarks.studies.forgetting.picking import Picker
from benchmarks.studies.forgetting.policy import Policy, Sequences
from benchmarks.studies.forgetting.world import (
    Flags,
    Floats,
    Parts,
    drill_rewards,
    expected_reward,
    greedy,
    hard_rewards,
    make_world,
    right_token_chances,
    success_chances,
)
from rrl_core.replay.outcomes import SUCCESS

LOST_IDEA, LOST_SUCCESS = 0.01, 0.2


@dataclass(frozen=True)
class Result:
    """What an arm reached, by seed [S]; NaN where a share is of nothing."""

    reward: Floats
    """Final J."""
    greedy_reward: Floats
    area: Floats
    """Mean of J over the iterations."""
    idea_lost: Floats
    """Of the prompts whose right idea was sampled: share where its chance is below 0.01."""
    solved_lost: Floats
    """Of the prompts once solved: share solved with a chance below 0.2."""
    recovered: Floats
    """Of the prompts whose right idea was lost at some time: share where it is not now."""
    num_sequences: Floats
    """Sequences that were sampled."""


def train(arm: Arm, seeds: Sequence[int], advance: Callable[[], None] = lambda: None) -> Result:
    """Train an arm; `advance` is called after each iteration."""
    runs = Runs(arm, seeds)
    for iteration in range(1, arm.settings.iterations + 1):
        runs.iterate(iteration)
        advance()
    return runs.result()


class Runs:
    """The runs of an arm."""

    def __init__(self, arm: Arm, seeds: Sequence[int]):
        self._arm, s = arm, arm.settings
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self.world = make_world(s, self._generators)
        self.policy = Policy(s, len(seeds))
        self._critic = Critic(s, len(seeds), arm.has_skill_term)
        self._memory = Memory(self.world)
        self._picker = Picker(arm, seeds)
        self._sum_S = np.zeros(len(seeds))
        self._num_sequences_S = np.zeros(len(seeds))
        self._was_lost_SN = np.zeros(self.world.right_idea_SN.shape, dtype=bool)

    def iterate(self, iteration: int) -> None:
        """Run an iteration, counted from 1."""
        arm, s = self._arm, self._arm.settings
        picks = self._picker.pick(iteration, self._memory, self._critic)
        chosen_SX = self._uniform(s.num_prompts + s.drill_groups)
        layout = lay_out(s, iteration, chosen_SX, picks, arm.unit)
        chances = self.policy.chances(arm.temperature)
        num_hard = s.hard_groups * s.group_size
        num_all = num_hard + s.drill_groups * s.group_size
        drawn_SX = self._uniform(2 * num_hard + num_all * s.skill_tokens)
        sequences = sample(self.world, layout, chances, drawn_SX)
        batch = Batch(iteration, layout, chances, sequences, self._rewards(sequences))
        learn(arm, self.policy, self._critic, self._memory, batch)
        self._remember(batch)
        self._watch(num_all - layout.is_old_SH.sum(-1))

    def result(self) -> Result:
        """Return what the policies are worth now."""
        world, chances = self.world, self.policy.chances()
        is_seen_SN, is_lost_SN = self._ideas(chances)
        is_solved_SN = self._memory.solved_SNV[..., 0] > 0
        is_failing_SN = is_solved_SN & (success_chances(world, chances) < LOST_SUCCESS)
        return Result(
            reward=expected_reward(world, chances),
            greedy_reward=expected_reward(world, greedy(chances)),
            area=self._sum_S / self._arm.settings.iterations,
            idea_lost=_share(is_lost_SN, is_seen_SN),
            solved_lost=_share(is_failing_SN, is_solved_SN),
            recovered=_share(self._was_lost_SN & ~is_lost_SN, self._was_lost_SN),
            num_sequences=self._num_sequences_S,
        )

    def _uniform(self, num: int) -> Floats:
        return np.stack([generator.random(num) for generator in self._generators])

    def _rewards(self, sequences: Sequences) -> Floats:
        num_drills = sequences.class_SQ.shape[1] - sequences.prompt_SH.shape[1]
        idea, skill, finish = sequences.tokens
        class_SD = sequences.class_SQ[:, :num_drills]
        drill_SD = drill_rewards(self.world, class_SD, skill[:, :num_drills])
        own_SH = hard_rewards(self.world, sequences.prompt_SH, idea, skill[:, num_drills:], finish)
        return np.concatenate([drill_SD, own_SH], axis=1)

    def _remember(self, batch: Batch) -> None:
        iteration, layout, sequences = batch.iteration, batch.layout, batch.sequences
        is_own_SH, num_hard = layout.is_own_SH, layout.is_own_SH.shape[1]
        is_learned_SQ = np.ones(batch.rewards_SQ.shape, dtype=bool)
        is_learned_SQ[:, -num_hard:] = is_own_SH | self._arm.learns_from_replays
        self._memory.add_ideas(iteration, sequences, is_own_SH, batch.chances, self._critic)
        self._critic.learn(sequences, batch.rewards_SQ, is_own_SH, is_learned_SQ)
        groups = (*layout.prompt_SG.shape, layout.group_size)
        rewards_SGB = batch.rewards_SQ[:, -num_hard:].reshape(groups)
        is_own_SGB = is_own_SH.reshape(groups)
        self._memory.add_rewards(layout.prompt_SG, layout.given_SG, is_own_SGB, rewards_SGB)
        is_solved_SG = (is_own_SGB & (rewards_SGB >= SUCCESS)).any(-1)
        self._memory.add_successes(iteration, layout.prompt_SG, is_solved_SG, batch.chances)

    def _watch(self, num_sampled_S: Floats) -> None:
        chances = self.policy.chances()
        self._sum_S += expected_reward(self.world, chances)
        self._num_sequences_S += num_sampled_S
        self._was_lost_SN |= self._ideas(chances)[1]

    def _ideas(self, chances: Parts) -> tuple[Flags, Flags]:
        """Return where the right idea was sampled, and where it then is lost, [S, N]."""
        right_SN1 = self.world.right_idea_SN[..., None]
        is_seen_SN = np.take_along_axis(self._memory.seen_SNA, right_SN1, -1)[..., 0] > 0
        chance_SN = right_token_chances(self.world, chances).idea
        return is_seen_SN, is_seen_SN & (chance_SN < LOST_IDEA)


def _share(part_SN: Flags, whole_SN: Flags) -> Floats:
    whole_S = whole_SN.sum(-1)
    return np.where(whole_S > 0, part_SN.sum(-1) / np.maximum(1, whole_S), np.nan)
