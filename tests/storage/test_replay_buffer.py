"""What can be replayed, on small stores made by hand; expected numbers are derived in comments."""

from pathlib import Path
from random import Random

import duckdb
import pytest

import storage
from storage import console
from tests.storage.buffer_oracle import Oracle, all_rows
from tests.storage.replay_rows import Run, policy, state, value
from tests.storage.rows import OPENED, pin, planned, score, tokens, update

COLUMNS = (
    "run_id", "unit", "entry_id", "entry_key", "prompt_id", "difficulty", "rollout_id",
    "source_run_id", "prefix_tokens", "sampled_iteration", "policy_version", "age", "prompt_tries",
    "prompt_ok", "p_hat", "prompt_mean_reward", "is_ever_solved", "state_tries", "state_ok",
    "raw_value", "raw_prompt_value", "value", "prompt_value", "score_id", "scorer",
    "scorer_version", "signature", "signature_count", "prompt_state_id", "prompt_state_iteration",
    "num_uses", "last_used_iteration", "eligibility_reason",
)  # fmt: skip
ROUNDING = 1e-15
LATE = {"status": "timeout", "attempt": 1}
SEED = 2  # with this one every reason comes up


@pytest.fixture
def run(store: storage.Store) -> Run:
    """A run that has begun its first iteration."""
    started = Run(store, kind="train")
    started.pin(1)
    return started


def judged_state(run: Run, values: float | dict[str, float] = 0.5) -> str:
    """A state of p1 (1 of 4 attempts right) that versions of the value model judged."""
    rollout_id = run.sample([1.0, 0.0, 0.0, 0.0])[0]
    state_id = run.cut(rollout_id)
    by_version = values if isinstance(values, dict) else {"v1": values}
    for number, (version, value_) in enumerate(by_version.items(), start=1):
        run.fit(version, number)
        run.judge(version, {state_id: value_})
    return state_id


def test_every_column_of_a_state_a_trajectory_and_a_prompt(run: Run):
    run.prompt("p1", "hard")
    right, wrong, _, newest = run.sample([1.0, 0.0, 0.0, 0.0], signature="42")
    opening, state_id = run.cut(right, 0), run.cut(wrong, 5)
    run.fit("v1")
    run.judge("v1", {opening: 0.25, state_id: 0.75})
    run.append(policies=[policy(0), policy(1), policy(2)])
    run.pin(2)
    run.sample([1.0, 0.0], iteration=2, role="continuation", parent_id=state_id, prefix_tokens=5)
    run.use("state", state_id, 2)
    run.pin(3)
    run.pin(4)
    [the_prompt, the_state, the_trajectory] = run.buffer()
    assert tuple(the_prompt) == COLUMNS
    of_prompt = {
        "run_id": "r1",
        "prompt_id": "p1",
        "difficulty": "hard",
        "prompt_tries": 4,
        "prompt_ok": 1,
        "p_hat": 0.25,  # (1 + 0.5) / (4 + 2)
        "prompt_mean_reward": 0.25,
        "is_ever_solved": True,
        "raw_prompt_value": 0.25,
        "prompt_value": 0.25,  # (1 + 2 * 0.25) / (4 + 2)
        "prompt_state_id": opening,
        "prompt_state_iteration": 1,
        "eligibility_reason": "eligible",
    }
    assert the_prompt == of_prompt | {
        "unit": "prompt", "entry_id": "p1", "entry_key": "p1",
        "rollout_id": newest, "source_run_id": "r1",
        "prefix_tokens": 0, "sampled_iteration": None, "policy_version": None, "age": 0,
        "state_tries": 0, "state_ok": 0, "raw_value": 0.25, "value": 0.25, "score_id": None,
        "scorer": None, "scorer_version": None, "signature": None, "signature_count": 1,
        "num_uses": 0, "last_used_iteration": None,
    }  # fmt: skip
    event_id_of = run.writer.event_id_of
    [cut_sha256] = [
        r["prefix_sha256"] for r in run.store.read("states") if r["event_id"] == state_id
    ]
    [seed] = [r["seed"] for r in run.store.read("rollouts") if r["event_id"] == right]
    assert the_state == of_prompt | {
        "unit": "state", "entry_id": state_id, "entry_key": f"p1:{cut_sha256}",
        "rollout_id": wrong, "source_run_id": "r1",
        "prefix_tokens": 5, "sampled_iteration": 1, "policy_version": 0, "age": 2,
        "state_tries": 2, "state_ok": 1, "raw_value": 0.75,
        "value": 0.625,  # (1 + 2 * 0.75) / (2 + 2)
        "score_id": event_id_of("scores", value(state_id, 0.75, "v1")), "scorer": "value",
        "scorer_version": "v1", "signature": "42", "signature_count": 1, "num_uses": 1,
        "last_used_iteration": 2,
    }  # fmt: skip
    assert the_trajectory == of_prompt | {
        "unit": "trajectory", "entry_id": right, "entry_key": f"p1:{seed}",
        "rollout_id": right, "source_run_id": "r1",
        "prefix_tokens": 0, "sampled_iteration": 1, "policy_version": 0, "age": 2,
        "state_tries": 0, "state_ok": 0, "raw_value": 1.0, "value": 1.0,
        "score_id": event_id_of("scores", score(right, 1.0)), "scorer": "exact",
        "scorer_version": "1", "signature": "42", "signature_count": 1, "num_uses": 0,
        "last_used_iteration": None,
    }  # fmt: skip


