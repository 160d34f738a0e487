import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.algorithms.reduce import REDUCTIONS, Denominators, reduce_loss

FLOAT32 = 1e-6

losses = st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=6)


def padded(rows, filler=float("nan")):
    width = max(1, *(len(row) for row in rows))
    loss = torch.tensor([row + [filler] * (width - len(row)) for row in rows])
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    return loss, mask


def by_hand(rows, reduction, constant):
    """Return the reduced loss by Python's float64 loops; rows without tokens do not exist."""
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if reduction == "sequence_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if reduction == "constant_length":
        return sum(sum(row) for row in rows) / (len(rows) * constant)
    return sum(sum(row) for row in rows) / sum(len(row) for row in rows)


@pytest.mark.parametrize(
    ("reduction", "value"),
    [
        # rows (1, 2, 3) and (10), constant 8
        ("sequence_mean", 6.0),  # (2 + 10) / 2
        ("constant_length", 1.0),  # 16 / (2 * 8)
        ("token_mean", 4.0),  # 16 / 4
    ],
)
def test_uneven_rows_reduce_to_the_hand_derived_numbers(reduction, value):
    loss, mask = padded([[1.0, 2.0, 3.0], [10.0]])
    reduced = reduce_loss(loss, mask, Denominators.of_lengths([3, 1], 8), reduction)
    assert reduced.item() == pytest.approx(value, abs=FLOAT32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(rows=losses)
def test_reductions_follow_float64_loops_on_uneven_rows(reduction, rows):
    loss, mask = padded(rows)
    denominators = Denominators.of_lengths([len(row) for row in rows], 8)
    reduced = reduce_loss(loss, mask, denominators, reduction)
    assert reduced.item() == pytest.approx(by_hand(rows, reduction, 8), abs=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(rows=losses, split=st.integers(0, 6))
def test_micro_batches_sum_to_the_batch(reduction, rows, split):
    denominators = Denominators.of_lengths([len(row) for row in rows], 8)
    whole = reduce_loss(*padded(rows), denominators, reduction).item()
    parts = [part for part in (rows[:split], rows[split:]) if part]
    summed = sum(reduce_loss(*padded(p), denominators, reduction).item() for p in parts)
    assert summed == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_masked_row_leaves_numerator_and_denominator(reduction):
    denominators = Denominators.of_lengths([2, 0, 1], 8)
    assert denominators == Denominators(num_sequences=2, num_tokens=3, constant_tokens=8)
    with_row = reduce_loss(*padded([[1.0, 2.0], [], [4.0]]), denominators, reduction)
    without = reduce_loss(
        *padded([[1.0, 2.0], [4.0]]), Denominators.of_lengths([2, 1], 8), reduction
    )
    assert torch.equal(with_row, without)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_of_masked_rows_is_exactly_zero(reduction):
    reduced = reduce_loss(*padded([[], []]), Denominators.of_lengths([0, 0], 8), reduction)
    assert reduced.item() == 0.0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_stay_out_of_masked_tokens(reduction):
    loss, mask = padded([[1.0, 2.0], [4.0]], filler=float("inf"))
    loss.requires_grad_()
    reduce_loss(loss, mask, Denominators.of_lengths([2, 1], 8), reduction).backward()
    assert loss.grad[1, 1].item() == 0.0
    # every trained token of row 0: 1/2/2, 1/16, 1/3
    expected = {"sequence_mean": 0.25, "constant_length": 0.0625, "token_mean": 1 / 3}[reduction]
    assert loss.grad[0].tolist() == pytest.approx([expected] * 2, abs=FLOAT32)
