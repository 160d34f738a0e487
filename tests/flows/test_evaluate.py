"""A stored policy is evaluated outside training as it was within, in a stream of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flows.generation
import storage
from flows.cli import app
from flows.config import ConfigError, RunConfig
from flows.evaluate import EvaluateRequest, evaluate
from flows.progress import Progress
from flows.wiring import stored_config
from tests.flows.conftest import RUN_ID, fingerprint, run_here, smoke_config

SCORES = ("scorer", "scorer_version", "policy_version", "num_prompts", "mean_score", "ci_low",
          "ci_high", "mean_completion_tokens", "temperature")  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """Evaluated at temperature 1, so that the log-probs tell which policy sampled."""
    overrides = ["run.iterations=2", "evaluation.temperature=1", "sampler.batch_sequences=4"]
    config = smoke_config(*overrides, "evaluation.every=1")
    return run_here(tmp_path_factory.mktemp("trained") / "store", config)


@pytest.fixture
def store(trained: storage.Store, tmp_path: Path) -> storage.Store:
    return storage.open(shutil.copytree(trained.path, tmp_path / "store"))


def evaluated(store: storage.Store, **request: Any) -> list[dict[str, Any]]:
    with Progress(quiet=True) as progress:
        return evaluate(store, EvaluateRequest(RUN_ID, **request), progress)


STREAM = f"evaluate-held_out-{RUN_ID}"


@pytest.mark.parametrize("iteration", [1, None])
def test_a_stored_policy_samples_and_scores_what_it_did_in_training(
    store: storage.Store, iteration: int | None
):
    version = 2 if iteration is None else iteration
    within = store.read("evaluations", run_id=RUN_ID, iteration=version)
    outside = evaluated(store, iteration=iteration)
    assert [[row[c] for c in SCORES] for row in outside] == [
        [row[c] for c in SCORES] for row in within
    ]
    assert sampled(store, STREAM, version) == sampled(store, RUN_ID, version)


def sampled(store: storage.Store, stream: str, version: int) -> dict[str, Any]:
    """Ids and log-probs of the evaluation's completions by prompt."""
    rollouts = store.read("rollouts", run_id=stream, iteration=version)
    prompts = {r["event_id"]: r["prompt_id"] for r in rollouts if r["role"] == "evaluation"}
    return {
        prompts[t["rollout_id"]]: (t["completion_ids"], t["sampler_logprobs"])
        for t in store.read("rollout_tokens", run_id=stream, iteration=version)
        if t["rollout_id"] in prompts
    }


def test_the_training_run_gets_no_event(store: storage.Store):
    before, opened = fingerprint(store), store.read("runs", run_id=RUN_ID)
    evaluated(store)
    assert (fingerprint(store), store.read("runs", run_id=RUN_ID)) == (before, opened)
    runs = store.read("runs", run_id=STREAM)
    assert [(r["what"], r["kind"], r["parent_run_id"], r["parent_iteration"]) for r in runs] == [
        ("opened", "evaluate", RUN_ID, 2), ("finished", "evaluate", RUN_ID, 2),
    ]  # fmt: skip
    digests = {r["policy_digest"] for r in store.read("rollouts", run_id=STREAM)}
    assert digests == {store.read("policies", run_id=RUN_ID)[-1]["policy_digest"]}


def test_what_is_evaluated_already_is_answered_from_the_log(store: storage.Store):
    first = evaluated(store, prompts=3, name="few")
    head = store.head()
    assert evaluated(store, prompts=3, name="few") == first
    assert store.head() == head
    assert {row["num_prompts"] for row in first} == {3}


def test_a_name_stands_for_one_number_of_prompts(store: storage.Store):
    evaluated(store, prompts=3, name="few")
    with pytest.raises(ConfigError, match=r"named 'few' .* another number of prompts than 4"):
        evaluated(store, prompts=4, name="few")


def test_several_policies_share_the_stream_of_a_name(store: storage.Store):
    for iteration in (2, 0):
        evaluated(store, iteration=iteration)
    rows = store.read("evaluations", run_id=STREAM)
    assert {row["iteration"] for row in rows} == {0, 2}