def test_a_prompt_is_known_by_its_last_16_scored_on_policy_attempts(run: Run):
    run.sample([1.0] * 5, iteration=1)
    run.pin(2)
    run.sample([0.0] * 12 + [None], iteration=2)
    run.sample([0.0, 0.5, 0.999], iteration=2, role="retry")
    run.sample([1.0] * 8, iteration=2, role="continuation", parent_id="st1")
    run.sample([1.0] * 8, iteration=2, role="evaluation")
    run.sample([1.0] * 8, "p2", iteration=2, role="evaluation")
    row = run.entry("p1")
    # 5 + 12 + 3 have a reward: of the last 16 one of the first 5 and the retry of 0.999 are right
    assert (row["prompt_tries"], row["prompt_ok"], row["is_ever_solved"]) == (16, 2, True)
    assert row["p_hat"] == pytest.approx(2.5 / 18, abs=ROUNDING)
    assert {r["prompt_id"] for r in run.buffer()} == {"p1"}  # p2 was evaluated only


def test_a_state_is_known_by_its_last_16_scored_continuations(run: Run):
    state_id = judged_state(run, 0.5)
    how = {"role": "continuation", "parent_id": state_id, "prefix_tokens": 5}
    run.sample([1.0] * 9, iteration=2, **how)
    run.sample([None], iteration=2, **how)
    run.sample([0.0] * 10, iteration=3, **how)
    row = run.entry(state_id)
    assert (row["state_tries"], row["state_ok"]) == (16, 6)  # 19 with a reward, 3 of them too old
    assert row["value"] == pytest.approx(7 / 18, abs=ROUNDING)  # (6 + 2 * 0.5) / (16 + 2)
    assert (row["prompt_tries"], row["prompt_ok"]) == (4, 1)  # continuations are not on-policy


def test_complete_successes_are_trajectories_and_nothing_else(run: Run):
    kept = run.sample([1.0, 0.999, 0.998], iteration=1)[:2]
    kept += run.sample([1.0], role="retry")
    run.sample([1.0], finish_reason="length", iteration=2)
    run.sample([1.0], role="continuation", parent_id="st1", prefix_tokens=3)
    run.sample([1.0], role="second_attempt")
    run.sample([1.0], role="evaluation")
    found = [row["entry_id"] for row in run.buffer() if row["unit"] == "trajectory"]
    assert sorted(found) == sorted(kept)


# --- eligibility, reason by reason


def test_a_prompt_is_solved_from_a_p_hat_of_three_quarters(run: Run):
    four, three = (run.sample([1.0] * n, f"p{n}")[0] for n in (4, 3))
    state_id = run.cut(four, 5, prompt_id="p4")
    reasons = [run.reason(i) for i in ("p4", four, state_id)]  # 4.5 / 6 = 0.75
    assert reasons == ["prompt_solved"] * 3
    assert run.reason("p3") == "eligible"  # 3.5 / 5 = 0.7
    assert run.reason(three) == "not_rare"


