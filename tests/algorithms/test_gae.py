import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.algorithms.gae import explained_variance, gae, value_loss, whiten

FLOAT32 = 1e-6
NAN = float("nan")


def estimate(rewards, values, bootstrap, mask=None, gamma=1.0, lam=1.0):
    """Return advantages and returns as lists, of one completion or several."""
    mask = torch.ones(len(values), len(values[0]), dtype=torch.bool) if mask is None else mask
    found = gae(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(bootstrap),
        torch.as_tensor(mask), gamma, lam,
    )  # fmt: skip
    return tuple(tensor.tolist() for tensor in found)


def by_hand(rewards, values, bootstrap, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k}, summed forwards in float64."""
    following = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def test_undiscounted_the_advantage_is_the_reward_minus_the_value():
    # gamma = lambda = 1: A_t = 1 - V_t and every return is the reward
    advantages, returns = estimate([[0.0, 0.0, 1.0]], [[0.5, 0.4, 0.2]], [0.0])
    assert advantages[0] == pytest.approx([0.5, 0.6, 0.8], abs=FLOAT32)
    assert returns[0] == pytest.approx([1.0, 1.0, 1.0], abs=FLOAT32)


def test_discounted_advantages_are_the_hand_derived_numbers():
    # gamma 0.9, lambda 0.5, so gamma lambda = 0.45
    # delta_2 = 1 - 0.2 = 0.8; delta_1 = 0.9 * 0.2 - 0.4 = -0.22; delta_0 = 0.9 * 0.4 - 0.5 = -0.14
    # A_2 = 0.8;  A_1 = -0.22 + 0.45 * 0.8 = 0.14;  A_0 = -0.14 + 0.45 * 0.14 = -0.077
    advantages, returns = estimate([[0.0, 0.0, 1.0]], [[0.5, 0.4, 0.2]], [0.0], gamma=0.9, lam=0.5)
    assert advantages[0] == pytest.approx([-0.077, 0.14, 0.8], abs=FLOAT32)
    assert returns[0] == pytest.approx([0.423, 0.54, 1.0], abs=FLOAT32)


def test_what_would_have_followed_a_truncated_completion_is_worth_its_last_value():
    # V(s_T) = 0.6, no reward: gamma = lambda = 1: A = 0.6 - V
    advantages, returns = estimate([[0.0, 0.0]], [[0.5, 0.2]], [0.6])
    assert advantages[0] == pytest.approx([0.1, 0.4], abs=FLOAT32)
    assert returns[0] == pytest.approx([0.6, 0.6], abs=FLOAT32)
    # gamma 0.9, lambda 0.5: delta_1 = 0.9 * 0.6 - 0.2 = 0.34; delta_0 = 0.9 * 0.2 - 0.5 = -0.32
    # A_0 = -0.32 + 0.45 * 0.34 = -0.167
    advantages, _ = estimate([[0.0, 0.0]], [[0.5, 0.2]], [0.6], gamma=0.9, lam=0.5)
    assert advantages[0] == pytest.approx([-0.167, 0.34], abs=FLOAT32)


def test_the_end_of_a_shorter_row_is_where_its_mask_ends():
    # row 0: one token, truncated; row 1: three. Rubbish behind the mask.
    advantages, returns = estimate(
        [[0.0, NAN, 9.0], [0.0, 0.0, 1.0]],
        [[0.3, 9.0, NAN], [0.5, 0.4, 0.2]],
        [0.7, 0.0],
        [[True, False, False], [True, True, True]],
    )
    assert advantages[0] == pytest.approx([0.4, 0.0, 0.0], abs=FLOAT32)
    assert returns[0] == pytest.approx([0.7, 0.0, 0.0], abs=FLOAT32)
    assert advantages[1] == pytest.approx([0.5, 0.6, 0.8], abs=FLOAT32)


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.booleans()), min_size=1, max_size=7),
    st.floats(-1, 1),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_masked_tokens_are_no_steps_and_the_rest_follows_a_float64_sum(tokens, last, gamma, lam):
    rewards = [[r if kept else NAN for r, _, kept in tokens]]
    values = [[v if kept else NAN for _, v, kept in tokens]]
    mask = [[kept for _, _, kept in tokens]]
    advantages, returns = estimate(rewards, values, [last], mask, gamma, lam)
    kept = [(r, v) for r, v, is_kept in tokens if is_kept]
    expected = by_hand([r for r, _ in kept], [v for _, v in kept], last, gamma, lam)
    found = [a for a, is_kept in zip(advantages[0], mask[0], strict=True) if is_kept]
    assert found == pytest.approx(expected, abs=1e-5)
    for a, ret, (_, value, is_kept) in zip(advantages[0], returns[0], tokens, strict=True):
        assert ret == (pytest.approx(a + value, abs=1e-5) if is_kept else 0.0)
        assert is_kept or a == 0.0


def test_no_gradient_reaches_the_values_through_their_targets():
    values = torch.tensor([[0.5, 0.4]], requires_grad=True)
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0]]), values, torch.zeros(1), torch.ones(1, 2).bool(), 1.0, 0.5
    )
    assert not advantages.requires_grad
    assert not returns.requires_grad


# ---- whitening


def test_whitened_advantages_are_centred_over_the_kept_tokens_and_divided_by_their_std():
    # kept 1, 2, 6: mean 3, std sqrt((4 + 1 + 9) / 2) = 2.6457513
    whitened = whiten(
        torch.tensor([[1.0, 2.0], [6.0, NAN]]), torch.tensor([[True, True], [True, False]])
    )
    expected = [d / (2.6457513 + 1e-4) for d in (-2.0, -1.0, 3.0)]
    assert whitened.flatten().tolist() == pytest.approx([*expected, 0.0], abs=FLOAT32)


@pytest.mark.parametrize("advantages", [[[0.3] * 8], [[0.7]], [[]]])
def test_equal_advantages_and_a_single_one_whiten_to_exactly_zero(advantages):
    advantages = torch.tensor(advantages)
    assert not whiten(advantages, torch.ones_like(advantages).bool()).any()


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8), st.floats(-5, 5))
def test_a_constant_added_to_all_advantages_changes_nothing(advantages, shift):
    mask = torch.ones(1, len(advantages), dtype=torch.bool)
    advantages = torch.tensor([advantages], dtype=torch.float64)
    if advantages.max() - advantages.min() < 1e-3:
        return
    torch.testing.assert_close(
        whiten(advantages, mask), whiten(advantages + shift, mask), atol=1e-5, rtol=0
    )


# ---- the value loss


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        # V_old = 0.5, R = 1, clip 0.2
        (0.6, 0.16, -0.8),  # (0.6 - 1)^2, not clipped; 2 (V - R)
        (0.9, 0.09, 0.0),  # max(0.01, (0.7 - 1)^2): moved far enough
        (0.1, 0.81, -1.8),  # max(0.81, (0.3 - 1)^2): moved the wrong way, comes back
        (1.6, 0.36, 1.2),  # max(0.36, 0.09): moved past, comes back
    ],
)
def test_the_value_loss_is_the_larger_of_both_errors(value, loss, gradient):
    values = torch.tensor([[value]], requires_grad=True)
    found = value_loss(values, torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[True]]))
    (slope,) = torch.autograd.grad(found.sum(), values)
    assert found.item() == pytest.approx(loss, abs=FLOAT32)
    assert slope.item() == pytest.approx(gradient, abs=FLOAT32)


def test_without_a_clip_the_value_loss_is_the_squared_error():
    values = torch.tensor([[0.9, 0.1]], requires_grad=True)
    found = value_loss(
        values, torch.tensor([[0.5, 0.5]]), torch.ones(1, 2), torch.ones(1, 2).bool(), None
    )
    (slope,) = torch.autograd.grad(found.sum(), values)
    assert found[0].tolist() == pytest.approx([0.01, 0.81], abs=FLOAT32)
    assert slope[0].tolist() == pytest.approx([-0.2, -1.8], abs=FLOAT32)


@pytest.mark.parametrize("rubbish", [NAN, float("inf")])
@pytest.mark.parametrize("clip", [0.2, None])
def test_masked_values_have_neither_loss_nor_gradient(rubbish, clip):
    mask = torch.tensor([[True, False]])
    filled = torch.full((1, 2), rubbish)
    values = torch.where(mask, 0.6, filled).requires_grad_()
    found = value_loss(
        values, torch.where(mask, 0.5, filled), torch.where(mask, 1.0, filled), mask, clip
    )
    (slope,) = torch.autograd.grad(found.sum(), values)
    assert found[0].tolist() == pytest.approx([0.16, 0.0], abs=FLOAT32)
    assert slope[0].tolist() == pytest.approx([-0.8, 0.0], abs=FLOAT32)


# ---- explained variance


def test_explained_variance_is_one_for_the_truth_and_nought_for_a_constant():
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 0.3), returns) == pytest.approx(0.0, abs=FLOAT32)
    # R - V = (0, 0.5, 0.5, 0): a quarter of the variance is left
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75, abs=FLOAT32)
    assert explained_variance(returns, torch.ones(4)) is None
