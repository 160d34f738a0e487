"""Learning from history alone: what a query leaves, what it teaches, and that it can be derived."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.auditing import audit
from flows.config import RunConfig, load_config
from flows.forking import plan_fork
from flows.metrics import iteration_metrics
from flows.offline import why_not
from flows.progress import Progress
from flows.stepping import retake
from flows.train import train
from flows.wiring import opened_row, session_of
from rrl_core.sampling.none import NoSampler
from rrl_core.sampling.protocol import SamplerError, SamplingParams
from rrl_core.tasks.protocol import TaskError
from tests.flows.conftest import run_here, smoke_config

SOURCE = "source-run"
COMMON = ("event_id", "content_sha256", "epoch", "recorded_at", "run_id")
Row = dict[str, Any]


def offline_config(*overrides: str) -> RunConfig:
    ours = ["tracking.mlflow=false", "run.mode=offline", "evaluation.every=off",
            "offline.samples=12", "tracking.keep_optimizer=all", "sampler.engine=vllm"]  # fmt: skip
    reward = "task.reward=rrl_core.tasks.dense:contains_digit"
    return load_config(Path("smoke"), [*ours, reward, *overrides])


def adapters(store: storage.Store, run_id: str) -> list[str]:
    rows = store.read("policies", run_id=run_id)
    return [row["adapter_digest"] for row in sorted(rows, key=lambda row: row["policy_version"])]


def differences(store: storage.Store, run_id: str, config: RunConfig) -> list[str]:
    return [str(d) for a in audit(store, run_id, config) for d in a.differences]


def plans_of(store: storage.Store, run_id: str) -> list[Row]:
    return store.read("replay_plans", run_id=run_id)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of the fake sampler: 48 attempts, some short enough to miss a digit."""
    path = tmp_path_factory.mktemp("history") / "store"
    overrides = ["sampler.engine=fake", "sampler.max_tokens=2", "evaluation.every=3",
                 "task.reward=rrl_core.tasks.dense:contains_digit"]  # fmt: skip
    run_here(path, smoke_config(*overrides), SOURCE)
    return path


@pytest.fixture
def store(history: Path, tmp_path: Path) -> storage.Store:
    return storage.open(shutil.copytree(history, tmp_path / "store"))


def learn(store: storage.Store, config: RunConfig, run_id: str = "offline-run") -> str:
    with Progress(quiet=True) as progress:
        return train(store, config, run_id, "none", progress)


class StopAfter(Progress):
    """Asks the run to stop once it has ended an iteration."""

    def __init__(self, last: int) -> None:
        super().__init__(quiet=True)
        self.last = last

    def iteration_done(
        self, store: storage.Store, run_id: str, iteration: int, planned: int
    ) -> None:
        session_of(run_id).should_stop = iteration == self.last


def copied(
    store: storage.Store, stream: str, change: Callable[[str, Row], Row | None], policy: Row
) -> list[str]:
    """Copy the source's attempts of iteration 1 into a stream; `change` may alter or drop rows."""
    writer = store.open_stream(stream, opened_row(offline_config(), "0" * 64))
    attempts = store.read("rollouts", run_id=SOURCE, iteration=1)
    tables: dict[str, list[Row]] = {"policies": [policy]} if policy else {}
    for table in ("prompts", "rollouts", "rollout_tokens", "scores"):
        for row in store.read(table, run_id=SOURCE):
            old = row["event_id"] if table == "rollouts" else row.get("rollout_id")
            old = row["target_id"] if table == "scores" else old
            if table != "prompts" and row["iteration"] != 1:
                continue
            bare = {k: v for k, v in row.items() if k not in COMMON}
            if table in ("rollout_tokens", "scores"):
                [place] = [r for r in attempts if r["event_id"] == old]
                key = "rollout_id" if table == "rollout_tokens" else "target_id"
                bare[key] = storage.event_id("rollouts", place | {"run_id": stream})
            changed = change(table, bare)
            if changed is not None:
                tables.setdefault(table, []).append(changed)
    committed = writer.append(tables, batch_key="copied")
    return [row["event_id"] for row in committed.rows["rollouts"]]


