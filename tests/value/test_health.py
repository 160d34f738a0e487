import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.value.health import (
    AGE_BUCKETS,
    auroc,
    brier,
    calibration,
    correlation,
    health,
    within_prompt_auroc,
)
from rrl_core.value.model import fit_value_model

EXACT = 1e-12


def test_auroc_by_hand():
    # Successes 0.9 and 0.4 against failures 0.5 and 0.1: of four pairs, three are in order.
    assert auroc([0.9, 0.5, 0.4, 0.1], [1, 0, 1, 0]) == 0.75
    # A success tied with one of two failures and above the other: 1.5 of 2 pairs.
    assert auroc([0.5, 0.5, 0.2], [True, False, False]) == 0.75
    assert auroc([0.3, 0.3, 0.3], [1, 0, 1]) == 0.5


@pytest.mark.parametrize("labels", [[], [1], [0, 0], [1, 1, 1]])
def test_one_class_has_no_auroc(labels):
    assert auroc([0.5] * len(labels), labels) is None


# Few values, so that ties are common.
judged = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from("abc")), max_size=30)


def columns(rows):
    scores, labels, prompt_ids = ([row[i] for row in rows] for i in range(3))
    return np.array(scores, dtype=float), labels, prompt_ids


def counted_auroc(scores, labels):
    """The definition: a random success scores above a random failure; half for a tie."""
    pairs = [
        (s > f) + (s == f) / 2
        for s, is_success in zip(scores, labels, strict=True)
        for f, is_other in zip(scores, labels, strict=True)
        if is_success and not is_other
    ]
    return sum(pairs) / len(pairs) if pairs else None


@given(judged)
def test_auroc_is_the_share_of_pairs_in_order(rows):
    scores, labels, _ = columns(rows)
    assert auroc(scores, labels) == pytest.approx(counted_auroc(scores, labels), abs=EXACT)


@given(judged)
def test_only_the_order_of_scores_matters(rows):
    scores, labels, prompt_ids = columns(rows)
    for moved in (np.exp(scores), scores**3 - 7, 1 / (1 + np.exp(-scores))):
        assert auroc(moved, labels) == auroc(scores, labels)
        assert within_prompt_auroc(moved, labels, prompt_ids) == within_prompt_auroc(
            scores, labels, prompt_ids
        )


@given(judged)
def test_reversed_scores_reverse_the_auroc(rows):
    scores, labels, _ = columns(rows)
    found = auroc(scores, labels)
    if found is not None:
        assert auroc(-scores, labels) == pytest.approx(1 - found, abs=EXACT)


@given(judged, st.permutations(range(30)))
def test_the_order_of_rows_does_not_matter(rows, order):
    shuffled = [rows[i] for i in order if i < len(rows)]
    assert within_prompt_auroc(*columns(rows)) == within_prompt_auroc(*columns(shuffled))


@given(judged, st.lists(st.integers(-9, 9), min_size=3, max_size=3))
def test_within_prompts_shifts_of_a_prompt_are_not_seen(rows, shifts):
    scores, labels, prompt_ids = columns(rows)
    moved = scores + [shifts["abc".index(p)] for p in prompt_ids]
    assert within_prompt_auroc(moved, labels, prompt_ids) == within_prompt_auroc(
        scores, labels, prompt_ids
    )


def test_within_prompt_auroc_by_hand():
    scores = [0.9, 0.8, 0.1, 0.2, 0.3, 0.7, 0.6]
    labels = [1, 0, 0, 1, 0, 1, 1]
    prompt_ids = ["a", "a", "b", "b", "b", "c", "c"]
    # a: 1 of 1 pair. b: 0.2 above 0.1, below 0.3: 1 of 2. c has no failure. Mean of 1 and 0.5.
    assert within_prompt_auroc(scores, labels, prompt_ids) == (0.75, 2)
    assert within_prompt_auroc(scores[5:], labels[5:], prompt_ids[5:]) == (None, 0)


def test_a_model_that_only_tells_prompts_apart_is_blind_within_them():
    # Pooled, 0.9 for the easy prompt and 0.1 for the hard one: pairs within a prompt are ties
    # (3 + 3 of them), easy successes beat hard failures (9), hard successes lose to easy ones (1).
    scores = [0.9] * 4 + [0.1] * 4
    labels = [1, 1, 1, 0, 1, 0, 0, 0]
    assert auroc(scores, labels) == pytest.approx((9 + 6 / 2) / 16)
    assert within_prompt_auroc(scores, labels, ["e"] * 4 + ["h"] * 4) == (0.5, 2)


