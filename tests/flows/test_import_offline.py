"""What another framework rolled out with token ids and log-probs is learned from offline."""

import json
from pathlib import Path
from typing import Any

import pytest

import storage
from tests.flows.conftest import run_here, smoke_config
from tests.flows.test_offline import adapters, differences, learn, offline_config
from tests.importers.imported import import_here, write_lines

QUERY = "offline.query=select rollout_id from judged_rollouts where role = 'imported'"
Row = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attempts of a run in another store, as verifiers writes them with trajectories."""
    path = tmp_path_factory.mktemp("source")
    overrides = ["sampler.engine=fake", "sampler.max_tokens=4", "evaluation.every=off",
                 "run.iterations=1", "task.reward=rrl_core.tasks.dense:contains_digit"]  # fmt: skip
    source = run_here(path / "store", smoke_config(*overrides))
    prompts = {row["prompt_id"]: row for row in source.read("prompts")}
    tokens = {row["rollout_id"]: row for row in source.read("rollout_tokens")}
    rewards = {row["target_id"]: row["value"] for row in source.read("scores")}
    lines = []
    for rollout in source.read("rollouts"):
        if rollout["role"] != "attempt":
            continue
        prompt, ids = prompts[rollout["prompt_id"]], tokens[rollout["event_id"]]
        asked = json.loads(prompt["messages_json"])
        said = [{"role": "assistant", "content": rollout["completion"]}]
        step = {"prompt": asked, "completion": said, "tokens": {
            "prompt_ids": ids["prompt_ids"], "completion_ids": ids["completion_ids"],
            "completion_logprobs": ids["sampler_logprobs"],
        }}  # fmt: skip
        lines.append({
            "example_id": rollout["prompt_id"], "prompt": asked, "completion": said,
            "answer": prompt["answer"], "reward": rewards[rollout["event_id"]],
            "trajectory": [step],
        })  # fmt: skip
    return write_lines(path / "results.jsonl", lines)


def reasons(store: storage.Store) -> dict[str, int]:
    [plan] = store.read("replay_plans")
    found: dict[str, int] = json.loads(plan["reasons_json"])["trajectory"]
    return found


def test_an_offline_run_learns_from_an_import(results: Path, tmp_path: Path):
    """16 attempts of 4 prompts; told whose they are, they are all the run learns from."""
    store = storage.open(tmp_path / "store", create=True)
    done = import_here(
        store, "verifiers", results, task="arithmetic", model="tiny", temperature=1.0
    )
    assert (done.num_rollouts, done.num_token_rollouts) == (16, 16)
    config = offline_config(QUERY, "run.iterations=1")
    assert learn(store, config) == "finished"
    assert reasons(store) == {"usable": 16}
    assert len(set(adapters(store, "offline-run"))) == 2
    assert {row["source_run_id"] for row in store.read("replays")} == {done.stream_id}
    assert differences(store, "offline-run", config) == []


def test_what_nobody_knows_about_an_import_is_why_it_is_left_out(results: Path, tmp_path: Path):
    """The first reason counts: task, then temperature, then base model."""
    store = storage.open(tmp_path / "store", create=True)
    import_here(store, "verifiers", results)
    import_here(store, "verifiers", results, task="arithmetic")
    import_here(store, "verifiers", results, task="arithmetic", temperature=1.0)
    with pytest.raises(storage.QueryError, match="16 greedy, 16 no_policy, 16 other_task"):
        learn(store, offline_config(QUERY, "run.iterations=1"))


def test_prompts_of_an_import_are_those_of_the_task(results: Path, tmp_path: Path):
    store = storage.open(tmp_path / "store", create=True)
    import_here(store, "verifiers", results, task="arithmetic", temperature=1.0)
    named = {json.loads(line)["example_id"] for line in results.read_text().split("\n") if line}
    assert {row["prompt_id"] for row in store.read("prompts")} == named
