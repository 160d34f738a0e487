"""The training flow in one process: what it writes, what it does when something fails."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import storage
from flows.config import ConfigError, parse_config
from flows.progress import Progress
from flows.train import train
from flows.wiring import Session, session_of
from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.sampling.protocol import (
    Completion,
    OnFinished,
    SampleRequest,
    SamplerError,
    SamplingParams,
)
from tests.flows.conftest import RUN_ID, fingerprint, run_here, smoke_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    return run_here(tmp_path_factory.mktemp("trained") / "store", smoke_config())


def test_every_iteration_is_complete(trained: storage.Store):
    for iteration in (1, 2, 3):
        rollouts = trained.read("rollouts", run_id=RUN_ID, iteration=iteration)
        attempts = [row for row in rollouts if row["role"] == "attempt"]
        assert len(attempts) == 4 * 4
        assert {row["policy_version"] for row in attempts} == {iteration - 1}
        replays = trained.read("replays", run_id=RUN_ID, iteration=iteration)
        learned = trained.read("learned_samples", run_id=RUN_ID, iteration=iteration)
        assert {r["rollout_id"] for r in replays} == {r["event_id"] for r in attempts}
        assert {r["rollout_id"] for r in learned} == {r["rollout_id"] for r in replays}


def test_ids_and_logprobs_have_equal_length(trained: storage.Store):
    rows = trained.read("rollout_tokens", run_id=RUN_ID)
    assert rows
    for row in rows:
        if row["sampler_logprobs"] is None:
            assert row["logprobs_reason"]
        else:
            assert len(row["sampler_logprobs"]) == len(row["completion_ids"])


def test_policy_versions_and_evaluations_are_those_planned(trained: storage.Store):
    policies = trained.read("policies", run_id=RUN_ID)
    assert [row["policy_version"] for row in policies] == [0, 1, 2, 3]
    evaluated = {row["iteration"] for row in trained.read("evaluations", run_id=RUN_ID)}
    assert evaluated == {0, 2, 3}


def test_mismatch_of_trainer_and_sampler_is_logged_and_small(trained: storage.Store):
    for row in trained.read("updates", run_id=RUN_ID):
        if not row["is_skipped"]:
            assert 0 <= json.loads(row["metrics_json"])["is/mismatch"] < 1e-4


def test_pins_name_the_reward_scorer_first(trained: storage.Store):
    for row in trained.read("views_pinned", run_id=RUN_ID):
        assert (
            next(iter(json.loads(row["scorer_versions_json"])))
            == "rrl_core.tasks.dense:share_of_digits"
        )
        assert row["as_of"] > 0


def test_the_same_run_elsewhere_has_the_same_events(trained: storage.Store, tmp_path: Path):
    again = run_here(tmp_path / "store", smoke_config())
    assert fingerprint(again) == fingerprint(trained)


def test_a_run_that_compacts_has_the_same_events(
    trained: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.tasks.MANY_SEGMENTS", 4)
    compacted = run_here(tmp_path / "store", smoke_config())
    assert fingerprint(compacted) == fingerprint(trained)
    assert any(s.is_compacted for s in compacted.log.refresh().segments.values())
    assert not storage.verify(compacted, deep=True)


BASE = "weights of the base model"


@pytest.mark.parametrize("what", ["prompts or the scorers", BASE])
def test_a_run_is_not_resumed_with_other_data_or_another_model(
    trained: storage.Store, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = storage.open(shutil.copytree(trained.path, tmp_path / "store"))
    head = store.head()
    if what == BASE:
        monkeypatch.setattr("flows.wiring.load_policy_model", other_model)
    else:
        monkeypatch.setattr("flows.wiring.task_sha256", lambda task: "0" * 64)
    with Progress(quiet=True) as progress, pytest.raises(ConfigError, match=f"{what} changed"):
        train(store, smoke_config(), RUN_ID, "none", progress)
    assert store.head() == head


def other_model(spec: ModelSpec, seed: int) -> Policy:
    return replace(load_policy_model(spec, seed), base_digest="f" * 64)


def test_another_seed_gives_other_rollouts(trained: storage.Store, tmp_path: Path):
    other = run_here(tmp_path / "store", smoke_config("run.seed=1", "run.iterations=1"))
    texts = {row["completion"] for row in other.read("rollouts", iteration=1)}
    assert texts.isdisjoint({row["completion"] for row in trained.read("rollouts", iteration=1)})


def test_only_the_last_two_optimizer_states_are_kept(trained: storage.Store):
    policies = trained.read("policies", run_id=RUN_ID)
    kept = [
        row["policy_version"]
        for row in policies
        if row["optimizer_artifact"] and trained.artifacts.has(row["optimizer_artifact"])
    ]
    assert kept == [2, 3]
    assert all(trained.artifacts.has(row["adapter_artifact"]) for row in policies)


class BrokenSampler:
    """A sampler whose engine fails on chosen calls, when it has finished some completions."""

    def __init__(self, inner: object, failing_calls: set[int]) -> None:
        self._inner = inner
        self._failing = failing_calls
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def generate(
        self,
        requests: list[SampleRequest],
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        self.calls += 1
        if self.calls in self._failing:
            self._inner.generate(requests[:3], params, on_finished)  # type: ignore[attr-defined]
            raise SamplerError("the engine died")
        return self._inner.generate(requests, params, on_finished)  # type: ignore[attr-defined,no-any-return]


def with_broken_sampler(monkeypatch: pytest.MonkeyPatch, failing_calls: set[int]) -> None:
    """Let the session's sampler, and its restarts, share one count of calls."""
    import flows.wiring as wiring

    made = wiring.make_sampler
    state: dict[str, BrokenSampler] = {}

    def broken(*arguments: object, **named: object) -> BrokenSampler:
        sampler = BrokenSampler(made(*arguments, **named), failing_calls)  # type: ignore[arg-type]
        sampler.calls = state["last"].calls if state else 0
        state["last"] = sampler
        return sampler

    monkeypatch.setattr(wiring, "make_sampler", broken)


