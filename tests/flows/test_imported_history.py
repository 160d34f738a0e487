"""Imported history is judged again, searched, gone back to as states and trajectories."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.auditing import audit
from flows.config import ConfigError
from flows.progress import Progress
from flows.rescoring import RescoreRequest, rescore
from flows.wiring import model_spec
from rrl_core.policy.model import Policy, load_policy_model
from tests.flows.conftest import RUN_ID, replay_config, run_here
from tests.flows.test_rescore_value import make_model, publish, write_run
from tests.importers.imported import ask, import_here, write_lines

IMPORT = "outside"
REWARD = "rrl_core.tasks.dense:contains_digit"
CONFIG = (f"replay.imports=['{IMPORT}']", "run.iterations=3", "evaluation.every=off")
DECLARED = {"name": IMPORT, "task": "arithmetic", "model": "tiny", "temperature": 1.0}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy_model(model_spec(replay_config()), seed=0)


def episodes(policy: Policy, text: str, num: int = 2, with_tokens: bool = True) -> list[Row]:
    """`num` responses to each prompt of the smoke task, as verifiers writes them.

    Log-probs of -0.5 a token stand for those of another sampler.
    """
    from rrl_core.tasks.registry import build_task

    task = build_task("arithmetic", {"reward": REWARD, "num_train": 12, "num_eval": 6})
    lines = []
    for prompt in task.prompts("train"):
        asked = [dict(m) for m in prompt.messages]
        for n in range(num):
            said = [{"role": "assistant", "content": f"{text}{n}"}]
            ids = policy.tokenizer.encode(f"{text}{n}", add_special_tokens=False)
            tokens = {
                "prompt_ids": policy.encode(prompt.messages), "completion_ids": ids,
                "completion_logprobs": [-0.5] * len(ids),
            }  # fmt: skip
            step = {"prompt": asked, "completion": said, "tokens": tokens if with_tokens else None}
            lines.append({
                "example_id": prompt.prompt_id, "prompt": asked, "completion": said,
                "answer": prompt.answer, "reward": 1.0, "is_truncated": False,
                "trajectory": [step],
            })  # fmt: skip
    return lines


def import_episodes(store: storage.Store, folder: Path, lines: list[Row], **facts: Any) -> None:
    path = write_lines(folder / "results.jsonl", lines)
    import_here(store, "verifiers", path, **DECLARED | facts)


def rescore_import(store: storage.Store, scorer: str = REWARD) -> Any:
    with Progress(quiet=True) as progress:
        return rescore(store, RescoreRequest(scorer, run_id=IMPORT), progress)


def differences(store: storage.Store, config: Any) -> list[str]:
    return [str(d) for audited in audit(store, RUN_ID, config) for d in audited.differences]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> storage.Store:
    """A run that goes back to an import as well; its responses have lines to be cut after."""
    path = tmp_path_factory.mktemp("hybrid")
    store = storage.open(path / "store", create=True)
    import_episodes(store, path, episodes(policy, "no idea.\nor is it\n"))
    assert rescore_import(store).scores == {"ok": 24}
    config = replay_config(*CONFIG, 'replay.units=["state"]')
    return run_here(path / "store", config)


def test_the_states_of_an_import_are_continued_by_the_policy(hybrid: storage.Store):
    states = [s for s in hybrid.read("states", run_id=RUN_ID) if s["source_run_id"] == IMPORT]
    assert {s["prompt_id"] for s in states} <= {
        r["prompt_id"] for r in hybrid.read("rollouts", run_id=RUN_ID) if r["role"] == "attempt"
    }
    assert max(Counter((s["rollout_id"], s["prefix_tokens"]) for s in states).values()) == 1
    picks = {
        p["entry_id"]: p for p in hybrid.read("picks", run_id=RUN_ID)
        if p["source_run_id"] == IMPORT
    }  # fmt: skip
    continued = [r for r in hybrid.read("rollouts") if r["parent_id"] in picks]
    assert {r["role"] for r in continued} == {"continuation"}
    assert len(continued) >= 4
    assert not storage.verify(hybrid, deep=True)


def test_a_run_that_goes_back_to_an_import_is_derived_again(hybrid: storage.Store):
    assert differences(hybrid, replay_config(*CONFIG, 'replay.units=["state"]')) == []
