"""docs/import.md names what there is, and its question has an answer."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import storage
from flows.cli import main
from rrl_core.tasks.registry import build_task
from storage.export_rollouts import SHAPES
from storage.importers.formats import FORMATS
from tests.importers.imported import ask, import_here, verl_line, write_lines

DOC = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")


def test_the_guide_names_every_format_and_shape():
    formats, export = DOC.split("## Export")
    assert re.findall(r"^\| `([\w-]+)` \|", formats.split("## Once")[0], re.M) == [*FORMATS]
    assert re.findall(r"^\| `(\w+)` \|", export, re.M) == [*SHAPES, "sft"]


def test_its_question_tells_what_was_imported(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "1.jsonl", [verl_line(0), "{", verl_line(1)])
    import_here(store, "verl", path)
    [question] = re.findall(r"```sql\n(.*?)```", DOC, re.S)
    assert ask(store, question) == [(str(path), 3, 2, 0, 1)]


def test_its_commands_judge_search_and_export_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Twelve responses to three prompts; those with 1, 10 and 11 are found by their words."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "rollouts"
    folder.mkdir(parents=True)
    write_lines(folder / "1.jsonl", [verl_line(n, gts=str(n // 4 + 1)) for n in range(12)])
    used = DOC.split("## What imported history")[1]
    [commands] = re.findall(r"```sh\n(.*?)```", used, re.S)
    said = []
    for command in commands.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, command
        said.append(capsys.readouterr().out)
    assert [said[2].count(f"#### {n}") for n in (1, 2)] == [3, 0]
    store = storage.open(tmp_path / "rrl-data")
    rewards = "select sum(value) from scores where scorer = 'final_number'"
    assert ask(store, rewards) == [(1.0,)]  # n answers n // 4 + 1, which is right for n = 1
    task = build_task("jsonl", {"path": "problems.jsonl", "eval_fraction": 0})
    imported = {row["prompt_id"] for row in store.read("prompts")}
    assert {prompt.prompt_id for prompt in task.prompts("train")} == imported
    assert len(imported) == 3
