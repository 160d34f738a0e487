"""docs/integrations.md says how a trainer is recorded: its code runs."""

import re
from pathlib import Path

import pytest

from tests.integrations.trl_runs import chance, make_trainer

DOC = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


@pytest.mark.slow
def test_the_code_of_the_document_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    given = make_trainer(tmp_path / "trl", max_steps=2)
    names = {
        "model": given.model, "tokenizer": given.processing_class, "args": given.args,
        "dataset": given.train_dataset, "reward": chance,
    }  # fmt: skip
    exec(first, names)
    assert "mean_reward" in capsys.readouterr().out
    names["trainer"] = given
    exec(second, names)
    given.train()
    assert {row["kind"] for row in names["store"].read("runs")} == {"recorded"}
    assert len(names["store"].view("run_overview")) == 2
