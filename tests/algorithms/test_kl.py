import math

import pytest
import torch

from rrl_core.algorithms.kl import KL_ESTIMATORS, kl_estimate

FLOAT32 = 1e-6


def estimate(policy, reference, estimator, mask=None):
    policy = torch.tensor([policy], requires_grad=True)
    mask = torch.ones(policy.shape, dtype=torch.bool) if mask is None else torch.tensor([mask])
    kl = kl_estimate(policy, torch.tensor([reference]), mask, estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), policy)
    return kl[0].tolist(), gradient[0].tolist()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # p = 0.5, reference 0.25: d = log 0.5 = -0.693147; d(d)/d log p = -1
        ("k1", 0.693147, 1.0),
        ("k2", 0.240227, 0.693147),  # d^2 / 2, gradient -d
        ("k3", 0.193147, 0.5),  # 0.5 - 1 + 0.693147, gradient 1 - e^d
    ],
)
def test_the_estimators_give_the_hand_derived_numbers(estimator, value, gradient):
    values, gradients = estimate([math.log(0.5)], [math.log(0.25)], estimator)
    assert values == pytest.approx([value], abs=FLOAT32)
    assert gradients == pytest.approx([gradient], abs=FLOAT32)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_equal_policies_have_no_divergence(estimator):
    assert estimate([-1.25, -7.5], [-1.25, -7.5], estimator)[0] == [0.0, 0.0]


def test_k3_keeps_the_digits_of_a_small_difference():
    # d = 1e-3: d^2/2 + d^3/6 = 5.001667e-7, which exp(d) - 1 - d in float32 gets wrong by 7 %
    values, _ = estimate([-1.0], [-0.999], "k3")
    d = float(torch.tensor(-0.999) - torch.tensor(-1.0))
    assert values[0] == pytest.approx(math.expm1(d) - d, rel=1e-3)


def test_k3_is_clamped_before_it_is_exponentiated():
    # d = 300: e^20 - 1 - 20 = 4.85165e8, not infinite, and without a gradient
    values, gradients = estimate([-301.0], [-1.0], "k3")
    assert values == pytest.approx([math.exp(20) - 21], rel=FLOAT32)
    assert gradients == [0.0]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_masked_tokens_never_matter(estimator, rubbish):
    alone = estimate([-1.0], [-1.5], estimator)
    masked = estimate([-1.0, rubbish], [-1.5, rubbish], estimator, [True, False])
    assert masked == ([alone[0][0], 0.0], [alone[1][0], 0.0])


def test_the_estimators_agree_in_expectation():
    # p = (0.7, 0.2, 0.1), q = (0.5, 0.3, 0.2): KL = sum p log(p/q) = 0.085122 (k1 and k3 unbiased)
    p, q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    for estimator in ("k1", "k3"):
        values, _ = estimate([math.log(a) for a in p], [math.log(b) for b in q], estimator)
        mean = sum(a * v for a, v in zip(p, values, strict=True))
        assert mean == pytest.approx(exact, abs=FLOAT32)
    assert exact == pytest.approx(0.085122, abs=1e-6)
