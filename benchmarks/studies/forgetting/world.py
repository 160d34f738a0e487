"""The environment: prompts where a safe answer pays some, and one of many ideas pays all.

- Hard prompt x of class c(x) = x mod C: token 1 is SAFE (0: ends with reward s) or one of M ideas;
  then L skill tokens and a finish token, of K symbols each. The reward is 0 for a wrong idea; for
  the right one 1 if all L + 1 tokens are right, else q times the fraction that is: less than SAFE.
- Drill prompt of class c: L skill tokens of the class's key, reward = fraction right. Skill so
  grows whatever happens to the ideas. Drills of class c open at iteration `stagger` * c.

Everything is batched over S seeds, the first axis; each seed draws from a generator of its own, so
a run does not depend on the seeds beside it.

Suffixes: S seeds, N hard prompts, A = M + 1 first tokens, C classes, L skill tokens, K symbols;
Q sequences of an iteration, the D of drills first, then the H of hard prompts; G hard groups.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SAFE = 0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Settings:
    """Sizes and rewards of the environment."""

    num_prompts: int = 24
    num_classes: int = 6
    num_ideas: int = 30
    skill_tokens: int = 4
    symbols: int = 4
    safe_reward: float = 0.4
    partial_reward: float = 0.3
    stagger: int = 50
    iterations: int = 400
    drill_groups: int = 4
    hard_groups: int = 12
    replay_groups: int = 4
    group_size: int = 8


@dataclass(frozen=True)
class World:
    """The hidden truth of each seed."""

    settings: Settings
    right_idea_SN: Ints
    """In 1..M."""
    key_SCL: Ints
    finish_SN: Ints

    @property
    def class_N(self) -> Ints:
        return np.arange(self.settings.num_prompts) % self.settings.num_classes


class Parts(NamedTuple):
    """One array for each kind of token.

    Of a policy (logits, probabilities, gradients): [S, N, A], [S, C, L, K] and [S, N, K].
    """

    idea: Any
    skill: Any
    finish: Any


def make_world(settings: Settings, generators: list[np.random.Generator]) -> World:
    """Draw the truth of each seed."""
    s = settings
    return World(
        s,
        np.stack([g.integers(1, s.num_ideas + 1, s.num_prompts) for g in generators]),
        np.stack([g.integers(s.symbols, size=(s.num_classes, s.skill_tokens)) for g in generators]),
        np.stack([g.integers(s.symbols, size=s.num_prompts) for g in generators]),
    )


def hard_rewards(
    world: World, prompt_SH: Ints, idea_SH: Ints, skill_SHL: Ints, finish_SH: Ints
) -> Floats:
    """Return the rewards of hard prompts' sequences, [S, H]."""
    s = world.settings
    seed = np.arange(len(prompt_SH))[:, None]
    num_right = (skill_SHL == world.key_SCL[seed, world.class_N[prompt_SH]]).sum(-1)
    num_right += finish_SH == world.finish_SN[seed, prompt_SH]
    last = s.skill_tokens + 1
    reward = np.where(num_right == last, 1.0, s.partial_reward * num_right / last)
    reward = np.where(idea_SH == world.right_idea_SN[seed, prompt_SH], reward, 0.0)
    return np.where(idea_SH == SAFE, s.safe_reward, reward)


def drill_rewards(world: World, class_SD: Ints, skill_SDL: Ints) -> Floats:
    """Return the rewards of drills, [S, D]."""
    seed = np.arange(len(class_SD))[:, None]
    return (skill_SDL == world.key_SCL[seed, class_SD]).mean(-1)


def right_token_chances(world: World, chances: Parts) -> Parts:
    """Return the probability of each right token of a hard prompt, [S, N], [S, N, L], [S, N]."""
    skill_SCL = np.take_along_axis(chances.skill, world.key_SCL[..., None], -1)[..., 0]
    return Parts(
        np.take_along_axis(chances.idea, world.right_idea_SN[..., None], -1)[..., 0],
        skill_SCL[:, world.class_N],
        np.take_along_axis(chances.finish, world.finish_SN[..., None], -1)[..., 0],
    )


def success_chances(world: World, chances: Parts) -> Floats:
    """Return the probability of solving each hard prompt, [S, N]."""
    right = right_token_chances(world, chances)
    return right.idea * right.skill.prod(-1) * right.finish


def expected_reward(world: World, chances: Parts) -> Floats:
    """Return J, [S]: the exact mean reward of the hard prompts.

    J = mean_x [pi(SAFE|x) s + pi(a*|x) (p_all + q (E[f] - p_all))]
    """
    s = world.settings
    right = right_token_chances(world, chances)
    all_SN = right.skill.prod(-1) * right.finish
    fraction_SN = (right.skill.sum(-1) + right.finish) / (s.skill_tokens + 1)
    finished_SN = all_SN + s.partial_reward * (fraction_SN - all_SN)
    return (chances.idea[:, :, SAFE] * s.safe_reward + right.idea * finished_SN).mean(-1)


def greedy(chances: Parts) -> Parts:
    """Return the policy that always takes the likeliest token."""
    return Parts(*(np.eye(part.shape[-1])[part.argmax(-1)] for part in chances))
