"""Replay in training: what is picked is sampled, learned from, compared, and derived again."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

import storage
from flows import tasks
from flows.auditing import audit, step_samples
from flows.progress import Progress
from flows.rescoring import RescoreRequest, rescore
from flows.stepping import retake
from flows.wiring import stored_config
from rrl_core.replay.outcomes import compare
from tests.flows.conftest import RUN_ID, replay_config, run_here


@pytest.fixture(scope="module")
def with_trajectories(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run of rare, lucky successes, old enough for trajectories to be replayed."""
    config = replay_config(
        "sampler.engine=fake", "run.iterations=12", "value.every=off",
        'replay.units=["trajectory"]',
        "task.reward=tests.flows.rewards:early_seven", "evaluation.every=off",
    )  # fmt: skip
    return run_here(tmp_path_factory.mktemp("trajectories") / "store", config)


def test_a_refit_every_second_iteration_judges_both(tmp_path: Path):
    # every iteration has all 12 prompts, so one refit sees each in both of its iterations
    config = replay_config("value.every=2", "run.iterations=4", "sampler.prompts=12")
    store = run_here(tmp_path / "store", config)
    assert [m["iteration"] for m in store.read("value_models", run_id=RUN_ID)] == [2, 4]
    sampled = {r["event_id"]: r["iteration"] for r in store.read("rollouts", run_id=RUN_ID)}
    cut = {(s["iteration"], sampled[s["rollout_id"]]) for s in store.read("states", run_id=RUN_ID)}
    assert cut == {(2, 1), (2, 2), (4, 3), (4, 4)}
    audited = list(audit(store, RUN_ID, config))
    assert [str(d) for a in audited for d in a.differences] == []


def test_within_the_capacity_the_best_stay_and_a_resumed_run_judges_the_same(tmp_path: Path):
    config = replay_config("replay.capacity=20", "run.iterations=4")
    store = run_here(tmp_path / "store", config)
    judged: dict[str, set[str]] = {}
    prompts = {s["event_id"] for s in store.read("states") if s["prefix_tokens"] == 0}
    for row in store.read("scores", run_id=RUN_ID):
        if row["kind"] == "value" and row["target_id"] not in prompts:
            judged.setdefault(row["scorer_version"], set()).add(row["target_id"])
    versions = [m["scorer_version"] for m in store.read("value_models", run_id=RUN_ID)]
    assert [len(judged[version]) for version in versions] == [20] * 4
    kept = [len(judged[newer] & judged[older]) for older, newer in pairwise(versions)]
    assert sum(kept) > 0  # not all of them give way to what is new
    audited = list(audit(store, RUN_ID, config))
    assert [str(d) for a in audited for d in a.differences] == []


def test_prompts_that_nobody_can_score_are_replayed_without_credit(tmp_path: Path):
    config = replay_config(
        "sampler.engine=fake", "task.reward=tests.flows.rewards:seldom_scored",
        'replay.units=["state"]', "run.iterations=4", "evaluation.every=off",
    )  # fmt: skip
    store = run_here(tmp_path / "store", config)
    assert {row["status"] for row in store.read("scores", run_id=RUN_ID)} == {"ok", "unscorable"}
    assert store.read("picks", run_id=RUN_ID)


def test_states_and_prompts_are_replayed(replayed: storage.Store):
    units = {row["unit"] for row in replayed.read("replays", run_id=RUN_ID)}
    assert units == {"fresh", "state", "prompt"}


def test_an_iteration_has_as_many_groups_as_without_replay(replayed: storage.Store):
    for iteration in range(1, 7):
        rows = replayed.read("replays", run_id=RUN_ID, iteration=iteration)
        groups = {row["group_id"] for row in rows}
        assert len(groups) == 6
        assert len(rows) == 6 * 4


