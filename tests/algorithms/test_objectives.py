import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.algorithms.objectives import (
    ALGORITHMS,
    clipped_surrogate,
    negative_log_likelihood,
    sequence_surrogate,
)
from rrl_core.algorithms.reduce import Denominators, reduce_loss

OBJECTIVES = [clipped_surrogate, sequence_surrogate, negative_log_likelihood]
FLOAT32 = 1e-6
LN = math.log


def surrogate(ratios, advantages, mask=None, objective=clipped_surrogate, **settings):
    """Return (loss, its gradient by log-prob, metrics) for old log-probs of -1 and given ratios."""
    policy = torch.tensor([[-1.0 + LN(r) for r in row] for row in ratios], requires_grad=True)
    mask = torch.ones(policy.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    settings = {"clip_low": 0.2, "clip_high": 0.28} | settings
    loss, metrics = objective(
        policy, torch.full_like(policy, -1.0), torch.tensor(advantages), mask, **settings
    )
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    return loss.detach(), gradient, metrics


def test_the_surrogate_clips_only_where_that_lowers_the_gain():
    # A = 2:  u 0.5 -> min(1, 1.6) = 1;  u 1.1 -> 2.2;  u 1.5 -> min(3, 2.56), no gradient
    # A = -2: u 0.5 -> min(-1, -1.6), no gradient;  u 1.1 -> -2.2;  u 1.5 -> min(-3, -2.56) = -3
    # d(-u A)/d log pi = -u A
    loss, gradient, metrics = surrogate([[0.5, 1.1, 1.5]] * 2, [2.0, -2.0])
    expected = torch.tensor([[-1.0, -2.2, -2.56], [1.6, 2.2, 3.0]])
    torch.testing.assert_close(loss, expected, atol=FLOAT32, rtol=0)
    expected = torch.tensor([[-1.0, -2.2, 0.0], [0.0, 2.2, 3.0]])
    torch.testing.assert_close(gradient, expected, atol=FLOAT32, rtol=0)
    assert metrics["is_clipped_high"].tolist() == [[False, False, True], [False] * 3]
    assert metrics["is_clipped_low"].tolist() == [[False] * 3, [True, False, False]]
    torch.testing.assert_close(
        metrics["ratio"], torch.tensor([[0.5, 1.1, 1.5]] * 2), atol=FLOAT32, rtol=0
    )


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # A = -2, u = 5: min(-10, -2.56) = -10; bounded at 3 A = -6, no gradient. u = 2: -4 stays.
    # A = 2, u = 5: 2.56 as before.
    loss, gradient, _ = surrogate([[5.0, 2.0]] * 2, [-2.0, 2.0], dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([[6.0, 4.0], [-2.56, -2.56]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 4.0], [0.0, 0.0]]), atol=1e-5, rtol=0)


def test_on_policy_the_loss_is_minus_the_advantage_and_its_gradient_too():
    loss, gradient, metrics = surrogate([[1.0, 1.0]] * 2, [1.5, -0.5])
    expected = torch.tensor([[-1.5, -1.5], [0.5, 0.5]])
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, expected)
    assert torch.equal(metrics["ratio"], torch.ones(2, 2))


