import math

import numpy as np
import pytest

from rrl_core.replay.factors import (
    PriorityRule,
    base,
    concatenate,
    default_horizon,
    hash_ids,
    log_freshness,
    log_priority,
    make_candidates,
    rarity,
)
from tests.replay.candidates import STATE, candidates

EXACT = 1e-12
RULE = PriorityRule(horizon=8.0)


@pytest.mark.parametrize(
    ("state_base", "expected"),
    [
        ("gain", 0.5),  # 0.75 - 0.25
        ("value", 0.75),
        ("variance", 0.1875),  # 0.75 * 0.25
        ("retry_success", 0.5),  # (3 + 0.5) / (5 + 2)
    ],
)
def test_the_base_of_a_state(state_base, expected):
    rows = candidates({"value": 0.75, "prompt_value": 0.25, "state_ok": 3, "state_tries": 5})
    rule = PriorityRule(horizon=8.0, state_base=state_base)
    assert base(rows, rule) == pytest.approx([expected], abs=EXACT)


def test_the_base_of_trajectories_and_prompts_rests_on_p_hat():
    rows = candidates(
        {"unit": "trajectory", "value": 1.0, "p_hat": 0.125},
        {"unit": "prompt", "value": 0.125, "p_hat": 0.125, "is_ever_solved": True},
        {"unit": "prompt", "value": 0.125, "p_hat": 0.125, "is_ever_solved": False},
    )
    assert base(rows, RULE).tolist() == [0.875, 0.875, 0.0]


def test_only_trajectories_fade_and_have_a_rarity():
    rows = candidates(
        *(
            {"unit": unit, "age": 4, "signature_count": 4}
            for unit in ("trajectory", "state", "prompt")
        )
    )
    assert log_freshness(rows, RULE).tolist() == [-0.5, 0.0, 0.0]  # -4 / 8
    assert rarity(rows).tolist() == [0.25, 1.0, 1.0]


def test_the_log_priority_is_the_product_in_logs():
    rows = candidates(
        {"unit": "trajectory", "value": 1.0, "p_hat": 0.2, "age": 4, "signature_count": 4},
        {"value": 0.75, "prompt_value": 0.25, "difficulty": "hard"},
    )
    rule = PriorityRule(horizon=8.0, beta=10.0, curriculum={"hard": 0.5})
    # 10 * 0.8 - 4/8 + 0.5 ln(1/4); 10 * 0.5 + ln 0.5
    expected = [8 - 0.5 - math.log(2), 5 - math.log(2)]
    assert log_priority(rows, rule) == pytest.approx(expected, abs=EXACT)


def test_a_sharpness_of_a_thousand_stays_finite():
    rows = candidates({"value": 1.0, "prompt_value": 0.0}, {"value": 0.0, "prompt_value": 1.0})
    assert log_priority(rows, PriorityRule(horizon=8.0, beta=1000.0)).tolist() == [1000.0, -1000.0]


def test_the_horizon_is_a_quarter_of_the_run_and_eight_at_least():
    assert [default_horizon(n) for n in (1, 32, 200)] == [8.0, 8.0, 50.0]


def test_hashes_of_ids_are_the_same_on_every_machine():
    # python: hashlib.blake2b(b"a", digest_size=8).digest() read as little-endian
    assert hash_ids(["a", "a\udc80"])[0] == int.from_bytes(
        bytes.fromhex("40f89e395b66422f"), "little"
    )
    assert len(set(hash_ids(["a", "b", "a\udc80", ""]).tolist())) == 4


def test_missing_texts_are_empty_and_a_state_never_judged_has_no_value():
    rows = candidates({"signature": None, "value": None, "is_eligible": False})
    assert rows.signature[0] == ""
    assert np.isnan(rows.value[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"unit": "token"}, "token"),
        ({"value": math.nan, "entry_id": "gone"}, "finite `value`.*'gone'"),
        ({"p_hat": math.inf}, "finite `p_hat`"),
        ({"age": -1}, "age >= 0"),
        ({"signature_count": 0}, "signature_count >= 1"),
    ],
)
def test_rows_that_cannot_be_ranked_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        candidates(row)


def test_columns_that_are_missing_or_of_another_length_are_refused():
    columns = {name: [value] for name, value in STATE.items()}
    with pytest.raises(ValueError, match=r"missing: \['entry_id', 'prompt_id'\]"):
        make_candidates(columns)
    with pytest.raises(ValueError, match="`prompt_id` came with shape \\(2,\\)"):
        make_candidates({**columns, "entry_id": ["a"], "prompt_id": ["a", "b"]})


def test_rows_survive_being_taken_apart_and_put_together():
    rows = candidates({}, {"value": 0.7}, {"unit": "prompt"})
    parts = [rows.take(np.array([0])), rows.take(np.array([False, True, True]))]
    assert concatenate(parts).value.tolist() == rows.value.tolist()
    assert concatenate(parts).entry_id.tolist() == ["e0", "e1", "e2"]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"horizon": 0.0}, "horizon > 0"),
        ({"horizon": 8.0, "beta": -1.0}, "beta >= 0"),
        ({"horizon": 8.0, "state_base": "luck"}, "'luck'"),
        ({"horizon": 8.0, "curriculum": {"hard": 0.0}}, "above 0"),
    ],
)
def test_a_rule_out_of_range_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        PriorityRule(**numbers)
