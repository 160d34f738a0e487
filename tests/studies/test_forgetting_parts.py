"""The environment, the policy and the value model of the forgetting study, each by itself."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.studies.forgetting.advantages import gae_advantages, group_advantages
from benchmarks.studies.forgetting.arms import Arm
from benchmarks.studies.forgetting.critic import Critic
from benchmarks.studies.forgetting.layout import Layout, sample
from benchmarks.studies.forgetting.learning import Batch, learn
from benchmarks.studies.forgetting.memory import Memory
from benchmarks.studies.forgetting.policy import (
    Policy,
    Sequences,
    entropy_gradient,
    log_gradient,
    token_chances,
)
from benchmarks.studies.forgetting.training import Runs, train
from benchmarks.studies.forgetting.world import (
    SAFE,
    Parts,
    Settings,
    drill_rewards,
    expected_reward,
    greedy,
    hard_rewards,
    make_world,
    right_token_chances,
)
from rrl_core.algorithms.corrections import CORRECTIONS, Correction
from rrl_core.algorithms.prefix_credit import PREFIX_CREDITS

EXACT = 1e-12
GRADIENT_TOLERANCE = 1e-6
SMALL = Settings(
    num_prompts=3, num_classes=2, num_ideas=2, skill_tokens=2, symbols=2, iterations=12,
    stagger=2, drill_groups=1, hard_groups=2, replay_groups=1, group_size=4,
)  # fmt: skip


def world_of(settings, num_seeds=1):
    return make_world(settings, [np.random.default_rng(seed) for seed in range(num_seeds)])


def random_chances(settings, num_seeds=1, seed=0):
    draws = np.random.default_rng(seed)
    s = settings
    shapes = [
        (num_seeds, s.num_prompts, s.num_ideas + 1),
        (num_seeds, s.num_classes, s.skill_tokens, s.symbols),
        (num_seeds, s.num_prompts, s.symbols),
    ]
    return Parts(*(draws.dirichlet(np.ones(shape[-1]), shape[:-1]) for shape in shapes))


def test_the_exact_reward_is_that_of_all_sequences():
    world, chances = world_of(SMALL), random_chances(SMALL)
    total = 0.0
    for x, a, d1, d2, f in itertools.product(range(3), range(3), range(2), range(2), range(2)):
        skill = chances.skill[0, x % 2]
        chance = chances.idea[0, x, a] * skill[0, d1] * skill[1, d2] * chances.finish[0, x, f]
        columns = (np.array([[n]]) for n in (x, a))
        reward = hard_rewards(world, *columns, np.array([[[d1, d2]]]), np.array([[f]]))
        total += chance * reward[0, 0] / 3
    assert expected_reward(world, chances) == pytest.approx([total], abs=EXACT)


def test_the_exact_reward_is_the_mean_of_samples():
    settings = replace(Settings(), num_ideas=3, drill_groups=1, hard_groups=24, group_size=2000)
    world, chances = world_of(settings), random_chances(settings)
    none = np.full((1, 24), -1)
    layout = Layout(np.array([[0]]), np.arange(24)[None], np.full((1, 24), SAFE), none, 2000)
    num_uniform = 2 * 48_000 + 50_000 * settings.skill_tokens
    sequences = sample(world, layout, chances, np.random.default_rng(1).random((1, num_uniform)))
    idea, skill, finish = sequences.tokens
    rewards = hard_rewards(world, sequences.prompt_SH, idea, skill[:, 2000:], finish)
    error = rewards.std() / math.sqrt(rewards.size)
    assert abs(rewards.mean() - expected_reward(world, chances)[0]) < 4 * error
    drills = drill_rewards(world, sequences.class_SQ[:, :2000], skill[:, :2000])
    right = np.take_along_axis(chances.skill, world.key_SCL[..., None], -1)[0, 0].mean()
    assert abs(drills.mean() - right) < 4 * drills.std() / math.sqrt(2000)


def test_rewards_by_hand():
    world = world_of(Settings())
    right, key, finish = world.right_idea_SN[0, 0], world.key_SCL[0, 0], world.finish_SN[0, 0]
    wrong_key = (key + 1) % 4
    half = np.concatenate([key[:2], wrong_key[2:]])
    cases = [
        (SAFE, wrong_key, finish, 0.4),
        (right % 30 + 1, key, finish, 0.0),  # a wrong idea
        (right, key, finish, 1.0),
        (right, key, (finish + 1) % 4, 0.3 * 4 / 5),
        (right, half, finish, 0.3 * 3 / 5),
    ]
    ideas, skills, finishes, expected = map(np.array, zip(*cases, strict=True))
    prompts = np.zeros((1, 5), dtype=int)
    rewards = hard_rewards(world, prompts, ideas[None], skills[None], finishes[None])
    assert rewards[0] == pytest.approx(expected, abs=EXACT)
    assert drill_rewards(world, prompts, skills[None])[0] == pytest.approx([0, 1, 1, 1, 0.5])


def test_a_greedy_policy_takes_the_likeliest_tokens():
    chances = random_chances(SMALL)
    for part, chosen in zip(chances, greedy(chances), strict=True):
        assert (chosen.sum(-1) == 1).all()
        assert (chosen * part).sum(-1) == pytest.approx(part.max(-1), abs=EXACT)


def some_sequences(settings, num_seeds=1):
    world, draws = world_of(settings, num_seeds), np.random.default_rng(3)
    s = settings
    shape = (num_seeds, s.hard_groups)
    layout = Layout(
        draws.integers(s.num_classes, size=(num_seeds, s.drill_groups)),
        draws.integers(s.num_prompts, size=shape),
        np.full(shape, SAFE),
        np.full(shape, -1),
        s.group_size,
    )
    num_hard = s.hard_groups * s.group_size
    num_all = num_hard + s.drill_groups * s.group_size
    uniform = draws.random((num_seeds, 2 * num_hard + num_all * s.skill_tokens))
    return sample(world, layout, random_chances(settings, num_seeds), uniform)


def softmax(logits):
    powers = np.exp(logits)
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("is_entropy", [False, True])
def test_gradients_are_those_of_finite_differences(part, is_entropy):
    sequences = some_sequences(SMALL)
    draws = np.random.default_rng(4)
    logits = [np.log(chances) for chances in random_chances(SMALL)]
    weights = Parts(*(draws.normal(size=token.shape) for token in sequences.tokens))

    def value(logits):
        chances = Parts(*map(softmax, logits))
        if is_entropy:
            entropies = [-(c * np.log(c)).sum(-1) for c in chances]
            terms = [e[at] for e, at in zip(entropies, sequences.contexts, strict=True)]
        else:
            terms = [np.log(c) for c in token_chances(chances, sequences)]
        return sum((w * t).sum() for w, t in zip(weights, terms, strict=True))

    gradient = (entropy_gradient if is_entropy else log_gradient)(
        Parts(*map(softmax, logits)), sequences, weights
    )[part]
    for place in np.ndindex(gradient.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = [each.copy() for each in logits]
            moved[part][place] += step
            ends.append(value(moved))
        difference = (ends[0] - ends[1]) / 2e-5
        assert gradient[place] == pytest.approx(difference, abs=GRADIENT_TOLERANCE)


def test_a_step_raises_the_shared_logit_by_the_mean_over_groups():
    policy = Policy(SMALL, 1)
    gradient = Parts(np.zeros((1, 3, 3)), np.zeros((1, 2, 2, 2)), np.zeros((1, 3, 2)))
    gradient.idea[0, 0, 1] = 1.0
    policy.ascend(gradient, 2.0)
    # own logit 2; shared b = 2 * 0.3 * 1 / 2 groups = 0.3, which counts 0.3 times: 0.09
    ratios = policy.chances().idea[0, :, 1] / policy.chances().idea[0, :, 0]
    assert np.log(ratios) == pytest.approx([2.09, 0.09, 0.09], abs=EXACT)


def test_group_advantages_by_hand():
    sequences = some_sequences(SMALL)
    rewards = np.array([[1.0, 0, 0, 0] * 3])
    advantages = group_advantages(sequences, rewards, 4)
    # mean 0.25, std with n - 1: 0.5
    expected = [0.75 / 0.51, -0.25 / 0.51, -0.25 / 0.51, -0.25 / 0.51]
    assert advantages.idea[0, :4] == pytest.approx(expected, abs=EXACT)
    assert advantages.skill[0, :4, 0] == pytest.approx(expected, abs=EXACT)


def test_gae_is_what_a_loop_over_the_tokens_gives():
    sequences = some_sequences(SMALL, num_seeds=2)
    critic = Critic(SMALL, 2)
    rewards = np.random.default_rng(5).random(sequences.class_SQ.shape)
    everything = np.ones_like(sequences.tokens.idea, dtype=bool)
    critic.learn(sequences, rewards, everything, np.ones(rewards.shape, dtype=bool))
    advantages = gae_advantages(sequences, rewards, critic)
    states = critic.state_values(sequences)
    firsts = []
    for seed, q in np.ndindex(rewards.shape):
        h = q - SMALL.group_size * SMALL.drill_groups
        values = list(states[seed, q])
        if h < 0:
            values = values[:-1]  # a drill ends before the finish token
        else:
            values = [critic.prompt_values()[seed, sequences.prompt_SH[seed, h]], *values]
            if sequences.tokens.idea[seed, h] == SAFE:
                values = values[:1]
        ahead, gae = 0.0, []
        for value, after in reversed(list(itertools.pairwise([*values, rewards[seed, q]]))):
            ahead = after - value + 0.95 * ahead
            gae.insert(0, ahead)
        got = list(advantages.skill[seed, q]) if h < 0 else [advantages.idea[seed, h]]
        if len(values) > 2 and h >= 0:
            got += [*advantages.skill[seed, q], advantages.finish[seed, h]]
        if h >= 0:
            firsts.append((seed, gae[0]))
        scale = np.array(got) / gae
        assert scale == pytest.approx(scale[0], rel=1e-9)  # one scale a seed
    for seed in (0, 1):
        rms = math.sqrt(np.mean([first**2 for s, first in firsts if s == seed]))
        h0 = next(first for s, first in firsts if s == seed)
        assert advantages.idea[seed, 0] == pytest.approx(h0 / (rms + 0.01), rel=1e-9)


def test_the_value_model_steps_toward_what_came_out():
    settings = replace(SMALL, hard_groups=1, group_size=1, drill_groups=0)
    tokens = Parts(np.array([[1]]), np.array([[[0, 1]]]), np.array([[0]]))
    sequences = Sequences(np.array([[0]]), np.array([[0]]), tokens)
    critic = Critic(settings, 1)
    yes = np.ones((1, 1), dtype=bool)
    start = 1 / (1 + math.e)  # sigma(-1), of every value at first
    critic.learn(sequences, np.ones((1, 1)), yes, yes)
    error = 1 - start

    def sigma(logit):
        return 1 / (1 + math.exp(-logit))

    assert critic.prompt_values()[0, 0] == pytest.approx(sigma(-1 + 0.1 * error), abs=EXACT)
    assert critic.idea_values()[0, 0, 1] == pytest.approx(sigma(-1 + 0.53 * error), abs=EXACT)
    # before token 2: u 0.5, k 0.03, and e of token 1, which saw two later errors: 0.06
    assert critic.state_values(sequences)[0, 0] == pytest.approx(
        [sigma(-1 + rate * error) for rate in (0.53, 0.59, 0.62)], abs=EXACT
    )


def credited_chances(arm, attempts):
    """The right idea's chance before and after a step on continuations that all succeed."""
    settings = replace(SMALL, hard_groups=1)
    world = world_of(settings)
    policy, critic, memory = Policy(settings, 1), Critic(settings, 1), Memory(world)
    policy._own.skill[np.eye(2, dtype=bool)[world.key_SCL]] = 20.0  # the skill has been learned
    policy._own.finish[np.eye(2, dtype=bool)[world.finish_SN]] = 20.0
    memory.recent_SNU[:] = attempts
    memory.chance_SNA[:] = policy.chances().idea * 0.5  # it was rarer when it was sampled
    given = world.right_idea_SN[:, :1]
    layout = Layout(np.array([[0]]), np.array([[0]]), given, np.array([[-1]]), 4)
    chances = policy.chances()
    uniform = np.random.default_rng(0).random((1, 2 * 4 + 8 * settings.skill_tokens))
    sequences = sample(world, layout, chances, uniform)
    batch = Batch(1, layout, chances, sequences, np.ones((1, 8)))
    learn(arm, policy, critic, memory, batch)
    return [right_token_chances(world, c).idea[0, 0] for c in (chances, policy.chances())]


