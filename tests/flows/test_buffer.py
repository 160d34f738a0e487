"""The buffer a run picks from: bounded whoever judges, weighed by a curriculum where it is on."""

import json
from pathlib import Path

import pytest

import storage
from flows import replaying
from flows.materializing import Moment, materialize
from flows.replaying import NO_MODEL, Buffer, Pin, decide, read_buffer
from rrl_core.replay.factors import hash_ids
from rrl_core.replay.schedule import curriculum_weights
from tests.flows.conftest import RUN_ID, replay_config, run_here
from tests.storage.replay_rows import Run

ITERATION = 5


@pytest.fixture
def pin(replayed: storage.Store) -> Pin:
    [row] = replayed.read("views_pinned", run_id=RUN_ID, iteration=ITERATION)
    return Pin(row["as_of"], NO_MODEL)


def states_in(buffer: Buffer) -> list[dict]:
    return [row for row in buffer.eligible.to_pylist() if row["unit"] == "state"]


def test_without_a_model_the_capacity_bounds_the_states_and_keeps_the_best(
    replayed: storage.Store, pin: Pin
):
    whole = read_buffer(replayed, RUN_ID, pin, replay_config())
    worth = {row["entry_key"]: row["value"] - row["prompt_value"] for row in states_in(whole)}
    few = read_buffer(replayed, RUN_ID, pin, replay_config("replay.capacity=10"))
    hashes = dict(zip(worth, hash_ids(worth), strict=True))
    best = sorted(worth, key=lambda key: (-worth[key], hashes[key]))[:10]
    assert sorted(row["entry_key"] for row in states_in(few)) == sorted(best)
    assert few.num_candidates == whole.num_candidates
    assert few.num_eligible()["state"] == 10
    reasons = json.loads(few.reasons_json())["state"]
    assert reasons["beyond_capacity"] == len(worth) - 10
    others = [row for row in few.eligible.to_pylist() if row["unit"] != "state"]
    assert others == [row for row in whole.eligible.to_pylist() if row["unit"] != "state"]


def test_the_capacity_bounds_every_unit_and_what_is_held_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    capacity, num_prompts = 3, 40
    run = Run(storage.open(tmp_path / "store", create=True), RUN_ID, kind="train")
    run.pin(1)
    for number in range(num_prompts):  # the more failures, the larger 1 - p_hat
        run.sample([1.0] + [0.0] * (3 + number % 13), f"p{number:02}", signature=f"{number // 13}")
    held = []
    within, batches = replaying._within_capacity, run.store.batches

    def watched(eligible, config):
        held.append(len(eligible))
        return within(eligible, config)

    def one_by_one(*arguments):
        for batch in batches(*arguments):
            yield from (batch.slice(row, 1) for row in range(len(batch)))

    monkeypatch.setattr(replaying, "_within_capacity", watched)
    monkeypatch.setattr(run.store, "batches", one_by_one)
    pin = Pin(run.store.head().number, NO_MODEL)
    found = read_buffer(run.store, RUN_ID, pin, replay_config(f"replay.capacity={capacity}"))
    assert max(held) <= 4 * capacity + 1  # three units, and as many again as one
    rows = found.eligible.to_pylist()
    assert found.num_eligible() == {"trajectory": capacity, "prompt": capacity}
    for unit in ("trajectory", "prompt"):
        # 1 of 16 attempts succeeded of p12, p25 and p38 alone
        assert {r["prompt_id"] for r in rows if r["unit"] == unit} == {"p12", "p25", "p38"}
        assert json.loads(found.reasons_json())[unit]["beyond_capacity"] == num_prompts - capacity
    assert found.num_candidates == 2 * num_prompts


def test_below_the_capacity_the_same_is_picked(replayed: storage.Store, pin: Pin):
    num_states = len(states_in(read_buffer(replayed, RUN_ID, pin, replay_config())))
    decided = [
        decide(replayed, RUN_ID, replay_config(f"replay.capacity={n}"), ITERATION, pin)
        for n in (16_384, num_states)
    ]
    assert decided[0].picks == decided[1].picks
    assert decided[0].plan == decided[1].plan
    assert decided[0].picks


def test_a_model_that_judges_within_the_capacity_is_bounded_by_it_already(tmp_path: Path):
    config = replay_config("replay.capacity=10", "run.iterations=3", "evaluation.every=off")
    store = run_here(tmp_path / "store", config)
    model = store.read("value_models", run_id=RUN_ID)[-1]
    pins = [Pin(store.head().number, version) for version in (model["scorer_version"], NO_MODEL)]
    judged, unjudged = (read_buffer(store, RUN_ID, pin, config) for pin in pins)
    assert "beyond_capacity" in unjudged.reasons_json()  # there is more than is held
    assert "beyond_capacity" not in judged.reasons_json()
    assert 0 < len(states_in(judged)) <= 10


def test_a_curriculum_multiplies_priorities_by_the_weight_of_the_difficulty(
    replayed: storage.Store, pin: Pin
):
    config = replay_config("replay.curriculum=true")
    whole = read_buffer(replayed, RUN_ID, pin, config)
    entries = replayed.view(
        "replay_buffer", arguments={"run": RUN_ID, "version": NO_MODEL}, as_of=pin.as_of
    )
    tried: dict[str, list[int]] = {}
    for row in entries:
        if row["unit"] == "prompt":
            tries = tried.setdefault(row["difficulty"], [0, 0])
            tries[0] += row["prompt_ok"]
            tries[1] += row["prompt_tries"]
    rates = {difficulty: ok / num for difficulty, (ok, num) in tried.items()}
    assert whole.pass_rates == pytest.approx(rates)
    weights = curriculum_weights(rates)
    assert any(weight < 1 for weight in weights.values())
    moment = Moment(pin.as_of, NO_MODEL)
    plain, weighed = (
        {(r["unit"], r["entry_id"]): r for r in materialize(replayed, RUN_ID, c, moment, 9999).best}
        for c in (replay_config(), config)
    )
    for key, row in weighed.items():
        factor = weights[row["difficulty"]]
        assert row["priority"] == pytest.approx(plain[key]["priority"] * factor, rel=1e-12)
    for pick in decide(replayed, RUN_ID, config, ITERATION, pin).picks:
        assert pick["priority"] == weighed[pick["unit"], pick["entry_id"]]["priority"]