def test_brier_by_hand():
    assert brier([0.8, 0.4], [1, 0]) == pytest.approx((0.04 + 0.16) / 2, abs=EXACT)
    assert brier([], []) is None


def test_calibration_by_hand():
    bins = calibration([0.0, 0.04, 0.1, 0.95, 1.0], [0, 1, 0, 1, 1])
    assert len(bins) == 10
    assert (bins[0].num_states, bins[0].mean_value, bins[0].mean_outcome) == (2, 0.02, 0.5)
    assert (bins[1].num_states, bins[1].mean_value, bins[1].mean_outcome) == (1, 0.1, 0.0)
    assert (bins[9].num_states, bins[9].mean_value, bins[9].mean_outcome) == (2, 0.975, 1.0)
    assert (bins[5].num_states, bins[5].mean_value, bins[5].mean_outcome) == (0, None, None)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans())))
def test_every_state_is_in_one_bin_and_within_its_edges(rows):
    bins = calibration([v for v, _ in rows], [y for _, y in rows])
    assert sum(b.num_states for b in bins) == len(rows)
    for i, b in enumerate(bins):
        assert b.mean_value is None or i / 10 - EXACT <= b.mean_value <= (i + 1) / 10 + EXACT


def test_correlation_by_hand():
    # Centred: (-1, 0, 1) and (-1, -1, 2); products 1 + 0 + 2, norms sqrt(2) and sqrt(6).
    assert correlation([0.1, 0.2, 0.3], [1, 1, 4]) == pytest.approx(3 / 12**0.5, abs=EXACT)
    assert correlation([0.1, 0.2], [5, 3]) == pytest.approx(-1, abs=EXACT)
    assert correlation([0.1, 0.1, 0.1], [1, 2, 3]) is None
    assert correlation([0.1, 0.2], [3, 3]) is None
    assert correlation([0.3], [1]) is None


NUM_MIXED = 20


def judgements(num_prompts=NUM_MIXED, wrong=4, num_states=10):
    """Prompts of ten states; in `wrong` of them the one success is below all failures."""
    values, labels, prompt_ids = [], [], []
    for prompt in range(num_prompts):
        is_wrong = prompt < wrong
        values += [0.05 if is_wrong else 0.9] + [0.1 + 0.01 * i for i in range(num_states - 1)]
        labels += [1] + [0] * (num_states - 1)
        prompt_ids += [f"p{prompt}"] * num_states
    num = len(values)
    return {
        "values_N": np.array(values), "labels_N": np.array(labels), "prompt_ids": prompt_ids,
        "prefix_tokens_N": np.arange(num) % num_states, "ages_N": np.arange(num) % 30,
        "signature_counts": [None] * num,
    }  # fmt: skip


def test_healthy_by_hand():
    # 16 of 20 prompts right: within, 16/20. Pooled, the 16 successes beat all failures, the 4
    # others none: also 0.8.
    found = health(**judgements())
    assert found.verdict == "healthy"
    assert found.within_prompt_auroc == pytest.approx(0.8, abs=EXACT)
    assert found.auroc == pytest.approx(0.8, abs=EXACT)
    assert (found.num_states, found.num_prompts, found.num_mixed_prompts) == (200, 20, 20)
    assert found.mean_outcome == 0.1
    assert json.loads(json.dumps(asdict(found)))["calibration"][0]["num_states"] == 4
    # Squared errors: 16 of 0.01, 4 of 0.9025, and of each prompt's failures the sum of squares
    # of 0.10 ... 0.18, 0.1824.
    assert found.brier == pytest.approx((0.16 + 3.61 + 20 * 0.1824) / 200, abs=EXACT)


@pytest.mark.parametrize(
    ("num_prompts", "wrong", "verdict"),
    [
        (20, 8, "healthy"),  # pooled and within 0.6: just enough
        (20, 9, "unhealthy"),  # 0.55 within is enough, 0.55 pooled is not
        (20, 10, "unhealthy"),
        (100, 40, "healthy"),
        (100, 41, "unhealthy"),  # both 0.59: within is enough, pooled is not
        (19, 0, "insufficient_data"),
    ],
)
def test_verdicts_at_their_limits(num_prompts, wrong, verdict):
    assert health(**judgements(num_prompts, wrong)).verdict == verdict


