"""Scoring beside generation: the same events as one after the other, a bad item costs itself."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.config import RunConfig, load_config
from rrl_core.sampling.protocol import SampleRequest
from rrl_core.tasks import scoring_pool
from rrl_core.tasks.protocol import Judgement
from rrl_core.tasks.scoring_pool import Asked, ScoringPool
from tests.flows.conftest import RUN_ID, fingerprint, replay_config, run_here
from tests.flows.scripted import run_script, script, scripted_config

WAIT_S = 60  # at most, where something is wrong
COMPARED = ("rollouts", "scores", "retries", "reviews", "replays", "updates", "policies")


def smoke_review(*overrides: str) -> RunConfig:
    changes = ["tracking.mlflow=false", "run.iterations=2", "evaluation.every=2", *overrides]
    return load_config(Path("smoke-review"), changes)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Asked]]:
    """What is begun early, what is asked for, and each judgement, in order."""
    seen: dict[str, list[Any]] = {"begun": [], "asked": [], "judged": []}
    begin, judge, judge_one = ScoringPool.begin, ScoringPool.judge, scoring_pool.judge_one

    def noted_begin(self: ScoringPool, asked: Asked) -> None:
        seen["begun"].append(asked)
        begin(self, asked)

    def noted_judge(
        self: ScoringPool, scorer: Any, asked: list[Asked], *facts: Any
    ) -> list[Judgement]:
        seen["asked"] += asked
        return judge(self, scorer, asked, *facts)

    def noted_judge_one(*arguments: Any) -> Judgement:
        seen["judged"].append(arguments)
        return judge_one(*arguments)

    monkeypatch.setattr(ScoringPool, "begin", noted_begin)
    monkeypatch.setattr(ScoringPool, "judge", noted_judge)
    monkeypatch.setattr(scoring_pool, "judge_one", noted_judge_one)
    return seen


@pytest.mark.parametrize(
    "config_of",
    [lambda *overrides: replay_config("run.iterations=3", *overrides), smoke_review],
    ids=["replay", "review"],
)
def test_the_same_events_beside_generation_as_after_it(
    config_of: Callable[..., RunConfig], pool: dict[str, list[Asked]], tmp_path: Path
):
    reward = "task.reward=tests.flows.rewards:contains_digit"
    beside = run_here(tmp_path / "beside", config_of(reward))
    # Everything that was asked for had been begun, nothing else was, and nothing was judged twice.
    assert pool["begun"]
    assert sorted(asked.key for asked in pool["begun"]) == sorted(a.key for a in pool["asked"])
    assert len(pool["judged"]) == len(pool["asked"])
    after = run_here(tmp_path / "after", config_of(reward, "task.reward_time_limit_s=off"))
    expected = fingerprint(after, tables=COMPARED)
    assert expected["retries"] or expected["reviews"]
    assert len(expected["scores"]) >= len(pool["begun"])
    assert fingerprint(beside, tables=COMPARED) == expected


def test_a_completion_is_judged_while_the_next_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_judged = threading.Event()
    judge_one = scoring_pool.judge_one
    asked: list[SampleRequest] = []

    def noted(*arguments: Any) -> Judgement:
        judged = judge_one(*arguments)
        is_judged.set()
        return judged

    def answer(version: int, request: SampleRequest) -> str:
        asked.append(request)
        if len(asked) == 2:
            assert is_judged.wait(WAIT_S)
        return "7"

    monkeypatch.setattr(scoring_pool, "judge_one", noted)
    config = scripted_config("run.iterations=1")
    store = run_script(tmp_path / "store", config, answer, monkeypatch)
    assert is_judged.is_set()
    assert {row["value"] for row in store.read("scores", iteration=1)} == {1.0}


def test_who_hangs_or_ends_its_process_costs_one_score_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[SampleRequest] = []

    def answer(version: int, request: SampleRequest) -> str:
        asked.append(request)
        return {3: "hang", 10: "end"}.get(len(asked), "x" * (len(asked) % 5))

    script(answer, monkeypatch)
    limits = ("task.reward=tests.tasks.tiny_reward:obey", "task.reward_time_limit_s=1")
    store = run_here(tmp_path / "store", scripted_config("run.iterations=1", *limits))
    scores = store.read("scores", run_id=RUN_ID, iteration=1)
    assert Counter(row["status"] for row in scores) == {"ok": 30, "timeout": 1, "scorer_error": 1}
    texts = {row["event_id"]: row["completion"] for row in store.read("rollouts", iteration=1)}
    for row in scores:
        if row["status"] == "ok":
            assert row["value"] == len(texts[row["target_id"]])
        else:
            assert (
                texts[row["target_id"]] == {"timeout": "hang", "scorer_error": "end"}[row["status"]]
            )
    assert not storage.verify(store, deep=True)
