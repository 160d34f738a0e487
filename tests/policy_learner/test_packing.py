import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.policy.packing import Branch, PackedBatch, pack

PAD = 99
# Few ids, so that completions often agree; the pad is one of them: its value must not matter.
ids = st.lists(st.sampled_from([1, 2, PAD]), min_size=1, max_size=6).map(tuple)
branches = st.lists(
    st.builds(Branch, ids, ids, st.sampled_from([1.0, 0.5])), min_size=1, max_size=8
)


def test_a_row_is_the_tree_of_its_tokens():
    #  node  0 1 2   3 4          completions  4 5 6 / 4 5 7 / 8
    #  token 1 2 3 - 4 5          the last token of each is predicted, it is no node
    [batch] = pack(
        [Branch((1, 2, 3), (4, 5, 6)), Branch((1, 2, 3), (4, 5, 7)), Branch((1, 2, 3), (8,))],
        max_tokens=100,
        pad_token_id=PAD,
    )
    assert batch.input_ids_RT.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.is_visible_RTT[0].tolist() == torch.ones(5, 5).tril().bool().tolist()
    assert batch.predictors_N.tolist() == [2, 3, 4]
    targets = zip(batch.target_predictor_M.tolist(), batch.target_ids_M.tolist(), strict=True)
    assert sorted(targets) == [(0, 4), (0, 8), (1, 5), (2, 6), (2, 7)]
    assert len(batch.token_target_K) == 7


def test_branches_do_not_see_each_other_and_positions_restart_after_the_prompt():
    #  node  0 1   2 3   4        completions  3 4 9 / 5 9: nodes 2-3 and 4
    [batch] = pack(
        [Branch((1, 2), (3, 4, 9)), Branch((1, 2), (5, 9))], max_tokens=100, pad_token_id=PAD
    )
    assert batch.input_ids_RT.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.is_visible_RTT[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_the_end_of_one_completion_is_a_node_where_another_goes_on():
    [batch] = pack([Branch((1,), (2, 3)), Branch((1,), (2, 3, 4))], max_tokens=9, pad_token_id=PAD)
    assert batch.input_ids_RT.tolist() == [[1, 2, 3]]


def test_short_rows_are_padded_and_pads_see_only_themselves():
    [batch] = pack([Branch((1, 2, 3), (4,)), Branch((5,), (6,))], max_tokens=6, pad_token_id=PAD)
    assert batch.input_ids_RT.tolist() == [[1, 2, 3], [5, PAD, PAD]]
    assert batch.is_visible_RTT[1].tolist() == torch.eye(3).bool().tolist()


def test_groups_that_exceed_the_budget_are_split_and_keep_their_prompt():
    # prompt 4 nodes, each completion 3 more: two fit into 10
    prompt = (1, 2, 3, 4)
    packed = pack(
        [Branch(prompt, (10 * i, 5, 6, 7)) for i in range(1, 6)], max_tokens=10, pad_token_id=PAD
    )
    assert [batch.branches for batch in packed] == [(0, 1), (2, 3), (4,)]
    assert all(batch.input_ids_RT[0, :4].tolist() == [1, 2, 3, 4] for batch in packed)


def test_a_completion_longer_than_the_budget_gets_a_batch_of_its_own():
    packed = pack(
        [Branch((1,), (2,)), Branch((1, 2, 3), (4, 5, 6)), Branch((1,), (3,))],
        max_tokens=2,
        pad_token_id=PAD,
    )
    assert [batch.branches for batch in packed] == [(1,), (0, 2)]
    assert packed[0].input_ids_RT.tolist() == [[1, 2, 3, 4, 5]]


def test_without_sharing_every_completion_has_a_row():
    [batch] = pack(
        [Branch((1, 2), (3, 4)), Branch((1, 2), (3, 4))],
        max_tokens=100,
        pad_token_id=PAD,
        share_prefix=False,
    )
    assert batch.input_ids_RT.tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("branch", [Branch((), (1,)), Branch((1,), ())])
def test_nothing_to_predict_or_to_predict_from_is_refused(branch):
    with pytest.raises(ValueError, match=r"at index 1; leave empty completions out"):
        pack([Branch((1,), (2,)), branch], max_tokens=9, pad_token_id=PAD)


@given(branches, st.integers(1, 40), st.booleans())
def test_every_token_is_predicted_once_from_exactly_what_precedes_it(items, max_tokens, share):
    scored: list[tuple[int, int]] = []
    for batch in pack(items, max_tokens=max_tokens, pad_token_id=PAD, share_prefix=share):
        assert batch.input_ids_RT.numel() <= max_tokens or len(batch.branches) == 1
        for k in range(len(batch.token_target_K)):
            branch = batch.branches[int(batch.token_row_K[k])]
            column = int(batch.token_column_K[k])
            scored.append((branch, column))
            check_token(batch, k, items[branch], column)
    expected = [(b, t) for b, item in enumerate(items) for t in range(len(item.completion_ids))]
    assert sorted(scored) == expected


def check_token(batch: PackedBatch, k: int, item: Branch, column: int) -> None:
    target = int(batch.token_target_K[k])
    predictor = int(batch.target_predictor_M[target])
    row, node = divmod(int(batch.predictors_N[predictor]), batch.input_ids_RT.shape[1])
    visible = batch.is_visible_RTT[row, node].nonzero()[:, 0]
    order = batch.position_ids_RT[row, visible].argsort()
    assert int(batch.target_ids_M[target]) == item.completion_ids[column]
    assert batch.input_ids_RT[row, visible][order].tolist() == [
        *item.prompt_ids, *item.completion_ids[:column]
    ]  # fmt: skip
    assert batch.position_ids_RT[row, visible][order].tolist() == list(range(len(visible)))
    assert batch.temperature_N[predictor].item() == item.temperature


@given(branches, st.integers(1, 40))
def test_packing_is_a_function_of_its_input(items, max_tokens):
    first, second = (pack(items, max_tokens=max_tokens, pad_token_id=PAD) for _ in range(2))
    assert [b.branches for b in first] == [b.branches for b in second]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.input_ids_RT, other.input_ids_RT)
        assert torch.equal(one.token_target_K, other.token_target_K)
