"""The task `gsm8k`, on the whole data set where it stands beside the checkout."""

import json
import sys
import types
from pathlib import Path

import pytest

from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import score_all

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k"
needs_gsm8k = pytest.mark.skipif(
    not GSM8K.is_dir(), reason="GSM8K is not at ../shared/data/gsm8k beside the checkout"
)

ROWS = {
    "train": [{"question": "2 + 3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}],
    "test": [
        {"question": " 800 + 400? ", "answer": "<<800+400=1200>>\n#### 1,200"},
        {"question": "1 + 1 + 1?", "answer": "<<1+1=2>> <<2+1=3>> <<3=3>>\n#### 3"},
    ],
}


@pytest.fixture
def folder(tmp_path):
    for split, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    return tmp_path


def solutions() -> list[str]:
    lines = (GSM8K / "test.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["answer"] for line in lines if line]


@needs_gsm8k
def test_every_reference_solution_is_right_and_wrong_once_its_number_is_changed():
    task = build_task("gsm8k", {"path": GSM8K, "num_train": 1})
    prompts = task.prompts("eval")
    right = solutions()
    assert len(prompts) == len(right) == 1319
    changed = []
    for solution in right:
        reasoning, _, number = solution.rpartition("#### ")
        changed.append(f"{reasoning}#### {int(number.replace(',', '')) + 1}")
    for scorer in task.scorers:
        assert {score.value for score in score_all(scorer, prompts, right)} == {1.0}
        assert {score.value for score in score_all(scorer, prompts, changed)} == {0.0}


@needs_gsm8k
def test_the_whole_of_gsm8k_has_distinct_ids_that_never_change():
    task = build_task("gsm8k", {"path": GSM8K})
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts) == 7473 + 1319
    assert task.prompts("eval")[0].prompt_id == "p-8d44deafa8c71b3519cc"


def test_the_test_split_is_the_eval_split(folder):
    task = build_task("gsm8k", {"path": str(folder), "instruction": "Go."})
    assert [prompt.messages[0]["content"] for prompt in task.prompts("train")] == ["2 + 3? Go."]
    first, second = task.prompts("eval")
    assert (first.messages[0]["content"], first.answer) == ("800 + 400? Go.", "1,200")
    assert (first.difficulty, second.difficulty) == ("1-2 steps", "3-4 steps")
    assert (first.split, first.task) == ("eval", "gsm8k")


def test_the_first_problems_can_be_taken_alone(folder):
    task = build_task("gsm8k", {"path": folder, "num_eval": 1})
    assert [prompt.answer for prompt in task.prompts("eval")] == ["1,200"]
    assert not build_task("gsm8k", {"path": folder, "num_eval": 0}).prompts("eval")


def test_the_hub_is_used_without_a_path(monkeypatch, folder):
    asked = []

    def load_dataset(hub_id, config, split):
        asked.append((hub_id, config, split))
        return ROWS[split]

    hub = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = build_task("gsm8k", {"hub_id": "someone/gsm8k"})
    assert asked == [("someone/gsm8k", "main", "train"), ("someone/gsm8k", "main", "test")]
    assert task.prompts("eval") == build_task("gsm8k", {"path": folder}).prompts("eval")


def test_without_the_hub_the_message_names_the_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(TaskError, match="set `path` to a folder with train"):
        build_task("gsm8k", {})


def test_a_missing_file_or_another_data_set_is_refused(folder, tmp_path):
    with pytest.raises(TaskError, match=r"expected a JSONL file at .*nowhere/train\.jsonl"):
        build_task("gsm8k", {"path": tmp_path / "nowhere"})
    (folder / "test.jsonl").write_text('{"question": "2 + 3?", "answer": "5"}\n')
    with pytest.raises(TaskError, match=r"test.jsonl:1: expected `question` and an `answer` with"):
        build_task("gsm8k", {"path": folder})


def test_a_test_problem_in_the_training_data_is_refused(folder):
    (folder / "test.jsonl").write_text((folder / "train.jsonl").read_text())
    with pytest.raises(TaskError, match="1 stand in both splits, the first '2 \\+ 3\\?"):
        build_task("gsm8k", {"path": folder})
