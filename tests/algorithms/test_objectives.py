import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.algorithms.objectives import ALGORITHMS, clipped_surrogate

FLOAT32 = 1e-6
LN = math.log


def surrogate(ratios, advantages, mask=None, **settings):
    """Return (loss, its gradient by log-prob, metrics) for old log-probs of -1 and given ratios."""
    policy = torch.tensor([[-1.0 + LN(r) for r in row] for row in ratios], requires_grad=True)
    mask = torch.ones(policy.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    settings = {"clip_low": 0.2, "clip_high": 0.28} | settings
    loss, metrics = clipped_surrogate(
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


def test_the_algorithms_are_those_of_their_papers():
    facts = {
        name: (a.divide_by_std, a.reduction, a.clip_low, a.clip_high, a.dynamic_sampling)
        for name, a in ALGORITHMS.items()
    }
    assert facts == {
        "grpo": (True, "sequence_mean", 0.2, 0.2, False),
        "dr_grpo": (False, "constant_length", 0.2, 0.2, False),
        "dapo": (True, "token_mean", 0.2, 0.28, True),
    }
