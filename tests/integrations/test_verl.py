"""verl's call shape: scores come from our scorers, and what was judged is in the log."""

import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.integrations import verl
from flows.integrations.verl import compute_score

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "_logs", {})


def judge(store: Path, text: str, **extra: Any) -> dict[str, float]:
    """Call it as verl's reward managers do: all by keyword."""
    given = {"split": "train", "index": 3, "question": "1 + 1 =", "num_turns": 2} | extra
    return compute_score(
        data_source="sums", solution_str=text, ground_truth="2", extra_info=given,
        store=str(store), reward="final_number",
    )  # fmt: skip


def flush() -> None:
    for log in verl._logs.values():
        log.flush()


def test_scores_are_those_of_our_scorer_with_the_same_keys_for_all(tmp_path: Path):
    right, wrong = judge(tmp_path / "s", "so it is #### 2"), judge(tmp_path / "s", "#### 3")
    unscorable = compute_score(data_source="sums", solution_str="2", ground_truth="two")
    assert right == {"score": 1.0, "is_scored": 1.0, "is_recorded": 1.0}
    assert wrong == {"score": 0.0, "is_scored": 1.0, "is_recorded": 1.0}
    assert unscorable == {"score": 0.0, "is_scored": 0.0, "is_recorded": 0.0}


def test_what_was_judged_is_in_the_log(tmp_path: Path):
    texts = ["#### 2", "#### 3", "#### 2"]
    for text in texts:
        judge(tmp_path / "s", text, global_steps=7)
    judge(tmp_path / "s", "#### 2", split="test", question="0 + 2 =")
    flush()
    store = storage.open(tmp_path / "s")
    [row] = store.view("prompt_history")  # of the attempts
    assert (row["iteration"], row["num_attempts"], row["num_ok"]) == (7, 3, 2)
    rollouts = store.read("rollouts")
    assert [row["completion"] for row in rollouts] == [*texts, "#### 2"]
    assert [row["role"] for row in rollouts] == ["attempt"] * 3 + ["evaluation"]
    assert {row["split"] for row in store.read("prompts")} == {"train", "eval"}
    judged = store.view("judged_rollouts")
    assert [row["num_logprobs"] for row in judged] == [None] * 4
    assert sorted(row["reward"] for row in judged) == [0.0, 1.0, 1.0, 1.0]
    assert storage.verify(store, deep=True) == []


def test_a_log_that_fails_costs_no_score_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(verl, "BATCH_ROLLOUTS", 2)
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "other.txt").write_text("something else")
    with caplog.at_level(logging.ERROR):
        answers = [judge(folder, "#### 2") for _ in range(3)]
    assert [a["score"] for a in answers] == [1.0, 1.0, 1.0]
    assert [a["is_recorded"] for a in answers] == [1.0, 0.0, 0.0]
    assert "2 scores wait in memory" in caplog.text
    (folder / "other.txt").unlink()
    assert judge(folder, "#### 2")["is_recorded"] == 1.0
    assert len(storage.open(folder).read("scores")) == 4


@pytest.mark.slow
def test_what_is_left_is_written_when_the_process_ends(tmp_path: Path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.integrations.test_verl import judge\n"
        "judge(Path(sys.argv[1]), '#### 2')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(storage.open(tmp_path / "s").read("scores")) == 1


def in_child(folder: Path) -> None:
    judge(folder, "#### 2")
    flush()


def test_every_process_writes_a_stream_of_its_own(tmp_path: Path):
    judge(tmp_path / "s", "#### 3")
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(tmp_path / "s",))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    flush()
    store = storage.open(tmp_path / "s")
    assert len({row["run_id"] for row in store.read("rollouts")}) == 2
    assert {row["run_epoch"] for row in store.read("runs")} == {1}  # none took the other's stream
    assert sorted(row["value"] for row in store.read("scores")) == [0.0, 1.0]
