"""Packing: completions of one prompt share a row, and every token they have in common is run once.

A row is a tree of tokens. The prompt is its trunk; each completion is a path that leaves the trunk
and, as long as completions agree, runs along the same nodes. A token attends to its ancestors and
itself, its position id is its depth. So each token sees exactly what it would see in a row of its
own, and log-probs and gradients are the same up to float rounding, while a prompt costs once per
group instead of once per completion, and so do the words completions begin with.

The last token of a completion is predicted but predicts nothing: it is a target, not a node.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_MIN_FILL = 0.95  # of a row, in a batch that has
_ENOUGH_NODES = 256  # already


@dataclass(frozen=True)
class Branch:
    """One completion to be scored: what is given, what is scored, and the temperature (> 0)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    temperature: float = 1.0


@dataclass(frozen=True)
class PackedBatch:
    """Rows for one forward pass. R rows, T nodes a row, N predictors, M targets, K scored tokens.

    A predictor is a node whose hidden state predicts something; a target is a (predictor, token id)
    pair; a scored token is one token of one completion. Several scored tokens share a target where
    completions agree.
    """

    branches: tuple[int, ...]  # indices of the completions in the list that was packed: the B order
    input_ids_RT: Tensor  # int64; pad where a row is shorter
    position_ids_RT: Tensor  # int64
    is_visible_RTT: Tensor  # bool [row, query, key], True = attends to; pads see only themselves
    predictors_N: Tensor  # int64, flat index row * T + node
    temperature_N: Tensor  # float32
    target_predictor_M: Tensor  # int64, index into N
    target_ids_M: Tensor  # int64 token ids
    token_target_K: Tensor  # int64, index into M
    token_row_K: Tensor  # int64, index into `branches`
    token_column_K: Tensor  # int64, index of the token in its completion

    @property
    def num_columns(self) -> int:
        """Length of the longest completion."""
        return int(self.token_column_K.max()) + 1