def test_ratios_are_clamped_before_they_are_exponentiated():
    # u = e^200 is infinite in float32; clamped: e^20 = 4.852e8. A < 0, so the ratio is not clipped.
    policy = torch.tensor([[-1.0, -201.0]], requires_grad=True)
    old = torch.tensor([[-201.0, -1.0]])
    loss, metrics = clipped_surrogate(
        policy, old, torch.tensor([-1.0]), torch.ones(1, 2, dtype=torch.bool),
        clip_low=0.2, clip_high=0.2,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert loss[0, 0].item() == pytest.approx(math.exp(20), rel=FLOAT32)
    assert metrics["ratio"][0, 1].item() == pytest.approx(math.exp(-20), rel=FLOAT32)
    assert torch.equal(gradient, torch.zeros(1, 2))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_rubbish_under_the_mask_changes_no_loss_and_no_gradient(objective, rubbish):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    outcomes = []
    for filler in (0.0, rubbish):
        filled = torch.full((2, 3), filler)
        policy = torch.where(mask, -1.0, filled).requires_grad_()
        old = torch.where(mask, -1.1, filled)
        advantages = torch.where(mask, 0.7, filled)
        loss, metrics = objective(
            policy, old, advantages, mask, clip_low=0.3, clip_high=0.3, dual_clip=3.0
        )
        (gradient,) = torch.autograd.grad(loss.sum(), policy)
        outcomes.append((loss.detach(), gradient, metrics["is_clipped_low"]))
    for plain, filled in zip(*outcomes, strict=True):
        assert torch.equal(plain, filled)
        assert not filled[~mask].any()


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_masked_tokens_never_matter(rubbish):
    policy = torch.tensor([[-1.0, rubbish]], requires_grad=True)
    old = torch.tensor([[-1.2, rubbish]])
    loss, metrics = clipped_surrogate(
        policy, old, torch.tensor([1.0]), torch.tensor([[True, False]]), clip_low=0.2, clip_high=0.3
    )
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    # e^0.2 = 1.221403, inside the clip range
    torch.testing.assert_close(
        loss.detach(), torch.tensor([[-1.221403, 0.0]]), atol=FLOAT32, rtol=0
    )
    torch.testing.assert_close(gradient, torch.tensor([[-1.221403, 0.0]]), atol=FLOAT32, rtol=0)
    assert not metrics["is_clipped_high"][0, 1]


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=6),
    st.floats(-2, 2),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
)
def test_the_surrogate_follows_a_float64_loop(log_ratios, advantage, low, high):
    loss, _, _ = surrogate(
        [[math.exp(d) for d in log_ratios]],
        [advantage],
        clip_low=low,
        clip_high=high,
        dual_clip=3.0,
    )
    for t, d in enumerate(log_ratios):
        u = math.exp(d)
        gain = min(u * advantage, min(max(u, 1 - low), 1 + high) * advantage)
        if advantage < 0:
            gain = max(gain, 3.0 * advantage)
        assert loss[0, t].item() == pytest.approx(-gain, rel=1e-5, abs=1e-5)


def test_tokens_may_have_advantages_of_their_own():
    # u = 1.5, clip 1.28: A = 2 -> -min(3, 2.56) = -2.56, clipped;  A = -1 -> 1.5;  A = 0 -> 0
    loss, gradient, metrics = surrogate([[1.5, 1.5, 1.5]], [[2.0, -1.0, 0.0]])
    torch.testing.assert_close(loss, torch.tensor([[-2.56, 1.5, 0.0]]), atol=FLOAT32, rtol=0)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 1.5, 0.0]]), atol=FLOAT32, rtol=0)
    assert metrics["is_clipped_high"].tolist() == [[True, False, False]]


@pytest.mark.parametrize("objective", [clipped_surrogate, sequence_surrogate])
def test_an_advantage_of_the_row_is_one_of_each_of_its_tokens(objective):
    ratios = [[0.5, 1.1, 1.5], [0.9, 1.6, 1.0]]
    of_rows = surrogate(ratios, [1.5, -2.0], objective=objective, dual_clip=1.1)
    of_tokens = surrogate(ratios, [[1.5] * 3, [-2.0] * 3], objective=objective, dual_clip=1.1)
    assert all(map(torch.equal, of_rows[:2], of_tokens[:2]))


# ---- gspo


def test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens():
    # s = sqrt(1.2 * 0.9) = sqrt(1.08) = 1.0392305; A = 2, inside the clip: every token -s A.
    # Their sum is -2 s A and d log s / d log pi_t = 1/2: gradient -s A each.
    loss, gradient, metrics = surrogate([[1.2, 0.9]], [2.0], objective=sequence_surrogate)
    expected = torch.tensor([[-2.078461, -2.078461]])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(metrics["ratio"], -expected / 2, atol=1e-5, rtol=0)


def test_a_longer_sequence_of_the_same_tokens_has_the_same_ratio():
    # the mean, not the sum: exp(mean log u) = 1.1 for two tokens and for six
    short = surrogate([[1.21, 1.0]], [1.0], objective=sequence_surrogate)[2]["ratio"]
    long = surrogate([[1.21, 1.0] * 3], [1.0], objective=sequence_surrogate)[2]["ratio"]
    torch.testing.assert_close(short, torch.full((1, 2), 1.1), atol=FLOAT32, rtol=0)
    torch.testing.assert_close(long, torch.full((1, 6), 1.1), atol=FLOAT32, rtol=0)