def test_an_evaluation_that_was_stopped_goes_on(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls, sample = [], flows.generation._sample

    def stopped(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*arguments)

    other = storage.open(shutil.copytree(store.path, tmp_path / "other"))
    evaluated(other)
    with monkeypatch.context() as patch:
        patch.setattr(flows.generation, "_sample", stopped)
        with pytest.raises(KeyboardInterrupt):
            evaluated(store)
    assert len(store.read("rollouts", run_id=STREAM)) == 4  # one batch of the six prompts
    evaluated(store)
    assert fingerprint(store, STREAM) == fingerprint(other, STREAM)
    assert not storage.verify(store, deep=True)


def refused(store: storage.Store, message: str, **request: Any) -> None:
    head = store.head()
    with pytest.raises((storage.StorageError, ConfigError), match=message):
        evaluated(store, **request)
    assert store.head() == head


def test_what_cannot_be_evaluated_is_refused_and_writes_nothing(store: storage.Store):
    refused(store, r"no policy in iteration 7: expected one of 0 to 2", iteration=7)
    refused(store, r"expected 1 to 6 prompts, .* came 7", prompts=7)
    refused(store, r"name 'Held out': expected at most 40", name="Held out")
    policy = store.read("policies", run_id=RUN_ID, iteration=1)[0]
    store.artifacts.delete(policy["adapter_artifact"])
    refused(store, r"artifact `adapter-.*` is not in .*it was never stored", iteration=1)


def test_an_evaluation_is_no_training_run(store: storage.Store):
    evaluated(store)
    with pytest.raises(storage.StorageError, match="expected a training run"):
        stored_config(store, STREAM)


def test_the_command_prints_one_line_per_scorer(store: storage.Store):
    arguments = ["evaluate", RUN_ID, "--iteration", "1", "--store", str(store.path)]
    shown = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    answer = json.loads(shown.stdout)
    assert (answer["stream"], len(answer["evaluations"])) == (STREAM, 1)
    table = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout.splitlines()
    assert table[1].split()[:3] == ["name", "scorer", "scorer_version"]
    assert "of them 0.0 of reviews" in table[-1]
    assert "rrl_core.tasks.dense:share_of_digits" in table[3]


def test_an_unknown_run_is_refused(store: storage.Store):
    with Progress(quiet=True) as progress, pytest.raises(storage.StorageError, match="no run 'x'"):
        evaluate(store, EvaluateRequest("x"), progress)


def test_policies_of_an_offline_run_are_evaluated(store: storage.Store):
    offline = ("run.mode=offline", "run.iterations=1", "evaluation.every=off", "sampler.prompts=2",
               "offline.samples=8", "learner.steps=4",
               "offline.query=select event_id as rollout_id from rollouts")  # fmt: skip
    run_here(store.path, smoke_config(*offline), "offline-run")
    with Progress(quiet=True) as progress:
        rows = evaluate(store, EvaluateRequest("offline-run", 1), progress)
        assert evaluate(store, EvaluateRequest("offline-run", 1), progress) == rows
        evaluate(store, EvaluateRequest("offline-run", 0), progress)
    assert {row["num_prompts"] for row in rows} == {6}


def test_a_key_that_came_with_an_upgrade_refuses_no_name(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    def older(self: RunConfig) -> str:
        return json.dumps(self.model_dump(mode="json", exclude={"offline"}))

    with monkeypatch.context() as patch:
        patch.setattr(RunConfig, "to_json", older)
        evaluated(store, iteration=1)
    assert evaluated(store, iteration=2)


def test_an_evaluation_that_fails_says_so_in_its_stream(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments: Any) -> None:
        raise ValueError("no more")

    monkeypatch.setattr(flows.generation, "_sample", broken)
    with pytest.raises(ValueError, match="no more"):
        evaluated(store)
    run = store.read("runs", run_id=STREAM)[-1]
    assert (run["what"], run["reason"], run["kind"]) == (
        "failed", "ValueError: no more", "evaluate",
    )  # fmt: skip
