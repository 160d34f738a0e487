"""The buffer as of any commit and under any judge: entries, reasons, changes."""

import json

import pytest

import storage
from flows import materializing
from flows.history_commands import MaterializeRequest, run_materialize
from flows.materializing import Moment, compare_moments, materialize
from flows.metrics import iteration_metrics
from flows.replaying import Pin, decide
from tests.flows.conftest import RUN_ID, replay_config

CONFIG = replay_config()


def pinned(store: storage.Store, iteration: int) -> int:
    [pin] = store.read("views_pinned", run_id=RUN_ID, iteration=iteration)
    return int(pin["as_of"])


def test_what_was_picked_had_the_facts_that_are_shown(replayed: storage.Store):
    for iteration in (3, 5):
        plan = replayed.read("replay_plans", run_id=RUN_ID, iteration=iteration)[0]
        picks = replayed.read("picks", run_id=RUN_ID, iteration=iteration)
        version = next((p["scorer_version"] for p in picks if p["unit"] == "state"), None) or "none"
        moment = Moment(pinned(replayed, iteration), version)
        found = materialize(replayed, RUN_ID, CONFIG, moment, limit=10_000)
        assert found.reasons.total() == plan["num_candidates"]
        assert len(found.best) == plan["num_eligible"]
        shown = {(row["unit"], row["entry_id"]): row for row in found.best}
        for pick in picks:
            row = shown[pick["unit"], pick["entry_id"]]
            for name in ("value", "prompt_value", "base", "freshness", "rarity", "priority", "age"):
                assert row[name] == pick[name], name


def test_what_lies_beyond_the_capacity_is_counted_as_in_the_plan(replayed: storage.Store):
    config = replay_config("replay.capacity=10")
    pin = Pin(pinned(replayed, 5), "none")
    plan = decide(replayed, RUN_ID, config, 5, pin).plan
    found = materialize(replayed, RUN_ID, config, Moment(pin.as_of, "none"), limit=10_000)
    of_states = {reason: n for (unit, reason), n in found.reasons.items() if unit == "state"}
    assert of_states == json.loads(plan["reasons_json"])["state"]
    assert of_states["beyond_capacity"] > 0
    assert len(found.best) == plan["num_eligible"]
    whole = materialize(replayed, RUN_ID, CONFIG, Moment(pin.as_of, "none"), limit=10_000)
    assert len(whole.best) - len(found.best) == of_states["beyond_capacity"]


def test_entries_are_listed_by_priority_and_the_rest_is_counted(replayed: storage.Store):
    moment = Moment(replayed.head().number, "none")
    everything = materialize(replayed, RUN_ID, CONFIG, moment, limit=10_000)
    few = materialize(replayed, RUN_ID, CONFIG, moment, limit=3)
    assert [r["entry_id"] for r in few.best] == [r["entry_id"] for r in everything.best[:3]]
    priorities = [row["priority"] for row in everything.best]
    assert priorities == sorted(priorities, reverse=True)
    assert few.reasons == everything.reasons


def test_another_judge_at_another_time_gives_another_buffer(replayed: storage.Store):
    models = replayed.read("value_models", run_id=RUN_ID)
    early, late = models[0]["scorer_version"], models[-1]["scorer_version"]
    head = replayed.head().number
    for version in (early, late):
        found = materialize(replayed, RUN_ID, CONFIG, Moment(head, version), limit=10_000)
        judged = {r["scorer_version"] for r in found.best if r["unit"] == "state"}
        assert judged <= {version}
    changes = compare_moments(
        replayed, RUN_ID, CONFIG, Moment(pinned(replayed, 3), early), Moment(head, late)
    )
    assert changes
    assert [abs(c.rise) for c in changes] == sorted((abs(c.rise) for c in changes), reverse=True)
    for change in changes:
        assert change.kind in ("entered", "left", "rose", "fell")
        assert change.why
        if change.kind == "rose":
            assert change.before
            assert change.after
            assert change.rise == change.after["priority"] - change.before["priority"] > 0


def reasons_at(store: storage.Store, moment: Moment) -> dict[str, str]:
    arguments = {"run": RUN_ID, "version": moment.version}
    rows = store.view("replay_buffer", arguments=arguments, as_of=moment.as_of)
    return {row["entry_key"]: row["eligibility_reason"] for row in rows}


