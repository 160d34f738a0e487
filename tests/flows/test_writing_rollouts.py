"""Texts under constraints in a run, judged again by a language model."""

import json
from pathlib import Path

import pytest

import rrl_core.tasks.judge
import storage
from rrl_core.sampling.protocol import SampleRequest
from tests.flows.conftest import RUN_ID, run_here
from tests.flows.histories import rescore_here
from tests.flows.scripted import script, scripted_config
from tests.tasks.test_judge import serve, write_judge

TEXT = "Today we came home and <<score: {}>> that was all we had."


def verdict(version: int, request: SampleRequest) -> str:
    """A text that tells the server of the test what to answer."""
    return TEXT.format(request.seed % 3 * 5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    config = scripted_config(
        "task.name=writing", "task.num_eval=2", "task.reward=constraints", "run.iterations=1",
        "sampler.prompts=2", "sampler.group_size=3", "task.num_train=2", "sampler.max_tokens=64",
        "sampler.context_tokens=1024", "replay.units=[]",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        script(verdict, patch)
        return run_here(tmp_path_factory.mktemp("writing") / "store", config)


def test_a_language_model_judges_what_constraints_cannot(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rrl_core.tasks.judge, "RETRY_PAUSE_S", 0.0)
    rewards = {row["target_id"]: row for row in store.read("scores", run_id=RUN_ID)}
    assert {row["scorer"] for row in rewards.values()} == {"constraints"}
    template = "Is this well written?\n$prompt\n---\n$completion"
    with serve() as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        judge = write_judge(tmp_path, url, template=template)
        done = rescore_here(store, f"judge:{judge}", run_id=RUN_ID)
        asked = [body["messages"][0]["content"] for _, _, body in server.requests]
    assert done.scores == {"ok": 6}
    rollouts = {row["event_id"]: row for row in store.read("rollouts", run_id=RUN_ID)}
    for row in store.read("scores", run_id=str(done.stream_id)):
        completion = rollouts[row["target_id"]]["completion"]
        answered = float(completion.split("<<score: ")[1].split(">>")[0])
        assert (row["kind"], row["value"]) == ("judge", answered / 10)
        assert any(text.endswith(f"---\n{completion}") for text in asked)
        assert rewards[row["target_id"]]["value"] is not None  # the reward stays what it was
    assert all("Write a" in text or "Write the opening" in text for text in asked)


def test_a_component_for_each_constraint_stands_in_the_log(store: storage.Store):
    prompts = {row["prompt_id"]: row for row in store.read("prompts", run_id=RUN_ID)}
    rollouts = {row["event_id"]: row for row in store.read("rollouts", run_id=RUN_ID)}
    for row in store.read("scores", run_id=RUN_ID):
        prompt = prompts[rollouts[row["target_id"]]["prompt_id"]]
        constraints = json.loads(json.loads(prompt["meta_json"])["constraints"])
        parts = json.loads(row["components_json"])
        assert parts.keys() == {*constraints, "prose"}
        assert "words" in parts
