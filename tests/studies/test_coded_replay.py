"""What arms of the coded-transforms study go back to: states, trajectories and problems."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.studies.coded.arms import Arm, named
from benchmarks.studies.coded.learning import Learner, Rollouts
from benchmarks.studies.coded.policy import Policy, Shape, picked, token_logprobs
from benchmarks.studies.coded.replaying import Replayer
from benchmarks.studies.coded.training import Run
from benchmarks.studies.coded.values import PROMPT, CountedValues
from benchmarks.studies.coded.warm_start import start_policy
from benchmarks.studies.coded.world import CLASSES, Problems, attempt_prompts, decode, encode
from tests.studies.test_coded_study import EXACT, TINY, gradient

SIZE = 8


def group(problem, num_ok, answer="c52708."):
    """Return a problem's attempts, the first of them successes."""
    class_B = np.full(SIZE, CLASSES.index(problem[0]))
    problems = Problems(class_B, np.tile(encode(problem[1:]), (SIZE, 1)))
    completions = np.tile(encode(answer), (SIZE, 1))
    part = Rollouts(
        "attempt", attempt_prompts(problems), completions, np.zeros((SIZE, 7)), np.zeros(SIZE)
    )
    return problems, part, (np.arange(SIZE) < num_ok) * 1.0


def replayer(name, seed=0, **changes):
    return Replayer(replace(named([name])[0], **changes), seed, SIZE, num_iterations=40)


def names(replayed):
    return [decode(ids) for ids in replayed.problems.ids()]


def test_a_replayed_success_joins_a_smaller_fresh_group():
    history = replayer("rrl-trajectory")
    history.add(1, *group("A47291", 1))  # p_hat = 1.5 / 10
    assert len(history.pick(2)) == 0  # before pass@1 0.35 or iteration 10
    assert names(history.pick(10)) == ["A47291"]
    assert names(history.pick(11)) == []  # not twice in a row
    history.add(11, *group("A47291", 8))  # 9 of 16: no longer rarely solved
    assert len(history.pick(12)) == 0


@pytest.mark.parametrize(("name", "low", "high"), [("rrl-trajectory", 0, 0.2), ("uniform", 0.4, 1)])
def test_uniform_picks_do_not_follow_the_priority(name, low, high):
    num_old = 0
    for seed in range(200):
        history = replayer(name, seed)
        history.add(1, *group("A47291", 1))
        history.add(30, *group("B47291", 1))
        num_old += names(history.pick(31)) == ["A47291"]
    # Of horizon 10, exp(-2.9) to 1; a tenth of the prioritised arm's picks is uniform.
    assert low <= num_old / 200 <= high
    assert num_old / 200 < 0.6


def test_a_stale_trajectory_is_picked_by_what_its_problem_once_was():
    for name, is_picked in (("rrl-trajectory", False), ("stale", True)):
        history = replayer(name)
        history.add(1, *group("A47291", 1))
        history.add(11, *group("A47291", 8))
        assert bool(names(history.pick(12))) == is_picked


def test_stale_values_never_change_and_others_do():
    for name, is_same in (("rrl-state-stale", True), ("rrl-state", False)):
        history = replayer(name)
        history.add(1, *group("A47291", 1))
        (before,) = history.pick(2).entries
        first = history.picks[0]
        history.add_continuations(2, before, np.zeros(SIZE))
        history.pick(4)
        second = history.picks[0]
        assert second.entry_id == first.entry_id
        assert (second.value == first.value) == is_same
        assert second.value <= first.value


def test_a_state_is_the_first_half_of_an_attempt_of_an_unsolved_problem():
    history = replayer("rrl-state")
    history.add(1, *group("A47291", 8))  # solved: nothing to go back to
    history.add(1, *group("B47291", 0))
    (state,) = history.pick(2).entries
    assert (names(history.pick(4)), decode(state.tokens), state.cut) == (["B47291"], "c52", "half")


def test_the_credit_of_a_prefix_is_by_how_much_continuations_beat_the_problem():
    history = replayer("rrl-state")
    history.add(1, *group("A47291", 1))
    (state,) = history.pick(2).entries
    credit = history.add_continuations(2, state, np.array([1.0] * 4 + [0.0] * 4))
    assert credit == pytest.approx((0.5 - 0.125) / 0.3)
    assert history.add_continuations(3, state, np.zeros(SIZE)) == 0


