"""The value model: how likely success is from a state, judged by what the history says today.

Source: Retrospective Replay (arXiv 2504.14363) finds promising states with a value model and does
not publish it. This one is two logistic regressions on features of a frozen backbone
(`features.py`), refitted from scratch to the whole history:

    V(s) = sigmoid(w . x(s) + b)
    (w, b) = argmin  sum_i c_i CE(y_i, V(s_i))  +  l2/2 * D * sum_d (w_d std_d)^2

y = 1 for success, c = the example's weight, D features, std_d their weighted standard deviation.

Our choice:
1. Cross-fit: prompts fall into two folds by a hash of their id, and a prompt is judged by the head
   that was fitted to the other fold. Its own outcomes never enter by the fit; they enter by
   counting (`counts.py`). Means and deviations of the features are the other fold's, too.
2. The penalty is on standardised features and grows with their number, so that the logit of an
   average state has the prior variance 1/l2, whatever the width of the backbone. The bias is free.
   Weights count as repeated rows: more history, less prior.
3. Newton's method in float64 from zero: strictly convex, a few steps, the same bits every time on
   one machine. No minibatches, no learning rate, no early stop.
4. A fold whose targets are all equal, or without data, says (n_ok + 0.5) / (n + 2), with weights
   as counts, of every state.
5. Weights of examples: outcomes of continuations and retries weigh 4, since they tell what the
   policy can do from old states by now; every weight halves with each 5 policy versions of age.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from rrl_core.value.counts import success_rate

NUM_FOLDS = 2
DEFAULT_L2 = 1.0
REPLAY_WEIGHT = 4.0
HALF_LIFE_VERSIONS = 5.0

_CONSTANT = 1e-6  # a deviation below this share of the mean is float32 rounding
_MAX_LOGIT = 30.0  # further out a probability would round to 1
_MAX_STEPS = 100  # Newton's method needs 5 to 10
_SOLVED = 1e-10  # twice the distance to the minimum at which a last step leaves rounding only
_METADATA_KEY = "value_model"

Floats = NDArray[np.float64]


class ValueModelError(ValueError):
    """A value model cannot be fitted, read or asked; the message says what differs."""


@dataclass(frozen=True, eq=False)
class ValueModel:
    """Two heads over the features of one backbone; head k judges the prompts of fold k.

    `weights_KD` [2, D] and `bias_K` [2]: float64. `backbone_digest`: see `features.py`.
    """

    weights_KD: Floats
    bias_K: Floats
    backbone_digest: str

    def predict(self, features_ND: NDArray[Any], prompt_ids: Sequence[str]) -> Floats:
        """Return V(s) in (0, 1), float64 [N], of states the model's backbone made features of.

        Args:
            features_ND: [N, D] finite.
            prompt_ids: [N] the prompt of each state, which decides the head.

        Raises:
            ValueModelError: other shapes, or a feature is not finite.
        """
        width = self.weights_KD.shape[1]
        if features_ND.shape != (len(prompt_ids), width):
            raise ValueModelError(
                f"expected features of shape [{len(prompt_ids)}, {width}], got "
                f"{features_ND.shape}; use the backbone the model was fitted to"
            )
        _check_finite(features_ND)
        folds_N = np.array([fold(prompt_id) for prompt_id in prompt_ids], dtype=np.int64)
        # Row by row, not as a matrix product: its last bits depend on where a row stands.
        products_ND = features_ND.astype(np.float64) * self.weights_KD[folds_N]
        logits_N = products_ND.sum(axis=1) + self.bias_K[folds_N]
        return _sigmoid(np.clip(logits_N, -_MAX_LOGIT, _MAX_LOGIT))

    def to_bytes(self) -> bytes:
        """Return the model as one safetensors file; equal models give equal bytes."""
        # One metadata key: safetensors writes several in a random order.
        metadata = {_METADATA_KEY: json.dumps({"backbone_digest": self.backbone_digest})}
        return bytes(save_safetensors({"bias": self.bias_K, "weights": self.weights_KD}, metadata))

    @classmethod
    def from_bytes(cls, data: bytes, backbone_digest: str) -> "ValueModel":
        """Read what `to_bytes` wrote, for features of the backbone `backbone_digest`.

        Raises:
            ValueModelError: the bytes are damaged, or the model was fitted to another backbone.
        """
        try:
            tensors = load_safetensors(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            fitted_to = json.loads(header["__metadata__"][_METADATA_KEY])["backbone_digest"]
            model = cls(tensors["weights"], tensors["bias"], fitted_to)
            _check_heads(model)
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueModelError(
                f"expected a value model as safetensors with {_METADATA_KEY!r} in its metadata, "
                f"got {len(data)} bytes that are not: {error!r}; refit the value model"
            ) from error
        if fitted_to != backbone_digest:
            raise ValueModelError(
                f"expected a value model of the backbone {backbone_digest!r}, got one that was "
                f"fitted to {fitted_to!r}; refit it with this run's reference policy"
            )
        return model


def fold(prompt_id: str) -> int:
    """Return the fold of a prompt, 0 or 1: the last bit of the first byte of its id's sha256."""
    return hashlib.sha256(prompt_id.encode()).digest()[0] % NUM_FOLDS