@dataclass
class _Tree:
    """A row under construction: nodes with a token and a parent, parents before children."""

    prompt_ids: tuple[int, ...]
    temperature: float
    branches: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    targets: dict[tuple[int, int], int] = field(default_factory=dict)
    token_targets: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for parent, token in enumerate(self.prompt_ids, start=-1):
            self._add_node(parent, token)

    def __len__(self) -> int:
        return len(self.tokens)

    def num_new_nodes(self, completion_ids: Sequence[int]) -> int:
        """Return how many nodes the completion would add."""
        node = len(self.prompt_ids) - 1
        for shared, token in enumerate(completion_ids[:-1]):
            child = self.children.get((node, token))
            if child is None:
                return len(completion_ids) - 1 - shared
            node = child
        return 0

    def add(self, branch: int, completion_ids: Sequence[int]) -> None:
        """Add a completion as a path from the prompt's last token."""
        node = len(self.prompt_ids) - 1
        path = []
        for column, token in enumerate(completion_ids):
            path.append(self.targets.setdefault((node, token), len(self.targets)))
            if column < len(completion_ids) - 1:
                child = self.children.get((node, token))
                node = self._add_node(node, token) if child is None else child
        self.branches.append(branch)
        self.token_targets.append(tuple(path))

    def _add_node(self, parent: int, token: int) -> int:
        self.children[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def depths(self) -> list[int]:
        """Return the position id of every node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


def pack(
    completions: Sequence[Branch],
    *,
    max_tokens: int,
    pad_token_id: int,
    share_prefix: bool = True,
) -> list[PackedBatch]:
    """Pack completions into batches of at most `max_tokens` nodes, pads included.

    Args:
        completions: prompts and completions are not empty.
        max_tokens: budget of a batch. A completion that exceeds it with its prompt alone gets a
            batch of its own: it cannot be cut.
        pad_token_id: fills shorter rows; nothing attends to it.
        share_prefix: False gives every completion a row of its own (the padded reference).

    Returns:
        Batches that hold each completion once. The same list packs in the same way every time.

    Raises:
        ValueError: a prompt or completion is empty: nothing to predict from, nothing to score.
    """
    for index, branch in enumerate(completions):
        if not branch.prompt_ids or not branch.completion_ids:
            raise ValueError(
                f"expected a prompt and a completion of at least one token, got "
                f"{len(branch.prompt_ids)} and {len(branch.completion_ids)} at index {index}; "
                "leave empty completions out"
            )
    trees = _grow(completions, max_tokens, share_prefix)
    return [_batch(rows, pad_token_id) for rows in _split(trees, max_tokens)]


def _grow(completions: Sequence[Branch], max_tokens: int, share_prefix: bool) -> list[_Tree]:
    """Put every completion into a tree with its prompt and temperature, new ones where full."""
    trees: list[_Tree] = []
    growing: dict[tuple[tuple[int, ...], float], _Tree] = {}
    for index, branch in enumerate(completions):
        key = (branch.prompt_ids, branch.temperature)
        tree = growing.get(key)
        is_full = (
            tree is not None and len(tree) + tree.num_new_nodes(branch.completion_ids) > max_tokens
        )
        if tree is None or is_full or not share_prefix:
            tree = growing[key] = _Tree(*key)
            trees.append(tree)
        tree.add(index, branch.completion_ids)
    return trees


def _split(trees: Iterable[_Tree], max_tokens: int) -> Iterator[list[_Tree]]:
    """Put rows of similar length together: longest first, so the first row decides the width.

    A batch that is large enough to keep the processor busy takes no row that adds many pads:
    a pad costs as much as a token, a batch more costs little.
    """
    rows: list[_Tree] = []
    for tree in sorted(trees, key=len, reverse=True):
        num_nodes = len(rows[0]) * len(rows) if rows else 0
        is_short = rows and len(tree) < _MIN_FILL * len(rows[0]) and num_nodes >= _ENOUGH_NODES
        if rows and (num_nodes + len(rows[0]) > max_tokens or is_short):
            yield rows
            rows = []
        rows.append(tree)
    if rows:
        yield rows


def _batch(rows: Sequence[_Tree], pad_token_id: int) -> PackedBatch:
    num_nodes = max(len(tree) for tree in rows)
    input_ids_RT = np.full((len(rows), num_nodes), pad_token_id, dtype=np.int64)
    position_ids_RT = np.zeros((len(rows), num_nodes), dtype=np.int64)
    is_visible_RTT = np.zeros((len(rows), num_nodes, num_nodes), dtype=np.bool_)
    branches: list[int] = []
    predictors: dict[int, int] = {}  # flat node -> N
    temperatures: list[float] = []
    targets: list[tuple[int, int]] = []  # (N, token id)
    tokens: list[tuple[int, int, int]] = []  # (M, row of the batch, column)
    for row, tree in enumerate(rows):
        input_ids_RT[row, : len(tree)] = tree.tokens
        position_ids_RT[row, : len(tree)] = tree.depths()
        _mark_visible(is_visible_RTT[row], tree.parents)
        first_target = len(targets)
        for node, token in tree.targets:
            predictor = predictors.setdefault(row * num_nodes + node, len(predictors))
            targets.append((predictor, token))
        temperatures += [tree.temperature] * (len(predictors) - len(temperatures))
        for branch, path in zip(tree.branches, tree.token_targets, strict=True):
            tokens += [(first_target + t, len(branches), column) for column, t in enumerate(path)]
            branches.append(branch)
    target_MC = torch.tensor(targets)
    token_KC = torch.tensor(tokens)
    return PackedBatch(
        branches=tuple(branches),
        input_ids_RT=torch.from_numpy(input_ids_RT),
        position_ids_RT=torch.from_numpy(position_ids_RT),
        is_visible_RTT=torch.from_numpy(is_visible_RTT),
        predictors_N=torch.tensor(list(predictors)),
        temperature_N=torch.tensor(temperatures),
        target_predictor_M=target_MC[:, 0],
        target_ids_M=target_MC[:, 1],
        token_target_K=token_KC[:, 0],
        token_row_K=token_KC[:, 1],
        token_column_K=token_KC[:, 2],
    )


def _mark_visible(is_visible_TT: np.ndarray, parents: Sequence[int]) -> None:
    """Let every node see what its parent sees, and itself; a pad sees itself only."""
    for node, parent in enumerate(parents):
        if parent >= 0:
            is_visible_TT[node] = is_visible_TT[parent]
        is_visible_TT[node, node] = True
    for pad in range(len(parents), len(is_visible_TT)):
        is_visible_TT[pad, pad] = True