def test_a_state_without_a_judgement_of_the_version_is_not_judged(run: Run):
    state_id = judged_state(run, {"v1": 0.5})
    unjudged = run.cut(run.sample([0.0])[0])
    timed_out = run.cut(run.sample([0.0])[0])
    run.judge("v1", {timed_out: None})
    rows = [run.entry(i) for i in (state_id, unjudged, timed_out)]
    assert [r["eligibility_reason"] for r in rows] == ["eligible", "not_judged", "not_judged"]
    assert [(r["raw_value"], r["value"]) for r in rows[1:]] == [(None, None)] * 2
    assert run.reason(state_id, version="v0") == "not_judged"
    assert run.reason(unjudged, version="none") == "eligible"


def test_a_trajectory_is_rare_up_to_a_p_hat_of_a_quarter(run: Run):
    rare = run.sample([1.0, 0.0, 0.0, 0.0], "p4")[0]  # 1.5 / 6 = 0.25
    common = run.sample([1.0, 0.0, 0.0], "p3")[0]  # 1.5 / 5 = 0.3
    assert (run.reason(rare), run.reason(common)) == ("eligible", "not_rare")


def test_a_trajectory_needs_its_tokens_and_their_log_probs(run: Run):
    lists = run.sample([1.0] + [0.0] * 3, "p1")[0]
    bare = run.sample([1.0] + [0.0] * 3, "p2", with_tokens=False)[0]
    greedy = run.sample([1.0] + [0.0] * 3, "p3", with_tokens=False)[0]
    without = tokens(greedy) | {"sampler_logprobs": None, "logprobs_reason": "greedy"}
    run.append(rollout_tokens=[without])
    reasons = [run.reason(i) for i in (lists, bare, greedy)]
    assert reasons == ["eligible", "no_logprobs", "no_logprobs"]


@pytest.mark.parametrize("unit", ["state", "trajectory", "prompt"])
def test_an_entry_rests_for_one_iteration_after_its_use(run: Run, unit: str):
    state_id = judged_state(run)
    rollout_id = run.entry(state_id)["rollout_id"]
    entry_id = {"state": state_id, "trajectory": rollout_id, "prompt": "p1"}[unit]
    run.pin(2)
    run.use(unit, entry_id, 2)
    row = run.entry(entry_id)
    assert (row["num_uses"], row["last_used_iteration"]) == (1, 2)
    assert row["eligibility_reason"] == "cooldown"  # iteration 3 is next
    run.pin(3)
    assert run.reason(entry_id) == "eligible"  # iteration 4 is next


def test_a_pick_is_a_use_once_its_batch_has_an_update(run: Run):
    state_id = judged_state(run)
    pick_id = run.pick("state", state_id, 1)
    assert run.entry(state_id)["num_uses"] == 0
    batch = {"iteration": 1, "step": 0, "batch_id": "b1"}
    samples = [planned(f"ro{n}", n, pick_id=pick_id) | batch for n in range(3)]
    run.append(replays=samples, updates=[update() | batch | {"batch_id": "another"}])
    assert run.entry(state_id)["num_uses"] == 0
    run.append(updates=[update() | batch | {"step": 1}])
    assert run.entry(state_id)["num_uses"] == 0
    second = run.pick("state", state_id, 2)
    run.learn(second, 2, is_skipped=True)  # a step without a gradient is an answer too
    assert run.entry(state_id)["num_uses"] == 1
    batch = {"iteration": 2, "step": 7, "batch_id": "b2"}
    samples = [planned(f"ro{n}", n, pick_id=second) | batch for n in range(3)]
    run.append(replays=samples, updates=[update() | batch])
    assert run.entry(state_id)["num_uses"] == 1  # in two steps, picked once


def test_a_pick_that_its_iteration_published_without_is_a_use(run: Run):
    # dynamic sampling dropped its group: nothing of it is planned, and still it was tried
    state_id = judged_state(run)
    for iteration in range(1, 9):
        run.pick("state", state_id, iteration)
        if iteration in (1, 8):
            assert run.entry(state_id)["num_uses"] == iteration - 1  # not before it is published
        run.append(policies=[policy(iteration)])
        if iteration in (1, 8):
            row = run.entry(state_id)
            assert (row["num_uses"], row["last_used_iteration"]) == (iteration, iteration)
    run.pin(20)
    assert run.reason(state_id) == "retired"
    run.use("state", state_id, 9)
    run.append(policies=[policy(9)])
    assert run.entry(state_id)["num_uses"] == 9  # learned from and published: one use