def test_a_trajectory_joins_the_fresh_group_of_its_prompt(with_trajectories: storage.Store):
    store = with_trajectories
    rollouts = {row["event_id"]: row for row in store.read("rollouts", run_id=RUN_ID)}
    replays = store.read("replays", run_id=RUN_ID)
    joined = [row for row in replays if row["unit"] == "trajectory"]
    assert joined
    for row in joined:
        group = [r for r in replays if r["group_id"] == row["group_id"]]
        units = sorted(r["unit"] for r in group)
        assert len(group) == 4
        assert units.count("fresh") == 4 - units.count("trajectory")
        assert {rollouts[r["rollout_id"]]["prompt_id"] for r in group} == {
            rollouts[row["rollout_id"]]["prompt_id"]
        }
        assert row["reward"] == 1.0
        if [r["reward"] for r in group].count(1.0) == 1:
            # one success among three failures: 0.75 / (0.5 + 1e-4), std with n - 1
            assert row["advantage"] == pytest.approx(0.75 / 0.5001, abs=1e-9)
        assert row["advantage"] > 0 or all(r["reward"] == 1.0 for r in group)
        assert row["age"] > 0


def test_a_replayed_trajectory_teaches_with_its_stored_logprobs(with_trajectories: storage.Store):
    store = with_trajectories
    learned = {
        (row["iteration"], row["rollout_id"]): row
        for row in store.read("learned_samples", run_id=RUN_ID)
    }
    joined = [r for r in store.read("replays", run_id=RUN_ID) if r["unit"] == "trajectory"]
    taught = [learned[r["iteration"], r["rollout_id"]] for r in joined if r["advantage"] != 0]
    assert taught
    for row in taught:
        assert row["num_loss_tokens"] > 0
        assert row["importance_mean"] is not None


def test_trajectories_are_confirmed_by_the_audit(with_trajectories: storage.Store):
    config = stored_config(with_trajectories, RUN_ID)
    audited = list(audit(with_trajectories, RUN_ID, config))
    assert [str(d) for a in audited for d in a.differences] == []
    replays = with_trajectories.read("replays", run_id=RUN_ID)
    joined = {row["iteration"] for row in replays if row["unit"] == "trajectory"}
    with Progress(quiet=True) as progress:
        for iteration in sorted(joined):
            assert retake(with_trajectories, RUN_ID, config, iteration, progress).is_same


def test_a_continuation_has_the_given_tokens_of_its_state(replayed: storage.Store):
    tokens = {row["rollout_id"]: row for row in replayed.read("rollout_tokens", run_id=RUN_ID)}
    states = {row["event_id"]: row for row in replayed.read("states", run_id=RUN_ID)}
    rollouts = replayed.read("rollouts", run_id=RUN_ID)
    continuations = [row for row in rollouts if row["role"] == "continuation"]
    assert continuations
    for row in continuations:
        state = states[row["parent_id"]]
        source = tokens[state["rollout_id"]]
        given = source["completion_ids"][: state["prefix_tokens"]]
        assert row["prefix_tokens"] == state["prefix_tokens"] == len(given)
        assert tokens[row["event_id"]]["prompt_ids"] == source["prompt_ids"] + given
        assert row["num_completion_tokens"] + len(given) <= 12


def test_retry_rows_compare_both_answers_under_one_scorer(replayed: storage.Store):
    scores = {row["event_id"]: row for row in replayed.read("scores", run_id=RUN_ID)}
    retries = replayed.read("retries", run_id=RUN_ID)
    assert {row["unit"] for row in retries} == {"state", "prompt"}
    for row in retries:
        old, new = scores[row["old_score_id"]], scores[row["new_score_id"]]
        assert old["target_id"] == row["old_rollout_id"]
        assert new["target_id"] == row["new_rollout_id"]
        assert old["scorer_version"] == new["scorer_version"] == row["scorer_version"]
        assert row["outcome"] == compare(old["value"], new["value"])


def test_the_audit_confirms_every_step(replayed: storage.Store):
    audited = list(audit(replayed, RUN_ID, replay_config()))
    assert [a.iteration for a in audited] == [1, 2, 3, 4, 5, 6]
    assert [str(d) for a in audited for d in a.differences] == []
    assert sum(a.num_picks for a in audited) > 5
    assert all(a.num_planned == a.num_learned == 24 for a in audited)