def policy_row(store: storage.Store) -> Row:
    row = store.read("policies", run_id=SOURCE)[0]
    return {k: v for k, v in row.items() if k not in COMMON}


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "raft"])
def test_a_run_learns_from_another_runs_rollouts_and_samples_none(
    store: storage.Store, algorithm: str
):
    config = offline_config(f"learner.algorithm={algorithm}", "run.iterations=2")
    assert learn(store, config) == "finished"
    assert store.read("rollouts", run_id="offline-run") == []
    assert len(set(adapters(store, "offline-run"))) == 3
    replays = store.read("replays", run_id="offline-run")
    assert len(replays) == 24
    assert iteration_metrics(store, "offline-run", 1)["replay/uses"] == 12
    assert {(r["unit"], r["pick_kind"], r["source_run_id"]) for r in replays} == {
        ("trajectory", "uniform", SOURCE)
    }
    assert {r["what"] for r in store.read("runs", run_id="offline-run")} == {"opened", "finished"}
    assert differences(store, "offline-run", config) == []
    other = offline_config(f"learner.algorithm={algorithm}", "run.iterations=2", "run.seed=1")
    assert differences(store, "offline-run", other)
    with Progress(quiet=True) as progress:
        for iteration in (1, 2):
            assert retake(store, "offline-run", config, iteration, progress).is_same


def test_an_advantage_is_reward_minus_the_prompts_success_rate_over_three_tenths(
    store: storage.Store,
):
    learn(store, offline_config("run.iterations=1"))
    rewards = {r["target_id"]: r["value"] for r in store.read("scores", run_id=SOURCE)}
    attempts = [r for r in store.read("rollouts", run_id=SOURCE) if r["role"] == "attempt"]
    replays = store.read("replays", run_id="offline-run")
    assert {row["reward"] for row in replays} == {0.0, 1.0}
    for row in replays:
        [own] = [a for a in attempts if a["event_id"] == row["rollout_id"]]
        of_prompt = [a for a in attempts if a["prompt_id"] == own["prompt_id"]]
        recent = [rewards[a["event_id"]] for a in of_prompt][-16:]
        p_hat = (sum(recent) + 0.5) / (len(recent) + 2)
        assert row["advantage"] == pytest.approx((row["reward"] - p_hat) / 0.3, abs=1e-12)


def test_sft_weighs_all_the_same_and_raft_keeps_what_was_rewarded(store: storage.Store):
    learn(store, offline_config("learner.algorithm=sft", "run.iterations=1"), "sft-run")
    learn(store, offline_config("learner.algorithm=raft", "run.iterations=1"), "raft-run")
    of_sft, of_raft = (store.read("replays", run_id=run) for run in ("sft-run", "raft-run"))
    assert {row["advantage"] for row in of_sft} == {row["advantage"] for row in of_raft} == {1.0}
    assert {row["reward"] for row in of_sft} == {0.0, 1.0}
    assert {row["reward"] for row in of_raft} == {1.0}
    reasons = json.loads(plans_of(store, "raft-run")[0]["reasons_json"])["trajectory"]
    assert reasons["usable"] + reasons["not_rewarded"] == 48


def test_an_epoch_holds_every_rollout_once(store: storage.Store):
    learn(store, offline_config("run.iterations=4"))  # 48 rollouts, 12 an iteration
    replays = store.read("replays", run_id="offline-run")
    attempts = [r for r in store.read("rollouts", run_id=SOURCE) if r["role"] == "attempt"]
    assert sorted(r["rollout_id"] for r in replays) == sorted(r["event_id"] for r in attempts)


def test_the_same_run_twice_ends_in_the_same_adapter(store: storage.Store):
    config = offline_config("run.iterations=2")
    learn(store, config, "first-run")
    learn(store, config, "second-run")
    assert adapters(store, "first-run") == adapters(store, "second-run")


def test_a_stopped_and_resumed_run_asks_as_of_its_first_pin(store: storage.Store):
    config = offline_config("run.iterations=3")
    learn(store, config, "whole-run")
    with StopAfter(1) as progress:
        assert train(store, config, "stopped-run", "none", progress) == "interrupted"
    copied(store, "later-run", lambda table, row: row, policy_row(store))  # more to learn from
    assert learn(store, config, "stopped-run") == "finished"
    assert adapters(store, "stopped-run") == adapters(store, "whole-run")
    assert {plan["num_candidates"] for plan in plans_of(store, "stopped-run")} == {48}
    assert differences(store, "stopped-run", config) == []


