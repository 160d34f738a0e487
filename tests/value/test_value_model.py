import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from rrl_core.value.model import ValueModel, ValueModelError, example_weight, fit_value_model, fold

SOLVED = 1e-9  # of probabilities
OBJECTIVE = 1e-9  # relative


def prompts_in(wanted_fold, num):
    names = (f"pr{i}" for i in range(100 * num))
    return [name for name in names if fold(name) == wanted_fold][:num]


LEFT, RIGHT = prompts_in(0, 40), prompts_in(1, 40)


def make_history(num_prompts=20, num_states=6, width=5, seed=0):
    """Features [N, D], prompt ids, targets and weights of prompts in both folds."""
    draw = np.random.default_rng(seed)
    prompt_ids = [*LEFT[: num_prompts // 2], *RIGHT[: num_prompts // 2]] * num_states
    features = draw.normal(size=(len(prompt_ids), width)) * 10.0 ** np.arange(width) + 3
    logits = (features[:, 0] - 3) * 2
    targets = (draw.random(len(prompt_ids)) < 1 / (1 + np.exp(-logits))).astype(float)
    return features, prompt_ids, targets, draw.uniform(0.1, 2.0, len(prompt_ids))


def test_prompts_fall_into_two_folds_by_their_hash():
    # sha256("a") = ca97..., an even first byte; sha256("b") = 3e23..., even; sha256("c") = 2e7d...,
    # sha256("d") = 18ac..., sha256("e") = 3f79..., odd.
    assert [fold(name) for name in "abcde"] == [0, 0, 0, 0, 1]
    share = sum(fold(f"pr{i}") for i in range(1000)) / 1000
    assert 0.45 < share < 0.55


def test_a_head_by_hand():
    # One feature, +1 or -1, so it is standardised as it is. Of four rows at +1 three succeed, of
    # four at -1 one. By symmetry the bias is 0, and the derivative for the weight t is
    #     8 (sigmoid(t) - 3/4) + l2 t = 0.
    # For t = ln 2, sigmoid(t) = 2/3, so l2 = (2/3) / ln 2.
    features = np.array([[1.0]] * 4 + [[-1.0]] * 4)
    targets = np.array([1, 1, 1, 0, 1, 0, 0, 0])
    model = fit_value_model(features, LEFT[:8], targets, np.ones(8), "base", l2=2 / 3 / math.log(2))
    predicted = model.predict(np.array([[1.0], [-1.0], [0.0]]), RIGHT[:3])
    np.testing.assert_allclose(predicted, [2 / 3, 1 / 3, 1 / 2], atol=SOLVED)


def objective(weights, bias, rows, l2):
    """The header's formula, row by row."""
    features, targets, row_weights = rows
    total = sum(row_weights)
    width = features.shape[1]
    loss = 0.0
    for x, y, w in zip(features, targets, row_weights, strict=True):
        value = 1 / (1 + math.exp(-(float(x @ weights) + bias)))
        loss -= w * (y * math.log(value) + (1 - y) * math.log(1 - value))
    for d in range(width):
        mean = sum(w * x[d] for x, w in zip(features, row_weights, strict=True)) / total
        squares = sum(w * (x[d] - mean) ** 2 for x, w in zip(features, row_weights, strict=True))
        loss += l2 / 2 * width * squares / total * weights[d] ** 2
    return loss


@pytest.mark.parametrize("l2", [0.1, 10.0])
def test_no_other_head_is_better(l2):
    features, prompt_ids, targets, weights = make_history()
    model = fit_value_model(features, prompt_ids, targets, weights, "base", l2)
    draw = np.random.default_rng(1)
    for head in (0, 1):
        other = [i for i, prompt_id in enumerate(prompt_ids) if fold(prompt_id) != head]
        rows = features[other], targets[other], weights[other]
        best = objective(model.weights_KD[head], model.bias_K[head], rows, l2)
        for size in (1e-3, 1e-1):
            for _ in range(10):
                step = draw.normal(size=features.shape[1]) / features.std(axis=0) * size
                moved = model.weights_KD[head] + step
                bias = model.bias_K[head] - step @ features.mean(axis=0) + draw.normal() * size
                assert objective(moved, bias, rows, l2) > best * (1 - OBJECTIVE)


def fit(rows, l2=1.0):
    return fit_value_model(*rows, "base", l2)


def test_a_prompts_own_outcomes_never_change_its_own_value():
    features, prompt_ids, targets, weights = make_history()
    model = fit((features, prompt_ids, targets, weights))
    before = model.predict(features, prompt_ids)
    for prompt_id in (LEFT[0], RIGHT[3]):
        own = np.array([p == prompt_id for p in prompt_ids])
        changed = fit(
            (
                np.where(own[:, None], features[::-1], features),
                prompt_ids,
                np.where(own, 1 - targets, targets),
                np.where(own, weights * 7, weights),
            )
        )
        after = changed.predict(features, prompt_ids)
        same_fold = np.array([fold(p) == fold(prompt_id) for p in prompt_ids])
        assert after[same_fold].tobytes() == before[same_fold].tobytes()
        assert np.abs(after - before)[~same_fold].min() > 1e-6


def assert_same_values(one, other):
    features, prompt_ids, *_ = make_history(seed=9)
    np.testing.assert_allclose(
        one.predict(features, prompt_ids), other.predict(features, prompt_ids), atol=SOLVED
    )


@given(st.data())
@settings(max_examples=10)
def test_a_doubled_weight_is_a_repeated_row_and_none_is_a_missing_one(data):
    features, prompt_ids, targets, weights = make_history(num_prompts=8)
    num_rows = len(prompt_ids)
    times = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    order = np.array(data.draw(st.permutations(range(num_rows))))
    repeated = np.repeat(order, times[order])
    assert_same_values(
        fit((features, prompt_ids, targets, weights * times)),
        fit(
            (
                features[repeated],
                [prompt_ids[i] for i in repeated],
                targets[repeated],
                weights[repeated],
            )
        ),
    )


def test_units_and_offsets_of_features_do_not_matter():
    features, prompt_ids, targets, weights = make_history()
    scale, offset = np.array([1e-3, 5.0, 1.0, 40.0, 0.1]), np.array([100.0, 0.0, -7.0, 3.0, 1.0])
    moved = features * scale + offset
    one = fit((features, prompt_ids, targets, weights)).predict(features, prompt_ids)
    other = fit((moved, prompt_ids, targets, weights)).predict(moved, prompt_ids)
    np.testing.assert_allclose(one, other, atol=SOLVED)


def test_constant_features_say_nothing():
    features, prompt_ids, targets, weights = make_history()
    constant = np.concatenate([features, np.full((len(features), 5), 0.1)], axis=1)
    # The penalty counts features: with twice as many, half of it is the same.
    with_constant = fit((constant, prompt_ids, targets, weights), l2=0.5)
    assert not with_constant.weights_KD[:, 5:].any()
    other = constant.copy()
    other[:, 5:] = 1000.0
    np.testing.assert_allclose(
        with_constant.predict(other, prompt_ids),
        fit((features, prompt_ids, targets, weights)).predict(features, prompt_ids),
        atol=SOLVED,
    )


def test_a_fold_with_one_class_or_no_data_says_its_mean():
    # Nine failures of weight 1/2 in the left fold: (0 + 0.5) / (4.5 + 2); none in the right.
    features = np.arange(9.0)[:, None]
    model = fit_value_model(features, LEFT[:9], np.zeros(9), np.full(9, 0.5), "base")
    values = model.predict(np.array([[4.0], [1e6], [4.0]]), [RIGHT[0], RIGHT[0], LEFT[0]])
    np.testing.assert_allclose(values, [0.5 / 6.5, 0.5 / 6.5, 0.25], atol=SOLVED)
    empty = fit_value_model(np.zeros((0, 3)), [], np.zeros(0), np.zeros(0), "base")
    np.testing.assert_allclose(empty.predict(np.ones((2, 3)), [LEFT[0], RIGHT[0]]), 0.25)


def test_values_are_probabilities_however_far_a_state_lies():
    features, prompt_ids, targets, weights = make_history()
    model = fit((features, prompt_ids, targets, weights), l2=1e-6)
    values = model.predict((features - 3) * 1e9, prompt_ids)
    assert 0 < values.min() < 1e-9
    assert 1 - 1e-9 < values.max() < 1


def test_a_strong_penalty_leaves_the_mean():
    features, prompt_ids, targets, weights = make_history()
    values = fit((features, prompt_ids, targets, weights), l2=1e12).predict(features, prompt_ids)
    is_left = np.array([fold(p) == 0 for p in prompt_ids])
    np.testing.assert_allclose(
        values[is_left], np.average(targets[~is_left], weights=weights[~is_left]), atol=1e-6
    )


def test_targets_between_failure_and_success_are_learned():
    features = np.array([[1.0], [-1.0]] * 20)
    targets = np.array([0.7, 0.2] * 20)
    model = fit_value_model(features, LEFT, targets, np.ones(40), "base", l2=1e-9)
    np.testing.assert_allclose(model.predict(features[:2], RIGHT[:2]), [0.7, 0.2], atol=1e-6)


def test_bytes_keep_the_model_and_equal_models_give_equal_bytes():
    rows = make_history()
    model = fit(rows)
    data = model.to_bytes()
    assert data == fit(rows).to_bytes()
    again = ValueModel.from_bytes(data, "base")
    assert again.to_bytes() == data
    assert again.predict(*rows[:2]).tobytes() == model.predict(*rows[:2]).tobytes()


@pytest.mark.parametrize("damage", [b"", b"\x00" * 20, "cut", "other"])
def test_damaged_bytes_are_refused(damage):
    data = fit(make_history()).to_bytes()
    if damage == "cut":
        damage = data[:-1]
    if damage == "other":
        damage = save({"weights": np.zeros((2, 3))})
    with pytest.raises(ValueModelError, match=r"expected a value model.*refit"):
        ValueModel.from_bytes(damage, "base")


@pytest.mark.parametrize(
    ("weights", "bias"),
    [
        (np.zeros((3, 4)), np.zeros(3)),
        (np.zeros((2, 4)), np.zeros(3)),
        (np.zeros((2, 4), np.float32), np.zeros(2)),
        (np.full((2, 4), np.nan), np.zeros(2)),
    ],
)
def test_heads_of_another_shape_or_kind_are_refused(weights, bias):
    data = ValueModel(weights, bias, "base").to_bytes()
    with pytest.raises(ValueModelError, match="expected a value model"):
        ValueModel.from_bytes(data, "base")


def test_another_backbone_is_refused():
    data = fit(make_history()).to_bytes()
    with pytest.raises(ValueModelError, match=r"backbone 'other'.*fitted to 'base'"):
        ValueModel.from_bytes(data, "other")


def test_features_of_another_width_are_refused():
    model = fit(make_history(width=5))
    with pytest.raises(ValueModelError, match=r"\[1, 5\].*\(1, 4\)"):
        model.predict(np.zeros((1, 4)), ["x"])
    with pytest.raises(ValueModelError, match=r"\[2, 5\].*\(1, 5\)"):
        model.predict(np.zeros((1, 5)), ["x", "y"])
    with pytest.raises(ValueModelError, match="finite"):
        model.predict(np.full((1, 5), np.nan), ["x"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("features_ND", np.full((3, 2), np.inf), "finite features"),
        ("features_ND", np.zeros(3), r"features \[3, D\]"),
        ("targets_N", np.array([0, 1, 2.0]), r"targets in \[0, 1\]"),
        ("targets_N", np.array([0, 1, np.nan]), r"targets in \[0, 1\]"),
        ("targets_N", np.zeros(2), "one target and one weight"),
        ("weights_N", np.array([1, 1, -1.0]), "weights of 0 or more"),
        ("weights_N", np.array([1, 1, np.inf]), "weights of 0 or more"),
        ("weights_N", np.ones(4), "one target and one weight"),
        ("l2", 0.0, "`l2` above 0"),
    ],
)
def test_columns_that_cannot_be_fitted_are_refused(name, value, message):
    columns = {
        "features_ND": np.zeros((3, 2)), "prompt_ids": ["a", "b", "e"], "targets_N": np.zeros(3),
        "weights_N": np.ones(3), "backbone_digest": "base", "l2": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueModelError, match=message):
        fit_value_model(**(columns | {name: value}))


def test_example_weights_by_hand():
    assert example_weight(0, False) == 1
    assert example_weight(0, True) == 4
    assert example_weight(5, True) == 2
    assert example_weight(10, False) == 0.25
    assert example_weight(1, False) == pytest.approx(0.870550563)  # 2 ** -0.2
    with pytest.raises(ValueError, match="age of 0 or more"):
        example_weight(-1, False)


def test_a_value_does_not_depend_on_what_is_asked_beside_it():
    rng = np.random.default_rng(4)
    features = rng.normal(size=(257, 33)).astype(np.float32)
    prompt_ids = [f"p{n % 7}" for n in range(257)]
    targets = (features[:, 0] > 0).astype(float)
    model = fit_value_model(features, prompt_ids, targets, np.ones(257), "b")
    together = model.predict(features, prompt_ids)
    order = rng.permutation(257)
    shuffled = model.predict(features[order], [prompt_ids[n] for n in order])
    assert (together[order] == shuffled).all()
    alone = [model.predict(features[n : n + 1], prompt_ids[n : n + 1])[0] for n in range(257)]
    assert (together == np.array(alone)).all()
