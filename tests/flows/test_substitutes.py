"""Old successes among fresh failures: replayed ones, and substitutes where a group failed whole."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

import storage
from flows import auditing, tasks
from flows.auditing import audit
from flows.config import ConfigError
from flows.materializing import Moment, compare_moments
from flows.metrics import iteration_metrics
from flows.planned import planned_steps
from flows.progress import Progress
from flows.retrying import Comparisons, compare_with_old
from flows.stepping import retake
from flows.wiring import learner_config, model_spec
from rrl_core.policy.learner import Learner
from rrl_core.policy.model import load_policy_model
from tests.flows.conftest import RUN_ID
from tests.flows.scripted import forgetful, run_script, scripted_config

GOLDEN = 0.875 / (0.125**0.5 + 1e-4)  # 2.4742: variance of one 1 among seven 0 with n - 1 is 1/8
ROUNDING = 1e-9
LATE = 4  # the iteration in which 16 failures have made the first successes rare
SWITCHED_ON = scripted_config("replay.replace_zero_variance=true")


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch) -> storage.Store:
    """A run without substitutes; it writes down one outcome of its retries wrongly."""

    def forged(*arguments) -> Comparisons:
        compared = compare_with_old(*arguments)
        for row in compared.retries[:1]:
            row["outcome"] = "rescued"
        return compared

    path = tmp_path_factory.mktemp("plain") / "store"
    patched.setattr(tasks, "compare_with_old", forged)
    store = run_script(path, scripted_config(), forgetful, patched)
    patched.setattr(tasks, "compare_with_old", compare_with_old)
    return store


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch) -> storage.Store:
    """A run with substitutes; it plans every batch twice, as a resumed one does."""
    path, plan_batch = tmp_path_factory.mktemp("filled") / "store", tasks.plan_batch

    def twice(run_id: str, iteration: int) -> int:
        planned = plan_batch(run_id, iteration)
        head = storage.open(path).head()
        assert plan_batch(run_id, iteration) == planned
        assert storage.open(path).head() == head
        return planned

    patched.setattr(tasks, "plan_batch", twice)
    store = run_script(path, SWITCHED_ON, forgetful, patched)
    patched.setattr(tasks, "plan_batch", plan_batch)
    return store


def replays_of(store: storage.Store, kind: str) -> list[dict]:
    rows = store.read("replays", run_id=RUN_ID)
    return [row for row in rows if row["pick_kind"] == kind]


def test_one_replayed_success_among_seven_fresh_failures_is_learned_from(plain: storage.Store):
    replays = plain.read("replays", run_id=RUN_ID, iteration=LATE)
    [old] = [row for row in replays if row["unit"] == "trajectory"]
    group = [row for row in replays if row["group_id"] == old["group_id"]]
    assert Counter(row["unit"] for row in group) == {"trajectory": 1, "fresh": 7}
    assert old["advantage"] == pytest.approx(GOLDEN, abs=ROUNDING)
    assert round(old["advantage"], 4) == 2.4742
    fresh = [row["advantage"] for row in group if row["unit"] == "fresh"]
    assert fresh == pytest.approx([-GOLDEN / 7] * 7, abs=ROUNDING)
    [learned] = [
        row
        for row in plain.read("learned_samples", run_id=RUN_ID, iteration=LATE)
        if row["rollout_id"] == old["rollout_id"]
    ]
    assert learned["num_loss_tokens"] == 6  # five characters and the end
    assert 0 < learned["importance_mean"] <= 2
    [update] = plain.read("updates", run_id=RUN_ID, iteration=LATE)
    assert not update["is_skipped"]
    assert update["policy_loss"] != 0
    assert update["grad_norm"] > 0


def test_the_replayed_success_alone_has_a_loss_and_a_gradient(plain: storage.Store):
    config = scripted_config()
    [(_, samples)] = planned_steps(plain, RUN_ID, LATE)
    [sample] = [s for s in samples if s.advantage > 1]
    learner = Learner(load_policy_model(model_spec(config), seed=0), learner_config(config))
    result = learner.step([sample])
    # one sequence, on-policy but for the weights w <= 2: the loss is -A mean(w)
    assert result.loss == pytest.approx(-GOLDEN * result.samples[0].importance_mean, rel=1e-4)
    assert result.grad_norm > 0


def test_trajectories_that_started_by_a_success_rate_stay_started(plain: storage.Store):
    rates = {
        row["iteration"]: row["num_ok"] / row["num_scored"]
        for row in plain.view("prompt_history", run_id=RUN_ID)
    }
    assert rates == {1: 1.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0}
    assert {p["iteration"] for p in plain.read("picks", run_id=RUN_ID)} == {LATE}
    waiting = {p["iteration"]: p["waiting_reason"] for p in plain.read("replay_plans")}
    assert waiting[3] == "nothing eligible"  # not: before pass@1 0.35 or iteration 10


def test_a_group_that_failed_whole_gets_one_old_success_in_the_place_of_its_last_rollout(
    filled: storage.Store,
):
    [old] = replays_of(filled, "substitute")
    assert old["unit"] == "trajectory"
    assert old["advantage"] == pytest.approx(GOLDEN, abs=ROUNDING)
    replays = filled.read("replays", run_id=RUN_ID, iteration=LATE)
    group = [row for row in replays if row["group_id"] == old["group_id"]]
    assert Counter(row["unit"] for row in group) == {"trajectory": 1, "fresh": 7}
    rollouts = {r["event_id"]: r for r in filled.read("rollouts", run_id=RUN_ID)}
    prompt_id = rollouts[old["rollout_id"]]["prompt_id"]
    fresh = [rollouts[row["rollout_id"]] for row in group if row["unit"] == "fresh"]
    assert {(r["prompt_id"], r["iteration"]) for r in fresh} == {(prompt_id, LATE)}
    assert sorted(r["sample_index"] for r in fresh) == list(range(7))  # of 8 that were sampled


def test_substitutes_change_neither_what_is_sampled_nor_how_much_is_learned(
    plain: storage.Store, filled: storage.Store
):
    for table in ("rollouts", "replay_plans"):
        columns = [
            [(r["event_id"], r["content_sha256"]) for r in s.read(table, iteration=LATE)]
            for s in (plain, filled)
        ]
        assert columns[0] == columns[1], table
    assert [len(s.read("replays", iteration=LATE)) for s in (plain, filled)] == [32, 32]


def test_with_the_share_they_take_half_of_the_groups_at_most(filled: storage.Store):
    # half of 4 groups are 2: a share of 0.25 takes one, one is left for a substitute
    picks = filled.read("picks", run_id=RUN_ID)
    assert [p["iteration"] for p in picks] == [LATE, LATE]
    assert [p["pick_kind"] == "substitute" for p in picks] == [False, True]
    assert [p["position"] for p in picks] == [0, 1]
    assert len({p["prompt_id"] for p in picks}) == 2
    [plan] = filled.read("replay_plans", run_id=RUN_ID, iteration=LATE)
    assert plan["num_picked"] == 1
    assert iteration_metrics(filled, RUN_ID, LATE)["replay/uses"] == 2


def test_only_what_stood_in_is_a_use_and_the_audit_view_tells_of_it(filled: storage.Store):
    buffer = filled.view("replay_buffer", arguments={"run": RUN_ID})
    uses = {r["entry_id"]: r["num_uses"] for r in buffer if r["unit"] == "trajectory"}
    assert len(uses) == 32
    picked = {p["entry_id"] for p in filled.read("picks", run_id=RUN_ID)}
    assert {entry for entry, number in uses.items() if number} == picked
    [told] = [
        row
        for row in filled.view("replay_audit", run_id=RUN_ID)
        if row["pick_kind"] == "substitute"
    ]
    assert (told["state"], told["unit"], told["iteration"]) == ("learned", "trajectory", LATE)
    assert told["pick_value"] == 1.0
    assert told["num_loss_tokens"] == 6
    outcomes = Counter(
        (row["pick_id"] == told["pick_id"], row["outcome"])
        for row in filled.read("retries", run_id=RUN_ID)
    )
    assert outcomes == {(True, "regressed"): 8, (False, "regressed"): 7}


def test_every_step_with_substitutes_is_derived_and_taken_again(filled: storage.Store):
    audited = list(audit(filled, RUN_ID, SWITCHED_ON))
    assert [str(d) for a in audited for d in a.differences] == []
    assert sum(a.num_picks for a in audited) == 2
    with Progress(quiet=True) as progress:
        assert retake(filled, RUN_ID, SWITCHED_ON, LATE, progress).is_same
    # without the switch nothing would have been substituted: the audit notices both ways
    found = [d for a in audit(filled, RUN_ID, scripted_config(), [LATE]) for d in a.differences]
    assert {"pick", "replay", "retry"} == {d.what for d in found}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['replay.units=["state"]'], r"replace_zero_variance.*`replay.units` = \['state'\]"),
        (["learner.algorithm=ppo"], "replace_zero_variance.*`learner.algorithm` = 'ppo'"),
        (["learner.algorithm=sft"], "replace_zero_variance.*`learner.algorithm` = 'sft'"),
    ],
)
def test_substitutes_that_could_not_help_are_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        scripted_config("replay.replace_zero_variance=true", *overrides)


def test_a_forged_outcome_of_a_retry_is_named(plain: storage.Store):
    found = [d for a in audit(plain, RUN_ID, scripted_config()) for d in a.differences]
    assert [(d.what, d.iteration) for d in found] == [("retry", LATE)]
    assert (found[0].stored, found[0].derived) == ("'rescued'", "'regressed'")
    [row] = [r for r in plain.read("retries") if r["outcome"] == "rescued"]
    assert found[0].where == f"{row['old_rollout_id']} {row['new_rollout_id']}, outcome"


def test_substitutes_that_other_code_drew_are_taken_as_stored(
    filled: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    def without(*arguments):
        return replace(decide(*arguments), most_substitutes=0)

    decide = auditing.decide
    monkeypatch.setattr(auditing, "decide", without)
    [found] = auditing.audit(filled, RUN_ID, SWITCHED_ON, [LATE])
    assert {"pick", "replay"} <= {d.what for d in found.differences}
    monkeypatch.setattr(auditing, "code_version", lambda: "9.0.0")
    [found] = auditing.audit(filled, RUN_ID, SWITCHED_ON, [LATE])
    assert found.differences == []
    assert found.unlike


def test_a_trajectory_that_only_aged_has_fallen(plain: storage.Store):
    query = f"select _commit from policies where iteration = {LATE}"
    [(published,)] = plain.sql(query).fetchall()
    before, after = (Moment(number, "none") for number in (published - 1, published))
    changes = compare_moments(plain, RUN_ID, scripted_config(), before, after)
    fell = [change for change in changes if change.kind == "fell"]
    assert fell
    for change in fell:
        assert change.before["base"] == change.after["base"]
        assert "freshness" in change.why