def example_weight(age_versions: float, is_continuation_or_retry: bool) -> float:
    """Return the weight of an outcome: 4 for a continuation or retry, else 1; halved every 5 ages.

    Args:
        age_versions: newest policy version minus the one whose outcome it is, at least 0.
        is_continuation_or_retry: whether the outcome comes from replay.

    Raises:
        ValueError: the age is negative.
    """
    if not age_versions >= 0:
        raise ValueError(f"expected an age of 0 or more policy versions, got {age_versions}")
    weight = REPLAY_WEIGHT if is_continuation_or_retry else 1.0
    return float(weight * 0.5 ** (age_versions / HALF_LIFE_VERSIONS))


def fit_value_model(
    features_ND: NDArray[Any],
    prompt_ids: Sequence[str],
    targets_N: NDArray[Any],
    weights_N: NDArray[Any],
    backbone_digest: str,
    l2: float = DEFAULT_L2,
) -> ValueModel:
    """Fit both heads; `predict` on the same rows then gives out-of-fold values.

    Args:
        features_ND: [N, D] finite; N may be 0.
        prompt_ids: [N] the prompt of each state.
        targets_N: [N] in [0, 1], 1 = success.
        weights_N: [N] finite, 0 or more; a weight of 2 equals two rows, one of 0 none.
        backbone_digest: of the model that made the features.
        l2: above 0; 1/l2 is the prior variance of an average state's logit.

    Raises:
        ValueModelError: lengths differ or a number is out of range.
    """
    _check_columns(features_ND, prompt_ids, targets_N, weights_N)
    if not l2 > 0:
        raise ValueModelError(f"expected `l2` above 0, got {l2}")
    folds_N = np.array([fold(prompt_id) for prompt_id in prompt_ids], dtype=np.int64)
    heads = []
    for judged in range(NUM_FOLDS):
        rows = np.flatnonzero((folds_N != judged) & (weights_N > 0))
        features, targets, weights = (
            column[rows].astype(np.float64) for column in (features_ND, targets_N, weights_N)
        )
        heads.append(_fit_head(features, targets, weights, l2))
    weights_KD = np.stack([head.weights_D for head in heads])
    return ValueModel(weights_KD, np.array([head.bias for head in heads]), backbone_digest)


class _Head(NamedTuple):
    weights_D: Floats
    bias: float


def _fit_head(features_ND: Floats, targets_N: Floats, weights_N: Floats, l2: float) -> _Head:
    """Fit one head to raw features: standardise, solve, and write the solution for raw ones."""
    num_rows, width = features_ND.shape
    if num_rows == 0 or targets_N.min() == targets_N.max():
        value = float(success_rate(weights_N @ targets_N, weights_N.sum()))
        return _Head(np.zeros(width), float(np.log(value / (1 - value))))
    mean_D = weights_N @ features_ND / weights_N.sum()
    std_D = np.sqrt(weights_N @ (features_ND - mean_D) ** 2 / weights_N.sum())
    varies_D = std_D > _CONSTANT * np.abs(mean_D)
    # 1/sqrt(D) turns the penalty's factor D into 1.
    scale_D = np.where(varies_D, 1 / (np.where(varies_D, std_D, 1) * np.sqrt(width)), 0)
    inputs_NE = np.empty((num_rows, width + 1))  # E = D + 1: the last input is 1, for the bias
    inputs_NE[:, :width] = (features_ND - mean_D) * scale_D
    inputs_NE[:, width] = 1
    penalty_E = np.append(np.full(width, l2), 0.0)
    solution_E = _solve(inputs_NE, targets_N, weights_N, penalty_E)
    weights_D = solution_E[:width] * scale_D
    return _Head(weights_D, float(solution_E[width] - mean_D @ weights_D))