def test_a_sequence_is_clipped_as_a_whole():
    # s = sqrt(0.4 * 4.9) = 1.4: above 1.28 -> A > 0 clipped at 1.28 A; A < 0 keeps 1.4 A,
    # although both tokens alone are far outside
    loss, gradient, metrics = surrogate([[0.4, 4.9]] * 2, [1.0, -1.0], objective=sequence_surrogate)
    torch.testing.assert_close(loss, torch.tensor([[-1.28] * 2, [1.4] * 2]), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, torch.tensor([[0.0] * 2, [1.4] * 2]), atol=1e-5, rtol=0)
    assert metrics["is_clipped_high"].tolist() == [[True, True], [False, False]]
    assert not metrics["is_clipped_low"].any()


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=1, max_size=6),
    st.floats(-2, 2),
)
def test_the_sequence_surrogate_follows_a_float64_loop(tokens, advantage):
    ratios, mask = [math.exp(d) for d, _ in tokens], [kept for _, kept in tokens]
    loss, gradient, _ = surrogate(
        [ratios], [advantage], [mask], sequence_surrogate, clip_low=0.1, clip_high=0.2
    )
    num_tokens = max(sum(mask), 1)
    s = math.exp(sum(d for d, kept in tokens if kept) / num_tokens)
    gain = min(s * advantage, min(max(s, 0.9), 1.2) * advantage)
    slope = -s * advantage if s * advantage <= gain else 0.0
    for t, kept in enumerate(mask):
        assert loss[0, t].item() == pytest.approx(-gain if kept else 0.0, rel=1e-5, abs=1e-5)
        if abs(s - 0.9) > 1e-4 and abs(s - 1.2) > 1e-4:  # either side of a kink may round over
            expected = slope if kept else 0.0
            assert gradient[0, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_at_ratio_one_gspo_is_the_sequence_mean_policy_gradient():
    # -(1/2) sum_i A_i (1/|y_i|) sum_t grad log pi: rows of 2 and 1 tokens, A = 1.5 and -0.5
    mask = [[True, True, False], [True, False, False]]
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    loss, _ = sequence_surrogate(
        policy, policy.detach(), torch.tensor([1.5, -0.5]), torch.tensor(mask),
        clip_low=3e-4, clip_high=4e-4,
    )  # fmt: skip
    total = reduce_loss(loss, torch.tensor(mask), Denominators(2, 3, 1), "sequence_mean")
    (gradient,) = torch.autograd.grad(total, policy)
    expected = torch.tensor([[-0.375, -0.375, 0.0], [0.25, 0.0, 0.0]])
    torch.testing.assert_close(gradient, expected, atol=FLOAT32, rtol=0)


# ---- sft, raft


def test_the_likelihood_reads_neither_ratio_nor_advantage():
    policy = torch.tensor([[-0.5, -2.0, -7.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    loss, metrics = negative_log_likelihood(
        policy, torch.full((1, 3), -50.0), torch.tensor([-3.0]), mask, clip_low=0.1, clip_high=0.1
    )
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert torch.equal(loss.detach(), torch.tensor([[0.5, 2.0, 0.0]]))
    assert torch.equal(gradient, torch.tensor([[-1.0, -1.0, 0.0]]))
    assert torch.equal(metrics["ratio"], torch.ones(1, 3))
    assert not (metrics["is_clipped_low"] | metrics["is_clipped_high"]).any()


def test_the_algorithms_are_those_of_their_papers():
    facts = {
        name: (a.divide_by_std, a.reduction, a.clip_low, a.clip_high, a.dynamic_sampling)
        for name, a in ALGORITHMS.items()
    }
    assert facts == {
        "grpo": (True, "sequence_mean", 0.2, 0.2, False),
        "dr_grpo": (False, "constant_length", 0.2, 0.2, False),
        "dapo": (True, "token_mean", 0.2, 0.28, True),
        "gspo": (True, "sequence_mean", 3e-4, 4e-4, False),
        "ppo": (True, "token_mean", 0.2, 0.2, False),
        "sft": (True, "sequence_mean", 0.2, 0.2, False),
        "raft": (True, "sequence_mean", 0.2, 0.2, False),
    }
    assert {n for n, a in ALGORITHMS.items() if not a.has_ratio} == {"sft", "raft"}
    assert {n for n, a in ALGORITHMS.items() if a.only_positive} == {"raft"}
    assert {n for n, a in ALGORITHMS.items() if a.has_critic} == {"ppo"}