def test_a_state_that_is_carried_through_is_not_gone_back_to():
    history = replayer("rrl-state")
    history.add(1, *group("A47291", 1))
    (state,) = history.pick(2).entries
    history.add_continuations(2, state, np.ones(SIZE))
    assert len(history.pick(4)) == 0


def test_a_problem_that_was_solved_and_is_failing_is_retried_first():
    picks = []
    for seed in range(40):
        history = replayer("rrl-prompt", seed, uniform_share=0.0)
        history.add(1, *group("A47291", 0))
        history.add(1, *group("B47291", 1))
        history.add(1, *group("C47291", 8))  # solved: 8.5 of 10
        picks += names(history.pick(2))
    assert picks.count("B47291") >= 38  # exp(8.5) to 1
    assert "C47291" not in picks


def test_values_count_what_others_came_to_and_fade():
    values = CountedValues(half_life=10.0)
    key, other = (0, 1, 2, 3, 4, 5), (0, 5, 4, 3, 2, 1)
    own, others = values.place(key, 40), values.place(other, 40)
    values.add(own, True, 1, is_continuation=False)
    assert values.judge([own], 1) == pytest.approx([0.25])  # its own success is left out
    values.add(others, True, 1, is_continuation=True)
    assert values.judge([own], 1) == pytest.approx([4.5 / 6])
    assert values.judge([own], 11) == pytest.approx([2.5 / 4])
    assert values.judge([values.place(key, PROMPT)], 1) == pytest.approx([0.25])


def credited(policy, credit):
    prompts = np.random.default_rng(0).integers(58, size=(3, 7))
    given = np.random.default_rng(1).integers(58, size=(3, 3))
    rest = np.random.default_rng(2).integers(58, size=(3, 4))
    start = np.concatenate([prompts, given], axis=1)
    continued = Rollouts("continuation", start, rest, np.zeros((3, 4)), np.array([1.0, -0.5, -0.5]))
    prefix = Rollouts("prefix", prompts, given, np.zeros((3, 3)), np.full(3, 2.0))
    learner = Learner(policy, policy, Arm("", unit="state", credit=credit))
    return continued, prefix, learner


def test_a_prefix_gets_no_gradient_without_credit_and_its_mean_with_it():
    torch.manual_seed(0)
    policy = Policy(Shape(width=16, layers=2, heads=2))
    continued, prefix, learner = credited(policy, "none")
    alone = gradient(policy, learner.loss([continued]))
    assert torch.allclose(gradient(policy, learner.loss([continued, prefix])), alone, atol=EXACT)
    _, _, learner = credited(policy, "direct")
    got = gradient(policy, learner.loss([continued, prefix])) - alone
    ids = torch.from_numpy(np.concatenate([prefix.prompts, prefix.completions], axis=1))
    given = picked(token_logprobs(policy, ids), ids[:, 1:])[:, -3:].mean(dim=1)
    expected = gradient(policy, -2.0 * given.sum() / 3)  # N counts the three continuations
    assert expected.abs().max() > 100 * EXACT
    assert torch.allclose(got, expected, atol=EXACT)


def test_continuations_start_from_the_state_and_pay_for_the_group_they_replace(
    tmp_path, monkeypatch
):
    start = start_policy(TINY.warm, 0, 0.1, tmp_path)
    run = Run(TINY, replace(named(["rrl-state"])[0], prompts=2), 0, start)
    learned = []
    monkeypatch.setattr(run._learner, "step", learned.append)
    monkeypatch.setattr(
        "benchmarks.studies.coded.training.rewards",
        lambda world, problems, answers: np.arange(len(answers)) % 2 * 1.0,
    )
    run.iterate()
    run.iterate()
    (state,) = run.journal.rows["states"]
    continued = [row for row in run.journal.rows["rollouts"] if row["role"] == "continuation"]
    (part,) = (part for part in learned[1] if part.term == "continuation")
    assert len(continued) == len(part) == TINY.group_size
    assert run.sampler.num_sequences == 4 * TINY.group_size
    given = state["prefix_tokens"]
    old = {decode(p[7:]) for p in part.prompts}
    assert old == {row["completion"][:given] for row in continued}
    assert len(old) == 1
    assert {row["outcome"] for row in run.journal.rows["retries"]} <= {
        "rescued",
        "retained",
        "regressed",
        "still_failed",
    }
