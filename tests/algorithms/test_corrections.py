import math

import pytest
import torch

from rrl_core.algorithms.corrections import (
    CORRECTIONS,
    effective_sample_frac,
    is_corrigible,
    mass_below,
    sampler_correction,
)

FLOAT32 = 1e-6
LN = math.log


def correct(correction, log_ratios, mask=None, cap=2.0):
    """Return the correction for sampler log-probs of -1 and the given log(old / sampler)."""
    sampler = torch.full((len(log_ratios), len(log_ratios[0])), -1.0)
    old = sampler + torch.tensor(log_ratios)
    mask = torch.ones(old.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return sampler_correction(correction, old.requires_grad_(), sampler, mask, cap)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_equal_sampler_and_trainer_give_weight_one(correction):
    result = correct(correction, [[0.0, 0.0], [0.0, 0.0]])
    assert torch.equal(result.weights_BT, torch.ones(2, 2))
    assert not result.is_truncated_BT.any()


def test_token_weights_are_ratios_cut_at_the_cap():
    result = correct("token_truncate", [[LN(0.05), LN(0.5), LN(1.9), LN(2.1), LN(40.0)]])
    expected = torch.tensor([[0.05, 0.5, 1.9, 2.0, 2.0]])
    torch.testing.assert_close(result.weights_BT, expected, atol=FLOAT32, rtol=0)
    assert result.is_truncated_BT.tolist() == [[False, False, False, True, True]]


def test_ratios_are_clamped_before_they_are_exponentiated():
    result = correct("token_truncate", [[500.0, -500.0]])
    assert result.weights_BT[0].tolist() == pytest.approx([2.0, math.exp(-20)], rel=1e-5)


def test_a_sequence_is_kept_whole_or_rejected_whole_by_its_geometric_mean():
    # means: (log 4 + 0) / 2 = log 2 - 1e-3 / 2 within; (log 4.2) / 2 = log 2.049 out;
    # (log 0.24) / 2 = log 0.4899 out; (log 8 + log 0.125) / 2 = 0 within
    result = correct(
        "sequence_geometric_mask",
        [[LN(4.0) - 1e-3, 0.0], [LN(4.2), 0.0], [LN(0.24), 0.0], [LN(8.0), LN(0.125)]],
    )
    assert result.weights_BT.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert result.is_truncated_BT.any(dim=1).tolist() == [False, True, True, False]


def test_the_geometric_mean_is_over_the_trained_tokens():
    # log 3 over one token is out; diluted by the masked zero it would be log 1.73, within
    result = correct("sequence_geometric_mask", [[LN(3.0), 0.0]], mask=[[True, False]])
    assert result.weights_BT.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf")])
def test_masked_tokens_never_matter(correction, rubbish):
    result = correct(correction, [[0.1, rubbish]], mask=[[True, False]])
    alone = correct(correction, [[0.1]])
    assert result.weights_BT[0].tolist() == [alone.weights_BT.item(), 1.0]
    assert not result.is_truncated_BT[0, 1]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_weights_carry_no_gradient(correction):
    assert not correct(correction, [[0.3, -0.3]]).weights_BT.requires_grad


def test_rows_without_log_probs_can_only_stay_uncorrected():
    assert [is_corrigible(c, True) for c in CORRECTIONS] == [True, True, True]
    without = {c: is_corrigible(c, False) for c in CORRECTIONS}
    assert without == {"none": True, "token_truncate": False, "sequence_geometric_mask": False}


def test_the_effective_sample_size_is_a_fraction_of_n():
    # (1 + 1 + 2)^2 / (3 (1 + 1 + 4)) = 16 / 18; one of four alone: 1 / 4
    assert effective_sample_frac(torch.tensor([1.0, 1.0, 2.0])) == pytest.approx(16 / 18)
    assert effective_sample_frac(torch.tensor([0.0, 0.0, 3.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_frac(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_frac(torch.zeros(7)) == 0.0


def test_the_mass_below_a_threshold_counts_tokens():
    assert mass_below(torch.tensor([0.05, 0.1, 0.5, 0.0]), 0.1) == 0.5