def test_the_idea_becomes_likelier_only_where_credit_reaches_it():
    state = Arm("", unit="state", settings=replace(SMALL, hard_groups=1))
    before, masked = credited_chances(replace(state, credit="none"), attempts=0.0)
    assert masked == before
    for credit in ("direct", "corrected"):
        before, after = credited_chances(replace(state, credit=credit), attempts=0.0)
        assert after > 1.2 * before
        before, after = credited_chances(replace(state, credit=credit), attempts=1.0)
        assert after == before  # no better than the prompt's own attempts
    gated = replace(state, credit="direct", has_gates=True)
    assert credited_chances(gated, attempts=0.0)[1] > before
    assert credited_chances(gated, attempts=0.5)[1] > before  # half a reward is no success


@pytest.mark.parametrize("credit", ["direct", "corrected"])
def test_a_given_idea_is_weighed_by_the_products_own_credit(monkeypatch, credit):
    arm = Arm("", unit="state", credit=credit, settings=replace(SMALL, hard_groups=1))
    monkeypatch.setitem(PREFIX_CREDITS, credit, lambda policy, *others: torch.zeros_like(policy))
    before, after = credited_chances(arm, attempts=0.0)
    assert after == before


def replayed_chances(sampled_at):
    """The right idea's chance before and after a step on an old success among failures."""
    settings = replace(SMALL, hard_groups=1)
    world = world_of(settings)
    policy, critic, memory = Policy(settings, 1), Critic(settings, 1), Memory(world)
    for kept in memory.solved_chances:
        kept[:] = sampled_at
    layout = Layout(np.array([[0]]), np.array([[0]]), np.array([[SAFE]]), np.array([[0]]), 4)
    chances = policy.chances()
    uniform = np.random.default_rng(0).random((1, 2 * 4 + 8 * settings.skill_tokens))
    sequences = sample(world, layout, chances, uniform)
    sequences.tokens.idea[:, 1:] = SAFE
    rewards = np.array([[0.5, 0.5, 0.5, 0.5, 1.0, 0.4, 0.4, 0.4]])
    arm = Arm("", unit="trajectory", settings=settings)
    learn(arm, policy, critic, memory, Batch(1, layout, chances, sequences, rewards))
    return [right_token_chances(world, c).idea[0, 0] for c in (chances, policy.chances())]