def test_steps_are_taken_again_to_the_last_bit(replayed: storage.Store):
    with Progress(quiet=True) as progress:
        for iteration in (1, 4, 6):
            retaken = retake(replayed, RUN_ID, replay_config(), iteration, progress)
            assert retaken.is_same, retaken
            assert [s.loss for s in retaken.steps] == [s.recorded_loss for s in retaken.steps]


def test_the_same_run_elsewhere_replays_the_same_also_when_judged_from_outside(
    replayed: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # after every iteration another stream judges the run: by its value model, and by a reward
    original, num_judged = tasks.track, []

    def track_and_judge(run_id: str, iteration: int) -> None:
        original(run_id, iteration)
        store = storage.open(tmp_path / "store")
        scorers = ("final_number", "value") if iteration > 0 else ()
        with Progress(quiet=True) as progress:
            for scorer in scorers:
                summary = rescore(store, RescoreRequest(scorer, run_id=run_id), progress)
                num_judged.append(sum(summary.scores.values()))

    monkeypatch.setattr(tasks, "track", track_and_judge)
    again = run_here(tmp_path / "store", replay_config())
    assert sum(num_judged) > 100
    for table in ("picks", "replay_plans", "replays", "learned_samples", "policies", "states"):
        assert contents(again, table) == contents(replayed, table), table


def contents(store: storage.Store, table: str) -> dict[str, str]:
    rows = store.read(table, run_id=RUN_ID)
    return {row["event_id"]: row["content_sha256"] for row in rows}


def test_value_models_judge_what_was_sampled_before(replayed: storage.Store):
    models = replayed.read("value_models", run_id=RUN_ID)
    assert [row["iteration"] for row in models] == [1, 2, 3, 4, 5, 6]
    states = {row["event_id"] for row in replayed.read("states", run_id=RUN_ID)}
    scores = [r for r in replayed.read("scores", run_id=RUN_ID) if r["kind"] == "value"]
    for model in models:
        mine = [r for r in scores if r["scorer_version"] == model["scorer_version"]]
        assert mine
        assert {r["target_id"] for r in mine} <= states
        assert all(0 < r["value"] < 1 for r in mine)


def test_samples_of_a_step_say_where_they_are_from(replayed: storage.Store):
    for sample in step_samples(replayed, RUN_ID, 5):
        assert sample["state"] == "learned"
        assert (sample["unit"] == "fresh") == (sample["pick_id"] is None)
        assert sample["text"] is not None
        assert sample["scorer"] == "rrl_core.tasks.dense:contains_digit"


def test_a_run_without_replay_says_why_nothing_is_replayed(tmp_path: Path):
    config = replay_config("run.iterations=1", 'replay.units=["state"]')
    store = run_here(tmp_path / "store", config)
    [plan] = store.read("replay_plans", run_id=RUN_ID)
    assert plan["num_picked"] == 0
    assert plan["waiting_reason"] == "first iteration"
    assert json.loads(plan["reasons_json"]) == {}


def test_ppo_replays_states_to_the_last_bit(tmp_path: Path):
    config = replay_config(
        "learner.algorithm=ppo", 'replay.units=["state"]', "evaluation.every=off",
        "run.iterations=4", "learner.critic_warmup=1",
    )  # fmt: skip
    store = run_here(tmp_path / "store", config)
    units = {row["unit"] for row in store.read("replays", run_id=RUN_ID)}
    assert units == {"fresh", "state"}
    assert all("value_loss" in row["metrics_json"] for row in store.read("updates", run_id=RUN_ID))
    assert len({row["adapter_digest"] for row in store.read("policies", run_id=RUN_ID)}) > 2
    audited = list(audit(store, RUN_ID, config))
    assert [str(d) for a in audited for d in a.differences] == []
    with Progress(quiet=True) as progress:
        for iteration in (2, 4):
            assert retake(store, RUN_ID, config, iteration, progress).is_same