def use_often(run: Run, unit: str, entry_id: str, iterations: range) -> None:
    for iteration in iterations:
        run.use(unit, entry_id, iteration)


def test_an_entry_is_retired_by_its_eighth_use_without_a_success(run: Run):
    state_id = judged_state(run)
    use_often(run, "state", state_id, range(1, 8))
    run.pin(20)
    assert run.entry(state_id)["num_uses"] == 7
    assert run.reason(state_id) == "eligible"
    use_often(run, "state", state_id, range(8, 9))
    assert run.reason(state_id) == "retired"
    assert run.entry(state_id)["num_uses"] == 8
    assert run.reason(state_id, version="none") == "retired"


def test_a_success_brings_an_entry_back_for_eight_more_uses(run: Run):
    state_id = judged_state(run)
    use_often(run, "state", state_id, range(1, 9))
    run.pin(20)
    how = {"role": "continuation", "parent_id": state_id, "iteration": 8}
    run.sample([0.0, 0.5], **how)
    assert run.reason(state_id) == "retired"
    run.sample([1.0], **how)
    assert run.reason(state_id) == "eligible"
    use_often(run, "state", state_id, range(9, 16))
    assert run.reason(state_id) == "eligible"  # 15 uses, 7 of them since
    use_often(run, "state", state_id, range(16, 17))
    assert run.reason(state_id) == "retired"


def test_a_new_judgement_brings_a_state_back(run: Run):
    state_id = judged_state(run)
    use_often(run, "state", state_id, range(1, 9))
    run.pin(20)
    run.fit("v2", 2)
    run.judge("v2", {state_id: 0.5})
    assert run.reason(state_id) == "eligible"
    assert run.reason(state_id, version="v1") == "retired"


@pytest.mark.parametrize("unit", ["trajectory", "prompt"])
def test_trajectories_and_prompts_live_on_the_successes_of_their_prompt(run: Run, unit: str):
    rollout_id = run.sample([1.0, 0.0, 0.0, 0.0])[0]
    entry_id = rollout_id if unit == "trajectory" else "p1"
    use_often(run, unit, entry_id, range(1, 9))
    run.pin(20)
    assert run.reason(entry_id) == "retired"
    run.sample([0.0, 0.0, 0.0, 1.0], iteration=8)  # 2 of 8: 2.5 / 10 = 0.25
    assert run.reason(entry_id) == "eligible"


def test_a_state_is_mastered_when_two_models_in_a_row_say_so(run: Run):
    both = judged_state(run, {"v1": 0.75, "v2": 0.9})
    newer, older = (run.cut(run.sample([0.0])[0]) for _ in range(2))
    run.judge("v1", {newer: 0.74, older: 0.9})
    run.judge("v2", {newer: 0.9, older: 0.74})
    assert [run.reason(i) for i in (both, newer, older)] == ["mastered", "eligible", "eligible"]
    assert run.reason(both, version="v1") == "eligible"  # no model was before it
    run.fit("v3", 3, verdict="unhealthy")
    run.fit("v4", 4)
    run.judge("v4", {both: 0.8})
    assert run.reason(both) == "mastered"  # v2 is the healthy one before v4


def test_a_model_that_gave_no_value_first_has_none(run: Run):
    state_id = judged_state(run, {"v1": 0.9, "v2": 0.9})
    silent = run.cut(run.sample([0.0])[0])
    run.judge("v1", {silent: None}, iteration=1)
    run.judge("v1", {silent: 0.9}, iteration=2)  # another place, as another stream's
    run.judge("v2", {silent: 0.9})
    assert (run.reason(state_id), run.reason(silent)) == ("mastered", "eligible")


def test_mastery_counts_outcomes_with_both_models(run: Run):
    state_id = judged_state(run, {"v1": 0.6, "v2": 0.6})
    how = {"role": "continuation", "parent_id": state_id}
    run.sample([1.0] * 2, **how)
    assert run.reason(state_id) == "mastered"  # (2 + 1.2) / 4 = 0.8 by both


# --- which states, which judgements