def test_what_enters_and_leaves_says_why_it_could_not_be_picked(replayed: storage.Store):
    before, after = (Moment(pinned(replayed, iteration), "none") for iteration in (4, 6))
    changes = compare_moments(replayed, RUN_ID, CONFIG, before, after)
    told = {"entered": set(), "left": set()}
    for change in changes:
        if change.kind == "entered":
            assert change.after
            was = reasons_at(replayed, before).get(change.after["entry_key"], "no candidate")
            assert change.why == f"{was} before"
            told["entered"].add(was)
        if change.kind == "left":
            assert change.before
            now = reasons_at(replayed, after).get(change.before["entry_key"], "no candidate")
            assert change.why == f"{now} now"
            told["left"].add(now)
    assert len(told["entered"]) > 1
    assert told["left"]


def test_whatever_moved_a_priority_is_named(replayed: storage.Store):
    config = replay_config("replay.curriculum=true")
    before, after = (Moment(pinned(replayed, iteration), "none") for iteration in (4, 6))
    changes = compare_moments(replayed, RUN_ID, config, before, after)
    moved = [change for change in changes if change.kind in ("rose", "fell")]
    for change in moved:
        assert change.before
        assert change.after
        assert change.why
        is_other = change.before["curriculum"] != change.after["curriculum"]
        assert ("curriculum" in change.why) == is_other
    assert any("curriculum" in change.why for change in moved)
    row = materialize(replayed, RUN_ID, config, after, limit=1).best[0] | {"is_ever_solved": False}
    solved = row | {"is_ever_solved": True, "priority": row["priority"] + 1}
    change = materializing._moved(row, solved)
    assert change
    assert (change.kind, change.why) == ("rose", "is_ever_solved False to True")


def test_nothing_changes_between_a_moment_and_itself(replayed: storage.Store):
    now = Moment(replayed.head().number, "none")
    assert compare_moments(replayed, RUN_ID, CONFIG, now, now) == []


def test_the_command_prints_entries_reasons_and_changes(
    replayed: storage.Store, capsys: pytest.CaptureFixture[str]
):
    run_materialize(MaterializeRequest(RUN_ID, None, "none", False, 5), replayed.path, False)
    shown = capsys.readouterr().out
    assert "priority" in shown
    assert "eligible" in shown
    as_of = pinned(replayed, 3)
    run_materialize(MaterializeRequest(RUN_ID, as_of, "none", True, 5), replayed.path, True)
    assert {"kind", "rise", "why"} <= json.loads(capsys.readouterr().out)[0].keys()


def test_an_unknown_judge_is_refused_with_those_there_are(replayed: storage.Store):
    with pytest.raises(storage.QueryError, match="expected `none` or a value model's version"):
        run_materialize(MaterializeRequest(RUN_ID, None, "v9", False, 5), replayed.path, False)


def test_metrics_tell_of_values_forgetting_exploration_and_replay(replayed: storage.Store):
    metrics = iteration_metrics(replayed, RUN_ID, 5)
    assert {
        "value/brier", "value/drift", "value/is_healthy", "forget/ever_solved", "forget/lost_rate",
        "explore/distinct_2", "explore/self_bleu4", "explore/pass_at_1", "explore/pass_at_4",
        "explore/unique_solution_rate", "explore/self_similarity",
        "explore/frac_distinct_texts", "explore/entropy", "replay/size", "replay/uses",
        "replay/share_samples", "replay/share_tokens", "replay/rescued", "replay/still_failed",
        "replay/priority_entropy", "stale/age_mean", "is/mismatch_fresh", "is/importance_state",
    } <= metrics.keys()  # fmt: skip
    replays = replayed.read("replays", run_id=RUN_ID, iteration=5)
    old = [row for row in replays if row["unit"] != "fresh"]
    assert metrics["replay/share_samples"] == len(old) / len(replays)
    retries = replayed.read("retries", run_id=RUN_ID, iteration=5)
    rescued = sum(row["outcome"] == "rescued" for row in retries)
    assert metrics["replay/rescued"] == rescued