def test_an_old_success_is_weighed_by_the_products_own_correction(monkeypatch):
    # ideas have a chance of 1/3 at first: of tokens as likely when sampled, rarer, and certain
    before, same = replayed_chances(1 / 3)
    _, rarer = replayed_chances(0.01)
    _, certain = replayed_chances(1.0)
    assert before < certain < same < rarer
    assert replayed_chances(0.1)[1] == rarer  # 1/3 to 0.1 is cut to 2 already

    def nothing(log_ratio_BT, loss_mask_BT, cap):
        return Correction(torch.zeros_like(log_ratio_BT), loss_mask_BT)

    monkeypatch.setitem(CORRECTIONS, "token_truncate", nothing)
    assert replayed_chances(1 / 3)[1] < same


def test_a_run_does_not_depend_on_those_beside_it():
    arm = Arm("", unit="state", settings=SMALL)
    alone, beside = train(arm, [3]), train(arm, [1, 3])
    assert alone.reward[0] == pytest.approx(beside.reward[1], abs=EXACT)
    again = train(arm, [1, 3])
    assert (again.reward == beside.reward).all()
    assert (again.num_sequences == 12 * 3 * 4).all()


@pytest.mark.parametrize("unit", ["state", "trajectory", "prompt"])
def test_only_what_was_sampled_is_gone_back_to(unit):
    arm = Arm("", unit=unit, settings=replace(SMALL, iterations=40))
    runs = Runs(arm, [0, 1])
    num_picks = 0
    for iteration in range(1, 41):
        memory = runs._memory
        for seed, rows in enumerate(runs._picker.pick(iteration, memory, runs._critic)):
            num_picks += len(rows)
            for x, entry in rows:
                if unit == "state":
                    assert memory.seen_SNA[seed, x, entry] > 0
                    assert entry != SAFE
                elif unit == "trajectory":
                    assert memory.solved_SNV[seed, x, entry] > 0
                else:
                    assert not np.isnan(memory.recent_SNU[seed, x]).all()
        runs.iterate(iteration)
    assert num_picks > 0