def test_equal_states_of_a_prompt_count_once_by_the_first(run: Run):
    ids = run.sample([0.0, 0.0, 0.0])
    same = {"prefix_sha256": "same"}
    first = run.cut(ids[0], 5, **same)
    run.cut(ids[1], 5, **same)
    elsewhere = run.cut(run.sample([0.0], "p2")[0], 5, prompt_id="p2", **same)
    again = Run(run.store, "cutter", kind="refit").cut(ids[0], 5, **same)
    found = {row["entry_id"] for row in run.buffer() if row["unit"] == "state"}
    assert found == {first, elsewhere}
    assert again not in found


def test_prompt_states_are_judgements_of_the_prompt_and_no_candidates(run: Run):
    first, second = run.sample([1.0, 0.0, 0.0, 0.0])[:2]
    openings = [run.cut(first, 0), run.cut(second, 0)]
    run.fit("v1")
    assert run.entry("p1")["raw_prompt_value"] == 0.25  # p_hat: it is not judged
    assert run.entry("p1")["prompt_value"] == 0.25
    run.judge("v1", {openings[0]: 0.5})
    row = run.entry("p1")
    assert (row["raw_prompt_value"], row["p_hat"]) == (0.5, 0.25)
    assert row["prompt_value"] == pytest.approx(2 / 6, abs=ROUNDING)  # (1 + 2 * 0.5) / (4 + 2)
    assert [r for r in run.buffer() if r["unit"] == "state"] == []


def test_of_two_streams_that_judged_a_state_the_first_counts(run: Run):
    # the version is another stream's: whoever judged by it counts
    state_id = judged_state(run, {})
    judges = [Run(run.store, f"judge-{n}", kind="rescore") for n in range(2)]
    judges[0].fit("v1")
    judges[1].judge("v1", {state_id: 0.25}, iteration=0)
    judges[0].judge("v1", {state_id: 0.75}, iteration=0)
    row = run.entry(state_id, version="v1")
    assert row["raw_value"] == 0.25
    assert row["score_id"] == judges[1].writer.event_id_of("scores", value(state_id, 0.25, "v1", 0))
    judges[0].append(scores=[value(state_id, 0.5, "v1", 0) | {"attempt": 1}])
    assert run.entry(state_id, version="v1")["raw_value"] == 0.5  # a later attempt counts more


def test_by_its_own_model_a_run_sees_its_own_states_and_judgements_alone(run: Run):
    rollout_id, other_id, *_ = run.sample([1.0, 0.0, 0.0, 0.0])
    state_id = run.cut(rollout_id, 5)
    run.fit("v1")
    judge = Run(run.store, "judge", kind="rescore")
    foreign_id = judge.cut(other_id, 7, source_run_id=run.run_id)
    judge.judge("v1", {state_id: 0.125, foreign_id: 0.75})
    [seen] = [row for row in run.buffer() if row["unit"] == "state"]
    assert (seen["entry_id"], seen["eligibility_reason"]) == (state_id, "not_judged")
    run.judge("v1", {state_id: 0.5})
    assert run.entry(state_id)["raw_value"] == 0.5


def test_a_run_goes_by_its_own_reward_whatever_others_say(run: Run):
    failed, *_ = run.sample([None, 0.0, 0.0, 0.0])
    before = run.entry("p1")
    judge = Run(run.store, "judge", kind="rescore")
    judge.append(scores=[score(failed, 1.0) | {"attempt": 1}])
    assert run.entry("p1") == before
    assert before["prompt_tries"] == 3


def test_by_a_model_of_another_stream_a_run_has_the_states_others_cut(run: Run):
    rollout_id = run.sample([1.0, 0.0, 0.0, 0.0])[0]
    judge = Run(run.store, "judge", kind="refit")
    state_id = judge.cut(rollout_id, 5, source_run_id=run.run_id)
    judge.fit("v1")
    judge.judge("v1", {state_id: 0.5})
    assert not [row for row in run.buffer() if row["unit"] == "state"]
    assert run.entry(state_id, version="v1")["raw_value"] == 0.5


def test_a_fork_with_the_same_model_changes_nothing_for_its_parent(store: storage.Store):
    parent = Run(store, "r1", kind="train")
    parent.pin(1)
    state_id = parent.cut(parent.sample([1.0, 0.0, 0.0, 0.0])[0])
    parent.fit("v1", 1)
    parent.judge("v1", {state_id: 0.9})
    before = parent.entry(state_id, run="r1")
    assert before["eligibility_reason"] == "eligible"
    fork = Run(store, "r2", kind="train", parent_run_id="r1", parent_iteration=0, parent_as_of=1)
    fork.pin(0)
    fork.fit("v1", 1)  # the same history gives the same model
    assert parent.entry(state_id, run="r1") == before


