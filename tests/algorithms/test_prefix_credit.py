import math

import pytest
import torch

from rrl_core.algorithms.prefix_credit import PREFIX_CREDITS, prefix_credit

FLOAT32 = 1e-6
NAN = float("nan")


def credited(credit, policy, old, sampler, mask=None, advantage=0.5):
    """Return the losses, the weights and the gradient of one row of given tokens, from chances."""
    policy, old, sampler = (torch.tensor([chances]).log() for chances in (policy, old, sampler))
    policy.requires_grad_()
    mask = torch.tensor([mask or [True] * policy.shape[1]])
    loss, weights = prefix_credit(policy, old, sampler, torch.tensor([advantage]), mask, credit)
    loss.sum().backward()
    return loss[0].tolist(), weights[0].tolist(), policy.grad[0].tolist()


def test_direct_weighs_a_token_one_until_its_ratio_passes_1_4():
    # old 0.2: ratios 0.5, 1, 1.39, 1.41 and 3
    loss, weights, slope = credited("direct", [0.1, 0.2, 0.278, 0.282, 0.6], [0.2] * 5, [0.001] * 5)
    assert weights == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert slope == pytest.approx([-0.5, -0.5, -0.5, 0.0, 0.0], abs=FLOAT32)
    expected = [-0.5 * math.log(p) for p in (0.1, 0.2, 0.278)]
    assert loss == pytest.approx([*expected, 0.0, 0.0], abs=FLOAT32)


def test_corrected_weighs_a_token_by_old_over_sampler_cut_at_two():
    # old 0.2, sampler 0.4, 0.2, 0.125, 0.08: ratios 0.5, 1, 1.6, 2.5; what the policy did since
    # does not matter
    loss, weights, slope = credited(
        "corrected", [0.1, 0.2, 0.6, 0.9], [0.2] * 4, [0.4, 0.2, 0.125, 0.08]
    )
    assert weights == pytest.approx([0.5, 1.0, 1.6, 2.0], abs=FLOAT32)
    assert slope == pytest.approx([-0.25, -0.5, -0.8, -1.0], abs=FLOAT32)
    columns = zip(weights, (0.1, 0.2, 0.6, 0.9), strict=True)
    assert loss == pytest.approx([-0.5 * w * math.log(p) for w, p in columns], abs=FLOAT32)


def test_none_gives_a_prefix_no_loss_and_no_gradient():
    loss, weights, slope = credited("none", [0.1, 0.6], [0.2, 0.2], [0.4, 0.1])
    assert loss == weights == slope == [0.0, 0.0]


@pytest.mark.parametrize("credit", PREFIX_CREDITS)
@pytest.mark.parametrize("rubbish", [NAN, 0.0])
def test_masked_tokens_have_neither_loss_nor_gradient(credit, rubbish):
    alone = credited(credit, [0.3], [0.25], [0.2])
    found = credited(credit, [0.3, rubbish], [0.25, rubbish], [0.2, rubbish], [True, False])
    for with_rubbish, own in zip(found, alone, strict=True):
        assert with_rubbish == [*own, 0.0]
