import math

import pytest
import torch

from rrl_core.algorithms.ratios import clamped_exp, entropy_from_logits, entropy_from_logprobs

FLOAT32 = 1e-6


def test_entropy_is_in_nats():
    # (1/2, 1/4, 1/4): 0.5 ln 2 + 0.5 ln 4 = 1.5 ln 2 = 1.039721; uniform over 4: ln 4 = 1.386294
    logits = torch.tensor([[math.log(2), 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert entropy_from_logits(logits).tolist() == pytest.approx(
        [1.039721, math.log(3)], abs=FLOAT32
    )


def test_an_impossible_token_adds_nothing_to_the_entropy_and_nothing_to_its_gradient():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2), abs=FLOAT32)
    assert torch.isfinite(logits.grad).all()


def test_entropy_of_half_precision_logits_is_taken_in_float32():
    logits = torch.tensor([[3.0, 1.0, 0.5, -2.0]])
    half = entropy_from_logits(logits.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, entropy_from_logits(logits), atol=FLOAT32, rtol=0)


def test_entropy_can_be_a_bonus_its_gradient_follows_the_formula():
    # dH/dz_v = -p_v (log p_v + H)
    logits = torch.tensor([[1.0, -0.5, 0.25]], requires_grad=True)
    entropy_from_logits(logits).sum().backward()
    logprobs = torch.log_softmax(logits.detach(), dim=-1)
    expected = -logprobs.exp() * (logprobs + entropy_from_logprobs(logprobs)[:, None])
    torch.testing.assert_close(logits.grad, expected, atol=FLOAT32, rtol=0)


def test_exp_is_finite_everywhere():
    values = clamped_exp(torch.tensor([1e6, 20.0, 0.0, -1e6]))
    assert values.tolist() == pytest.approx([math.exp(20), math.exp(20), 1.0, math.exp(-20)])