def test_a_fork_has_the_history_of_its_parent_up_to_where_it_began(store: storage.Store):
    parent = Run(store, "r1", kind="train")
    parent.pin(1)
    first = parent.sample([1.0, 0.0, 0.0, 0.0], iteration=1)[0]
    state_id = parent.cut(first)
    parent.fit("v1")
    parent.judge("v1", {state_id: 0.5})
    as_of = store.head().number
    parent.pin(2)
    parent.sample([1.0] * 4, iteration=2)
    fork = Run(
        store, "r2", kind="train", parent_run_id="r1", parent_iteration=1, parent_as_of=as_of
    )
    fork.pin(1)
    mine = fork.entry(state_id, run="r2")
    assert (mine["run_id"], mine["raw_value"], mine["prompt_tries"]) == ("r2", 0.5, 4)
    assert [r["prompt_tries"] for r in parent.buffer(run="r1") if r["unit"] == "prompt"] == [8]
    fork.sample([0.0] * 4, iteration=2)
    assert fork.entry(state_id, run="r2")["prompt_tries"] == 8
    assert fork.entry(state_id, run="r2")["prompt_ok"] == 1


def test_the_reward_is_that_of_the_newest_pinned_scorer_whoever_gave_it(run: Run):
    ids = run.sample([1.0, 0.0, 0.0, 0.0])
    judge = Run(run.store, "judge", kind="rescore")
    judge.append(scores=[score(i, 1.0, scorer_version="2", signature="s") for i in ids[2:]])
    assert run.entry("p1")["prompt_ok"] == 1
    run.append(views_pinned=[pin(2, '{"exact": "2"}')])
    row = run.entry("p1")
    assert (row["prompt_tries"], row["prompt_ok"]) == (2, 2)
    found = {r["entry_id"] for r in run.buffer() if r["unit"] == "trajectory"}
    assert found == set(ids[2:])
    assert run.entry(ids[2])["scorer_version"] == "2"


def test_a_version_may_be_named_and_the_newest_healthy_one_is_meant_otherwise(run: Run):
    state_id = judged_state(run, {"v1": 0.25, "v2": 0.5})
    run.fit("v3", 3, verdict="unhealthy")
    run.fit("v4", 4, verdict="insufficient_data")
    Run(run.store, "refit", kind="refit").fit("v5")
    run.judge("v5", {state_id: 0.625})
    by_version = {
        version: run.entry(state_id, version=version)["raw_value"]
        for version in (None, "v1", "v2", "v5")
    }
    assert by_version == {None: 0.5, "v1": 0.25, "v2": 0.5, "v5": 0.625}


@pytest.mark.parametrize("version", ["none", None])
def test_without_a_model_p_hat_stands_for_v(run: Run, version: str | None):
    rollout_id = run.sample([1.0, 0.0, 0.0, 0.0])[0]
    state_id, opening = run.cut(rollout_id, 5), run.cut(rollout_id, 0)
    if version == "none":
        run.fit("v1")
    run.judge("v1", {state_id: 0.875, opening: 0.875})
    run.sample([1.0, 0.0], role="continuation", parent_id=state_id)
    row = run.entry(state_id, version=version)
    expected = {
        "raw_value": 0.25,
        "raw_prompt_value": 0.25,
        "prompt_value": 0.25,
        "value": 0.375,  # (1 + 2 * 0.25) / (2 + 2)
        "score_id": None,
        "scorer": None,
        "scorer_version": None,
        "eligibility_reason": "eligible",
    }
    assert {name: row[name] for name in expected} == expected


def test_signatures_are_counted_among_the_successes_of_their_prompt(run: Run):
    wrong = run.sample([0.0], signature="a")[0]
    twice = run.sample([1.0, 1.0], signature="a")
    once = run.sample([1.0], signature="b", finish_reason="length")
    unknown = run.sample([1.0])[0]
    run.sample([1.0], "p2", signature="a")
    run.sample([1.0], role="continuation", parent_id="st1", signature="a")
    states = [run.cut(i) for i in (wrong, once[0])]
    rows = [run.entry(i) for i in (*twice, unknown, *states)]
    assert [(r["signature"], r["signature_count"]) for r in rows] == [
        ("a", 2), ("a", 2), (None, 1), ("a", 2), ("b", 1),
    ]  # fmt: skip