def test_an_unchanged_fork_goes_on_as_its_parent_did_whatever_came_since(store: storage.Store):
    learn(store, offline_config("run.iterations=3"), "parent-run")
    copied(store, "later-run", lambda table, row: row, policy_row(store))
    config, fork = plan_fork(store, "parent-run@1", None, ())
    with Progress(quiet=True) as progress:
        train(store, config, "fork-run", "none", progress, fork)
    assert adapters(store, "fork-run") == adapters(store, "parent-run")[1:]
    assert differences(store, "fork-run", config) == []


def test_text_alone_is_left_out_and_counted(store: storage.Store):
    ids = copied(store, "text-run", lambda t, row: None if t == "rollout_tokens" else row, {})
    learn(store, offline_config("run.iterations=1"))
    [plan] = plans_of(store, "offline-run")
    assert plan["num_candidates"] == 48 + len(ids) == 64
    assert json.loads(plan["reasons_json"]) == {"trajectory": {"no_tokens": 16, "usable": 48}}
    [failure] = store.read("failures", run_id="offline-run")
    assert (failure["phase"], failure["kind"]) == ("plan", "no_tokens")
    assert failure["message"].startswith("16 rollouts are left out, such as ro")


@pytest.mark.parametrize(("algorithm", "num_usable"), [("grpo", 48), ("sft", 64)])
def test_without_logprobs_only_what_compares_no_policies_learns(
    store: storage.Store, algorithm: str, num_usable: int
):
    def without(table: str, row: Row) -> Row:
        return row | {"sampler_logprobs": None} if table == "rollout_tokens" else row

    copied(store, "bare-run", without, policy_row(store))
    learn(store, offline_config(f"learner.algorithm={algorithm}", "run.iterations=1"))
    assert plans_of(store, "offline-run")[0]["num_eligible"] == num_usable


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("role", ["attempt", "retry", "review", "second_attempt", "control"])
def test_only_what_was_sampled_from_the_prompt_alone_is_learned_from(role: str, algorithm: str):
    """A second attempt had a review in sight: its log-probs are not those of the prompt."""
    config = offline_config(f"learner.algorithm={algorithm}")
    row = {
        "role": role, "task": config.task.name, "split": "train", "prefix_tokens": 0,
        "temperature": 1.0, "num_prompt_ids": 3, "num_completion_ids": 2, "num_logprobs": 2,
        "base_digest": "b0", "score_id": "sc1", "reward": 1.0, "p_hat": 0.25, "top_p": 1.0,
        "top_k": 0,
    }  # fmt: skip
    is_answer = role in ("attempt", "retry")
    assert why_not(row, config) == ("usable" if is_answer else "not_whole")


def test_what_was_not_judged_is_judged_once_as_the_runs_own(store: storage.Store):
    ids = copied(store, "new-run", lambda t, row: None if t == "scores" else row, policy_row(store))
    named = "select event_id as rollout_id from rollouts where run_id = 'new-run'"
    config = offline_config(f"offline.query={named}", "run.iterations=2")
    learn(store, config)
    made = store.read("scores", run_id="offline-run")
    assert sorted(row["target_id"] for row in made) == sorted(ids)
    assert {row["iteration"] for row in made} == {1}
    replays = store.read("replays", run_id="offline-run")
    assert {row["score_id"] for row in replays} <= {row["event_id"] for row in made}
    assert differences(store, "offline-run", config) == []


def test_another_base_model_is_refused_and_both_are_named(store: storage.Store):
    foreign = policy_row(store) | {"base_digest": "f" * 64}
    ours = policy_row(store)["base_digest"]
    copied(store, "foreign-run", lambda table, row: row, foreign)
    with pytest.raises(storage.QueryError, match=rf"{ours}.*foreign-run.*f{{64}}"):
        learn(store, offline_config())
    assert store.read("updates", run_id="offline-run") == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select event_id from rollouts", "the one column `rollout_id`, came one with event_id"),
        ("select event_id as rollout_id, role from rollouts", "came one with rollout_id, role"),
        ("select event_id as rollout_id from rollouts where false", "leaves none: no rows"),
        ("select 'nothing' as rollout_id", "1 ids that are no rollouts"),
        ("copy (select 1) to '/tmp/rrl-never'", "nothing was run"),
        ("select 1; select 2", "expected one SELECT, came 2"),
        ("select event_id as rollout_id from rollouts union all select null", "came NULL"),
        ("select event_id as rollout_id from rollouts order by random() limit 20", "`random`"),
    ],
)
def test_a_query_that_names_no_rollouts_or_others_each_time_is_refused_before_a_run_begins(
    store: storage.Store, query: str, message: str
):
    head = store.head()
    with pytest.raises(storage.QueryError, match=message):
        learn(store, offline_config(f"offline.query={query}"))
    assert store.head() == head
    assert not Path("/tmp/rrl-never").exists()


