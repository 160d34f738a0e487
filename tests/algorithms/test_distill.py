import torch

from rrl_core.algorithms.distill import distill_loss

NAN, INF = float("nan"), float("inf")


def test_a_distilled_token_costs_its_negative_log_prob_and_others_cost_nothing():
    logprobs = torch.tensor([[-0.5, -2.0, NAN], [-1.0, -INF, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    loss = distill_loss(logprobs, mask)
    assert loss.tolist() == [[0.5, 2.0, 0.0], [0.0, 0.0, 0.0]]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_loss_is_float32_whatever_the_log_probs_are():
    loss = distill_loss(torch.tensor([[-1.5]], dtype=torch.bfloat16), torch.tensor([[True]]))
    assert loss.dtype == torch.float32
    assert loss.item() == 1.5