def _solve(inputs_NE: Floats, targets_N: Floats, weights_N: Floats, penalty_E: Floats) -> Floats:
    """Minimise the penalised cross-entropy by Newton's method with a line search by halves."""

    def loss(solution_E: Floats) -> float:
        logits_N = inputs_NE @ solution_E
        losses_N = np.logaddexp(0, logits_N) - targets_N * logits_N
        return float(weights_N @ losses_N + penalty_E @ solution_E**2 / 2)

    solution_E = np.zeros(len(penalty_E))
    for _ in range(_MAX_STEPS):
        values_N = _sigmoid(inputs_NE @ solution_E)
        gradient_E = (weights_N * (values_N - targets_N)) @ inputs_NE + penalty_E * solution_E
        curvature_N = weights_N * values_N * (1 - values_N)
        hessian_EE = (inputs_NE.T * curvature_N) @ inputs_NE + np.diag(penalty_E)
        step_E = np.linalg.solve(hessian_EE, gradient_E)
        decrement = float(gradient_E @ step_E)
        if decrement <= _SOLVED:
            return solution_E - step_E
        start, length = loss(solution_E), 1.0
        while loss(solution_E - length * step_E) > start - length * decrement / 4:
            length /= 2
        solution_E = solution_E - length * step_E
    raise ArithmeticError(f"no minimum within {_MAX_STEPS} Newton steps; raise `l2`")


def _sigmoid(logits_N: Floats) -> Floats:
    return (1 + np.tanh(logits_N / 2)) / 2


def _check_heads(model: ValueModel) -> None:
    weights_KD, bias_K = model.weights_KD, model.bias_K
    if weights_KD.ndim != 2 or len(weights_KD) != NUM_FOLDS or bias_K.shape != (NUM_FOLDS,):
        raise ValueError(f"shapes {weights_KD.shape} and {bias_K.shape}")
    if not weights_KD.dtype == bias_K.dtype == np.float64:
        raise ValueError(f"dtypes {weights_KD.dtype} and {bias_K.dtype}")
    if not (np.isfinite(weights_KD).all() and np.isfinite(bias_K).all()):
        raise ValueError("numbers that are not finite")


def _check_columns(
    features_ND: NDArray[Any],
    prompt_ids: Sequence[str],
    targets_N: NDArray[Any],
    weights_N: NDArray[Any],
) -> None:
    num_rows = len(prompt_ids)
    if features_ND.ndim != 2 or len(features_ND) != num_rows:
        raise ValueModelError(
            f"expected features [{num_rows}, D], a row per prompt id, got {features_ND.shape}"
        )
    if not targets_N.shape == weights_N.shape == (num_rows,):
        raise ValueModelError(
            f"expected one target and one weight per prompt id, got {targets_N.shape} and "
            f"{weights_N.shape} for {num_rows}"
        )
    _check_finite(features_ND)
    if not ((targets_N >= 0) & (targets_N <= 1)).all():
        raise ValueModelError("expected targets in [0, 1], got others; leave unscored states out")
    if not ((weights_N >= 0) & np.isfinite(weights_N)).all():
        raise ValueModelError("expected finite weights of 0 or more, got others")


def _check_finite(features_ND: NDArray[Any]) -> None:
    if not np.isfinite(features_ND).all():
        row = int(np.flatnonzero(~np.isfinite(features_ND).all(axis=1))[0])
        raise ValueModelError(f"expected finite features, got others in row {row}; leave it out")
