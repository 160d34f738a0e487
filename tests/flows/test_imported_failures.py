"""Failures of an import are reviewed, so that what helps with them enters memory."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.auditing import audit
from flows.config import ConfigError, load_config
from flows.wiring import stored_config
from tests.flows.conftest import RUN_ID, run_here
from tests.flows.scripted_reviews import WRONG, scripted_run, write_problems
from tests.flows.test_imported_history import IMPORT, rescore_import
from tests.importers.imported import import_here, write_lines

Row = dict[str, Any]
MINED = (
    f"review.imports=['{IMPORT}']", "review.imported=2", "run.iterations=4", "evaluation.every=off",
)  # fmt: skip
REWARD = "tests.flows.scripted_reviews:class_letter"


def answers(problems: Path) -> list[Row]:
    """A failed and a good answer, as text, to each problem and to one that no run knows."""
    known = [json.loads(line) for line in problems.read_text().splitlines()]
    return [
        {
            "example_id": problem["prompt"], "answer": problem["answer"], "reward": 0.0,
            "prompt": [{"role": "user", "content": problem["prompt"]}], "is_truncated": False,
            "completion": [{"role": "assistant", "content": text}],
        }
        for problem in [*known, {"prompt": "class a unknown", "answer": "a"}]
        for text in (WRONG, problem["answer"])
    ]  # fmt: skip


@pytest.fixture(scope="module")
def mined(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run that reviews failures of an import as well as its own."""
    path = tmp_path_factory.mktemp("mined")
    store = storage.open(path / "store", create=True)
    lines = write_lines(path / "results.jsonl", answers(write_problems(path / "problems.jsonl")))
    import_here(store, "verifiers", lines, name=IMPORT, task="jsonl")
    rescore_import(store, REWARD)
    return scripted_run(path / "store", *MINED)


def imported(store: storage.Store) -> dict[str, Row]:
    return {row["event_id"]: row for row in store.read("rollouts", run_id=IMPORT)}


def test_failed_responses_to_prompts_tried_before_are_reviewed_once(mined: storage.Store):
    sources = imported(mined)
    rollouts = mined.read("rollouts", run_id=RUN_ID)
    attempted = {(r["iteration"], r["prompt_id"]) for r in rollouts if r["role"] == "attempt"}
    reviews = [r for r in rollouts if r["role"] == "review" and r["parent_id"] in sources]
    assert set(Counter(r["parent_id"] for r in reviews).values()) == {3}
    per_iteration = Counter(r["iteration"] for r in reviews)
    assert per_iteration == {2: 6, 3: 6, 4: 6}  # nothing was tried before the first
    for review in reviews:
        assert sources[review["parent_id"]]["completion"] == WRONG
        assert (review["iteration"], review["prompt_id"]) not in attempted
        assert any(
            i < review["iteration"] and p == review["prompt_id"] for i, p in attempted
        )  # fmt: skip
    seconds = Counter(r["parent_id"] for r in rollouts if r["role"] == "second_attempt")
    assert all(seconds[r["event_id"]] == 1 for r in reviews)


def test_their_verified_reviews_are_in_memory_and_nothing_of_them_is_distilled(
    mined: storage.Store,
):
    sources = imported(mined)
    entries = [e for e in mined.view("memory") if e["attempt_id"] in sources]
    assert entries
    assert {e["run_id"] for e in entries} == {RUN_ID}
    distilled = mined.read("distillations", run_id=RUN_ID)
    assert distilled
    assert not [row for row in distilled if row["attempt_id"] in sources]
    units = {
        r["unit"] for r in mined.read("replays", run_id=RUN_ID)
        if r["rollout_id"] in {e["second_attempt_id"] for e in entries}
    }  # fmt: skip
    assert units == {"second_attempt"}


def test_they_are_no_gated_prompts_of_the_run(mined: storage.Store):
    for row in mined.view("review_history", run_id=RUN_ID):
        assert row["num_gated"] == row["num_failed_prompts"]


def test_the_audit_chooses_the_same(mined: storage.Store):
    audited = list(audit(mined, RUN_ID, stored_config(mined, RUN_ID)))
    assert [str(d) for a in audited for d in a.differences] == []


def test_imports_without_a_gate_or_of_another_name_are_refused(tmp_path: Path):
    imports = f"review.imports=['{IMPORT}']"
    with pytest.raises(ConfigError, match=r"`review\.imports`.*review\.gate"):
        load_config(Path("smoke"), [imports])
    config = load_config(Path("smoke-review"), ["tracking.mlflow=false", imports])
    with pytest.raises(storage.QueryError, match=r"`review\.imports`.*'outside'"):
        run_here(tmp_path / "store", config)