@pytest.mark.parametrize(("wrong", "verdict"), [(45, "healthy"), (46, "unhealthy")])
def test_within_prompts_the_limit_is_0_55_whatever_the_pooled_auroc(wrong, verdict):
    columns = judgements(100, wrong)
    solved = judgements(10, 0)  # prompts that always succeed, above all others
    solved |= {
        "values_N": np.full(100, 0.95),
        "labels_N": [1] * 100,
        "prompt_ids": ["solved"] * 100,
    }
    both = {name: [*columns[name], *solved[name]] for name in columns}
    found = health(**both)
    assert found.within_prompt_auroc == pytest.approx(1 - wrong / 100, abs=EXACT)
    assert found.auroc > 0.7
    assert found.verdict == verdict


def test_telling_prompts_apart_is_not_enough():
    columns = judgements(num_prompts=30, wrong=0, num_states=4)
    is_easy = np.repeat(np.arange(30) % 2 == 0, 4)
    labels = np.where(is_easy, 1 - columns["labels_N"], columns["labels_N"])
    found = health(**columns | {"values_N": np.where(is_easy, 0.8, 0.2), "labels_N": labels})
    assert found.auroc == 0.75
    assert found.within_prompt_auroc == 0.5
    assert found.verdict == "unhealthy"


def test_one_class_and_no_data_are_insufficient():
    columns = judgements()
    found = health(**columns | {"labels_N": np.zeros(200)})
    assert (found.verdict, found.auroc, found.within_prompt_auroc) == (
        "insufficient_data",
        None,
        None,
    )
    nothing = {name: column[:0] for name, column in columns.items()}
    found = health(**nothing)
    assert (found.verdict, found.num_states, found.mean_outcome) == ("insufficient_data", 0, None)
    assert [bucket.num_states for bucket in found.by_age] == [0] * len(AGE_BUCKETS)


def test_correlations_and_ages_by_hand():
    # Values grow with the length and fall with how common the signature is, where it is known.
    columns = judgements() | {
        "values_N": np.linspace(0.1, 0.9, 200),
        "prefix_tokens_N": np.arange(200) * 3,
        "signature_counts": [None, *range(199, 0, -1)],
    }
    found = health(**columns)
    assert found.length_corr == pytest.approx(1, abs=EXACT)
    assert found.signature_corr == pytest.approx(-1, abs=EXACT)
    assert health(**judgements()).signature_corr is None
    # Ages 0-29 in turn: of 200 rows, 6 rounds of 30 and the ages 0-19 once more.
    assert [bucket.min_age for bucket in found.by_age] == [0, 5, 10, 20]
    assert [bucket.num_states for bucket in found.by_age] == [35, 35, 70, 60]
    first = columns["ages_N"] < 5
    values, labels = columns["values_N"][first], columns["labels_N"][first]
    assert found.by_age[0].auroc == auroc(values, labels)
    assert found.by_age[0].brier == brier(values, labels)
    assert found.by_age[0].mean_value == pytest.approx(values.mean(), abs=EXACT)
    assert found.by_age[0].mean_outcome == pytest.approx(labels.mean(), abs=EXACT)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("values_N", np.full(200, np.nan), r"values in \[0, 1\]"),
        ("values_N", np.full(200, 1.5), r"values in \[0, 1\]"),
        ("labels_N", np.full(200, 0.5), "labels of 0 or 1"),
        ("labels_N", np.zeros(199), "equally many"),
        ("ages_N", np.full(200, -1), "ages of 0 or more"),
        ("prompt_ids", ["a"], "equally many"),
        ("signature_counts", [], "equally many"),
    ],
)
def test_columns_that_cannot_be_examined_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        health(**judgements() | {name: value})


def fitted_health(is_shuffled):
    """Fit a value model to 40 prompts of 16 states and examine it out of fold."""
    draw = np.random.default_rng(4)
    prompt_ids = [f"pr{i}" for i in range(40) for _ in range(16)]
    features = draw.normal(size=(640, 8)).astype(np.float32)
    labels = (features @ np.arange(8) > 0).astype(float)
    if is_shuffled:
        labels = draw.permutation(labels)
    model = fit_value_model(features, prompt_ids, labels, np.ones(640), "base")
    values = model.predict(features, prompt_ids)
    tokens = draw.integers(1, 40, 640)
    return health(values, labels, prompt_ids, tokens, np.zeros(640, int), [None] * 640)


def test_separable_outcomes_are_learned_across_prompts():
    found = fitted_health(is_shuffled=False)
    assert found.verdict == "healthy"
    assert found.auroc > 0.9
    assert found.within_prompt_auroc > 0.9


def test_shuffled_outcomes_are_unhealthy():
    found = fitted_health(is_shuffled=True)
    assert found.num_mixed_prompts == 40
    assert found.verdict == "unhealthy"