def test_an_engine_that_dies_once_is_restarted_and_recorded(
    trained: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with_broken_sampler(monkeypatch, {2})
    store = run_here(tmp_path / "store", smoke_config())
    (failure,) = store.read("failures", run_id=RUN_ID)
    assert (failure["phase"], failure["kind"]) == ("generate", "SamplerError")
    assert fingerprint(store) == fingerprint(trained)


def test_an_engine_that_stays_dead_loses_nothing(
    trained: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        with_broken_sampler(patch, set(range(3, 100)))
        store = storage.open(tmp_path / "store", create=True)
        with Progress(quiet=True) as progress, pytest.raises(SamplerError, match="engine died"):
            train(store, smoke_config(), RUN_ID, "none", progress)
    ended = [row["what"] for row in store.read("runs", run_id=RUN_ID)]
    assert ended == ["opened", "failed"]
    resumed = run_here(tmp_path / "store", smoke_config())
    assert fingerprint(resumed) == fingerprint(trained)


def test_a_prompt_longer_than_the_context_costs_its_own_group_only(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "x" * 400, "answer": "1"}]
    lines += [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = smoke_config("run.iterations=1", "evaluation.every=off").model_dump(mode="json")
    data["task"] = {"name": "jsonl", "path": str(prompts), "eval_fraction": 0}
    config = parse_config(data, "test")
    store = run_here(tmp_path / "store", config)
    refused = [r for r in store.read("rollouts", iteration=1) if r["status"] == "error"]
    assert len({r["prompt_id"] for r in refused}) == 1
    (failure,) = store.read("failures", run_id=RUN_ID)
    assert failure["kind"] == "prompt_refused"
    assert len(store.read("replays", iteration=1)) == 3 * 4


def test_first_stop_request_commits_what_was_begun(trained: storage.Store, tmp_path: Path):
    store = storage.open(tmp_path / "store", create=True)

    class StopSoon(Progress):
        def sampled(self, num_sequences: int, elapsed_s: float) -> None:
            stopping: Session = session_of(RUN_ID)
            stopping.should_stop = stopping.sampler.policy_version >= 1

    with StopSoon(quiet=True) as progress:
        assert train(store, smoke_config(), RUN_ID, "none", progress) == "interrupted"
    assert [row["what"] for row in store.read("runs", run_id=RUN_ID)] == ["opened", "interrupted"]
    resumed = run_here(tmp_path / "store", smoke_config())
    assert fingerprint(resumed) == fingerprint(trained)
