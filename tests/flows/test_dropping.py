"""States where forgotten successes were lost; and what is tried in vain counts as tried."""

from collections import Counter
from pathlib import Path

import pytest

import storage
from flows.auditing import audit
from flows.wiring import model_spec
from rrl_core.policy.logprobs import policy_logprobs
from rrl_core.policy.model import load_policy_model
from rrl_core.policy.packing import Branch
from rrl_core.value.cuts import drop_cut
from tests.flows.conftest import RUN_ID
from tests.flows.scripted import forgetful, hopeless, idea_only, run_script, scripted_config

JUDGED = ('replay.units=["state"]', "value.every=1")


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run that solves all of its 4 prompts in iteration 1, and none of them later."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("forgotten") / "store"
        return run_script(path, scripted_config(*JUDGED, "replay.share=0"), forgetful, patch)


def drops_of(store: storage.Store) -> list[dict]:
    return [row for row in store.read("states", run_id=RUN_ID) if row["cut"] == "drop"]


def test_each_refit_cuts_one_forgotten_success_a_prompt_and_none_twice(forgotten: storage.Store):
    drops = drops_of(forgotten)
    # 16 failures make p_hat 0.5 / 18 in iteration 3: from then on each refit cuts one of 4 prompts
    counts = Counter((row["iteration"], row["prompt_id"]) for row in drops)
    assert set(counts.values()) == {1}
    assert Counter(row["iteration"] for row in drops) == {3: 4, 4: 4, 5: 4}
    assert len({row["rollout_id"] for row in drops}) == 12
    sampled = {r["event_id"]: r["iteration"] for r in forgotten.read("rollouts", run_id=RUN_ID)}
    assert {sampled[row["rollout_id"]] for row in drops} == {1}


def test_the_cut_is_behind_the_token_whose_logprob_fell_most(forgotten: storage.Store):
    [published] = forgotten.read("policies", run_id=RUN_ID, iteration=3)
    policy = load_policy_model(model_spec(scripted_config()), seed=0)
    policy.load_adapter_bytes(forgotten.artifacts.get(published["adapter_artifact"]))
    tokens = {row["rollout_id"]: row for row in forgotten.read("rollout_tokens", run_id=RUN_ID)}
    for row in drops_of(forgotten):
        held = tokens[row["rollout_id"]]
        ids = held["completion_ids"]
        branch = Branch(tuple(held["prompt_ids"]), tuple(ids))
        scores = policy_logprobs(policy, [branch], max_tokens=512)
        cut = drop_cut(held["sampler_logprobs"], scores.logprobs_BT[0].tolist())
        if row["iteration"] == 3:  # by the policy that this refit had
            assert cut is not None
            assert row["prefix_tokens"] == cut.prefix_tokens


def test_they_are_judged_by_the_refit_that_cuts_them(forgotten: storage.Store):
    models = {m["iteration"]: m["scorer_version"] for m in forgotten.read("value_models")}
    judged = {(r["target_id"], r["scorer_version"]) for r in forgotten.read("scores")}
    buffer = forgotten.view("replay_buffer", arguments={"run": RUN_ID, "version": "none"})
    first = {row["entry_id"] for row in buffer}  # of equal states the first stands for all
    drops = [row for row in drops_of(forgotten) if row["event_id"] in first]
    assert {row["iteration"] for row in drops} >= {3}
    for row in drops:
        for iteration in range(row["iteration"], 6):
            assert (row["event_id"], models[iteration]) in judged
    audited = audit(forgotten, RUN_ID, scripted_config(*JUDGED, "replay.share=0"))
    assert [str(d) for a in audited for d in a.differences] == []


def test_states_whose_groups_dapo_drops_are_used_and_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = scripted_config(*JUDGED, "learner.algorithm=dapo", "run.iterations=4")
    store = run_script(tmp_path / "store", config, hopeless, monkeypatch)
    assert store.read("replays", run_id=RUN_ID) == []
    picks = store.read("picks", run_id=RUN_ID)
    assert {p["iteration"] for p in picks} == {2, 3}
    buffer = store.view("replay_buffer", arguments={"run": RUN_ID, "version": "none"})
    uses = {row["entry_id"]: row["num_uses"] for row in buffer if row["num_uses"]}
    assert uses == Counter(p["entry_id"] for p in picks)
    by_iteration = {i: {p["entry_id"] for p in picks if p["iteration"] == i} for i in (2, 3)}
    assert not by_iteration[2] & by_iteration[3]  # those of 2 rested in 3
    audited = audit(store, RUN_ID, config)
    assert [str(d) for a in audited for d in a.differences] == []


def test_raft_credits_the_idea_of_a_state_whose_continuations_all_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = scripted_config(*JUDGED, "learner.algorithm=raft", "run.iterations=3")
    store = run_script(tmp_path / "store", config, idea_only, monkeypatch)
    replays = [r for r in store.read("replays", run_id=RUN_ID) if r["unit"] == "state"]
    assert {r["reward"] for r in replays} == {1.0}
    # all 8 succeed, the prompt never did: (1 - 0) / 0.3, of the prefix and of what follows it
    for name in ("advantage", "prefix_advantage"):
        assert [r[name] for r in replays] == pytest.approx([1 / 0.3] * len(replays), abs=1e-9)
    learned = {r["rollout_id"]: r for r in store.read("learned_samples", run_id=RUN_ID)}
    assert all(learned[r["rollout_id"]]["prefix_weight_mean"] is not None for r in replays)
    iterations = {r["iteration"] for r in replays}
    updates = [u for u in store.read("updates") if u["iteration"] in iterations]
    assert all(u["policy_loss"] > 0 and not u["is_skipped"] for u in updates)
    audited = audit(store, RUN_ID, config)
    assert [str(d) for a in audited for d in a.differences] == []