def test_a_query_that_leaves_nothing_to_learn_from_is_refused(store: storage.Store):
    query = "select event_id as rollout_id from rollouts where role = 'evaluation'"
    with pytest.raises(storage.QueryError, match="leaves none: 12 held_out"):
        learn(store, offline_config(f"offline.query={query}"))
    assert store.read("updates", run_id="offline-run") == []


def test_a_query_about_what_was_not_learned_yet_is_asked_as_of_the_first_pin(store: storage.Store):
    unused = "where event_id not in (select rollout_id from replays where run_id = 'offline-run')"
    query = f"select event_id as rollout_id from rollouts {unused} and role = 'attempt'"
    config = offline_config(f"offline.query={query}", "offline.samples=24", "run.iterations=3")
    with StopAfter(2) as progress:  # all 48 were learned from
        assert train(store, config, "offline-run", "none", progress) == "interrupted"
    assert learn(store, config) == "finished"


def test_more_samples_than_there_are_is_refused(store: storage.Store):
    head = store.head()
    with pytest.raises(TaskError, match=r"`offline.samples` = 49 rollouts.* came 48"):
        learn(store, offline_config("offline.samples=49"))
    assert store.head() == head


def test_a_resumed_run_whose_query_answers_otherwise_is_refused(store: storage.Store):
    of_attempts = "offline.query=select event_id as rollout_id from rollouts where role = 'attempt'"
    with StopAfter(1) as progress:
        config = offline_config(of_attempts, "run.iterations=2")
        assert train(store, config, "offline-run", "none", progress) == "interrupted"
    with pytest.raises(storage.QueryError, match="answers otherwise than in iteration 1"):
        learn(store, offline_config(f"{of_attempts} and sample_index < 3", "run.iterations=2"))


@pytest.mark.slow
def test_an_offline_run_never_loads_vllm(store: storage.Store):
    code = (
        "import sys\nfrom tests.flows.test_offline import learn, offline_config\nimport storage\n"
        f"learn(storage.open({str(store.path)!r}), offline_config('run.iterations=1'))\n"
        "print('vllm' in sys.modules)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split()[-1] == "False"


def test_no_sampler_refuses_to_sample():
    sampler = NoSampler()
    assert sampler.policy_version == -1
    with pytest.raises(SamplerError, match="learns from history alone"):
        sampler.generate([], SamplingParams())


@pytest.mark.parametrize(
    ("overrides", "num_usable"),
    [([], 48), (["learner.correction=none"], 64), (["learner.algorithm=sft"], 64)],
)
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_what_was_sampled_from_a_cut_distribution_is_left_out_under_a_correction(
    store: storage.Store, cut: Row, overrides: list[str], num_usable: int
):
    def narrowed(table: str, row: Row) -> Row:
        return row | cut if table == "rollouts" else row

    copied(store, "narrow-run", narrowed, policy_row(store))
    learn(store, offline_config("run.iterations=1", *overrides))
    [plan] = plans_of(store, "offline-run")
    assert plan["num_eligible"] == num_usable
    reasons = json.loads(plan["reasons_json"])["trajectory"]
    assert reasons.get("cut_distribution", 0) == 64 - num_usable
    failures = store.read("failures", run_id="offline-run")
    assert [f["kind"] for f in failures] == ["cut_distribution"] * (num_usable < 64)


def test_an_advantage_is_per_unit_of_the_reward_range(store: storage.Store):
    learn(store, offline_config("run.iterations=1"), "unit-run")
    learn(store, offline_config("run.iterations=1", "replay.reward_range=2"), "double-run")
    unit, double = (
        {row["rollout_id"]: row["advantage"] for row in store.read("replays", run_id=run)}
        for run in ("unit-run", "double-run")
    )
    assert double == {rollout_id: pytest.approx(a / 2) for rollout_id, a in unit.items()}
    config = offline_config("run.iterations=1", "replay.reward_range=2")
    assert differences(store, "double-run", config) == []