# --- runs, moments, forms


def test_runs_of_a_store_do_not_mix(store: storage.Store):
    runs = [Run(store, name, kind="train") for name in ("r1", "r2")]
    entries = []
    for run, rewards in zip(runs, ([1.0, 0.0, 0.0, 0.0], [0.0] * 6), strict=True):
        run.pin(1)
        rollout_id = run.sample(rewards)[0]
        entries.append(run.cut(rollout_id, 5, source_run_id=run.run_id, prefix_sha256="same"))
        run.fit("v1" if run.run_id == "r1" else "v2", 1)
    for run in runs:
        run.judge("v1", {entries[0]: 0.5, entries[1]: 0.25})
    runs[1].use("prompt", "p1", 1)
    both = runs[0].buffer()
    assert [(r["run_id"], r["unit"], r["entry_id"], r["prompt_tries"]) for r in both] == [
        ("r1", "prompt", "p1", 4),
        ("r1", "state", entries[0], 4),
        ("r1", "trajectory", both[2]["entry_id"], 4),
        ("r2", "prompt", "p1", 6),
        ("r2", "state", entries[1], 6),
    ]
    assert [r["eligibility_reason"] for r in both] == [
        "eligible", "eligible", "eligible", "cooldown", "not_judged",
    ]  # fmt: skip
    for run in runs:
        alone = run.buffer(run=run.run_id)
        assert alone == [row for row in both if row["run_id"] == run.run_id]
        assert alone == store.view("replay_buffer", run_id=run.run_id)
    assert runs[0].buffer(run="r3") == []


def test_only_training_runs_have_a_buffer(store: storage.Store):
    for kind in (None, "train", "rescore", "refit"):
        run = Run(store, f"stream-{kind}", kind=kind)
        run.pin(1)
        run.sample([0.0])
    ended = OPENED | {"run_epoch": 1, "what": "finished"}  # says nothing of the kind
    store_runs = {row["run_id"] for row in store.view("replay_buffer")}
    assert store_runs == {"stream-None", "stream-train"}
    run.append(runs=[ended])
    assert {row["run_id"] for row in store.view("replay_buffer")} == store_runs


def filled(store: storage.Store) -> Run:
    """A run with a bit of everything."""
    run = Run(store, kind="train")
    run.pin(1)
    rollout_id = run.sample([1.0, 0.0, 0.0, 0.0], signature="a")[0]
    states = [run.cut(rollout_id, n) for n in (0, 3, 5)]
    for iteration, version in ((1, "v1"), (2, "v2")):
        run.fit(version, iteration)
        run.judge(version, {i: 0.25 * n for n, i in enumerate(states, start=iteration - 1)})
        run.pin(iteration + 1)
        run.use("state", states[1], iteration + 1)
        run.sample([float(iteration == 2)], role="continuation", parent_id=states[1])
    return run


def test_an_answer_as_of_a_commit_stays_also_after_compaction(store: storage.Store):
    run = filled(store)
    numbers = range(3, store.head().number + 1, 4)
    answers = {number: run.buffer(number) for number in numbers}
    assert len({repr(answer) for answer in answers.values()}) == 4
    run.fit("v9", 9)
    run.sample([1.0] * 8, iteration=5)
    assert list(storage.compact(store, min_segments=2))
    again = storage.open(store.path)
    for number, expected in answers.items():
        assert again.view("replay_buffer", as_of=number) == expected
        called = again.sql(f"from replay_buffer({number}) order by run_id, unit, entry_id")
        assert called.fetchall() == [tuple(row.values()) for row in expected]


def test_arguments_work_at_the_console_and_in_an_export(store: storage.Store, tmp_path: Path):
    run = filled(store)
    query = (
        "select entry_id, value, eligibility_reason "
        f"from replay_buffer({store.head().number}, run := 'r1', version := 'v1') order by all"
    )
    expected = sorted(
        (row["entry_id"], row["value"], row["eligibility_reason"])
        for row in run.buffer(run="r1", version="v1")
    )
    assert len(expected) == 4
    assert store.sql(query).fetchall() == expected
    assert console.run_query(store, query).rows == expected
    assert list(storage.export_duckdb(store, tmp_path / "out"))
    with duckdb.connect(str(tmp_path / "out" / "rrl.duckdb")) as alone:
        assert alone.execute(query).fetchall() == expected


def test_an_argument_that_a_view_does_not_take_is_refused(store: storage.Store):
    with pytest.raises(storage.QueryError, match="takes run, version beside as_of; came model"):
        store.view("replay_buffer", arguments={"model": "v1"})
    with pytest.raises(storage.QueryError, match="takes no arguments beside as_of; came run"):
        store.view("prompt_history", arguments={"run": "r1"})


def test_states_of_a_rollout_that_is_not_in_the_log_are_left_out(run: Run):
    run.append(states=[state("ro-unknown", 5)])
    assert run.buffer() == []


def test_the_view_says_what_loops_over_the_rows_say(memory_path: Path):
    chance, store = Random(SEED), storage.open(memory_path / "store", create=True)
    runs = [Run(store, name, kind="train") for name in ("r1", "r2")]
    cuts: dict[str, list[str]] = {run.run_id: [] for run in runs}
    for iteration in range(1, 13):
        for run in runs:
            improvise(chance, run, cuts[run.run_id], iteration)
            values = {i: chance.choice([None, 0.25, 0.9, 0.9]) for i in cuts[run.run_id]}
            version = f"{run.run_id}-v{iteration // 4}"
            run.judge(version, values, iteration)
            late = [value(i, None, version, iteration) | LATE for i in cuts[run.run_id][::3]]
            run.append(scores=late)
    reasons, rows = set(), all_rows(store)
    for run in runs:
        for version in (None, f"{run.run_id}-v1", "none"):
            found = run.buffer(run=run.run_id, version=version)
            assert found == [
                {name: row[name] for name in COLUMNS}
                for row in Oracle(store, run.run_id, version, rows).buffer()
            ]
            reasons |= {row["eligibility_reason"] for row in found}
    assert reasons == {
        "prompt_solved", "not_judged", "not_rare", "no_logprobs", "cooldown", "retired", "mastered",
        "eligible",
    }  # fmt: skip


def improvise(chance: Random, run: Run, cuts: list[str], iteration: int) -> None:
    """One iteration of whatever may happen to a run."""
    run.pin(iteration)
    rates = {"p0": 0.0, "p1": 0.1, "p2": 0.4, "p3": 0.95}
    for prompt_id in chance.sample(list(rates), 2):
        rewards = [
            1.0 if chance.random() < rates[prompt_id] else chance.choice([None, 0.5, 0.0])
            for _ in range(5)
        ]
        ids = run.sample(
            rewards,
            prompt_id,
            iteration,
            role=chance.choice(["attempt", "attempt", "retry", "evaluation"]),
            signature=chance.choice([None, "a", "b"]),
            with_tokens=chance.random() < 0.5,
            finish_reason=chance.choice(["stop", "stop", "length"]),
            policy_version=iteration - 1,
        )
        run.append(scores=[score(ids[0], None, iteration) | LATE])
        facts = {"prompt_id": prompt_id, "source_run_id": run.run_id}
        for rollout_id in chance.sample(ids, 2):
            prefix, sha = chance.choice([0, 1, 2]), chance.choice(["x", "y", "z"])
            facts["prefix_sha256"] = sha if prefix else ""
            cuts.append(run.cut(rollout_id, prefix, iteration, **facts))
    state_id = chance.choice(cuts)
    run.sample([0.0, chance.choice([0.0, 1.0])], "p1", iteration, role="continuation",
               parent_id=state_id)  # fmt: skip
    entries = [("state", chance.choice(cuts)), ("prompt", "p0" if iteration < 12 else "p2")]
    for unit, entry_id in entries:
        pick_id = run.pick(unit, entry_id, iteration)
        if chance.random() < 0.9:
            run.learn(pick_id, iteration)
    if iteration % 4 == 0:
        version = f"{run.run_id}-v{iteration // 4}"
        run.fit(version, iteration, "unhealthy" if iteration == 4 else "healthy")
        run.append(policies=[policy(iteration)])
