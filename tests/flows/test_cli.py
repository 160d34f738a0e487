"""Bad input ends in one clear line on stderr and a meaningful exit code; nothing is written."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.cli import EXIT_CODES, main
from tests.flows.conftest import run_here, smoke_config

Result = tuple[Any, str, str]

ROOT = Path(__file__).resolve().parents[2]
BAD_INPUT = [
    (["train", "nothing"], "no configuration at nothing"),
    (["train"], "expected a configuration or `--resume RUN`"),
    (["train", "smoke", "--set", "learner.lr=1"], "unknown key `learner.lr`"),
    (["train", "smoke", "--set", "task.name=chess"], "expected a task among"),
    (["train", "smoke", "--set", "task.colour=red"], "task `arithmetic`, parameter `colour`"),
    (["train", "smoke", "--set", "model.name=no/such-model"], "no/such-model"),
    (["train", "smoke", "--set", "sampler.prompts=13"], "use fewer prompts per iteration"),
    (["train", "smoke", "--run-id", "A B"], "expected at most 100 of a-z"),
    (["train", "--resume", "nobody"], "no run 'nobody'"),
    (["train", "smoke", "--resume", "nobody"], "leave out CONFIG"),
    (["sql", "drop table rollouts"], "expected"),
    (["export", "sft"], "expected `rrl export sft --query SQL --output FILE`"),
    (["deploy", "--only", "evaluat"], "--only evaluat: expected one of train, "),
    (["show", "ro00000"], "`rrl runs` lists the runs"),
]


@pytest.fixture
def rrl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Result]:
    """`rrl ARGUMENTS` in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["rrl", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return end.value.code, output.out, output.err

    return run


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=lambda x: str(x)[:40])
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], message: str, rrl: Callable[..., Result], tmp_path: Path
):
    storage.open(tmp_path / "rrl-data", create=True)
    orchestrator = ["--orchestrator", "none"] if arguments[0] == "train" else []
    code, _, shown = rrl(*arguments, *orchestrator)
    assert code == 2
    assert message in shown
    assert storage.open(tmp_path / "rrl-data").head().number == 0


def test_verify_names_what_is_damaged(rrl: Callable[..., Result], tmp_path: Path):
    store = run_here(tmp_path / "store", smoke_config("run.iterations=1"))
    segment = next((store.path / "events" / "rollouts").rglob("*.parquet"))
    segment.chmod(0o644)
    segment.write_bytes(segment.read_bytes()[:-50])
    code, shown, _ = rrl("verify", "--deep", "--store", "store")
    assert code == 3
    assert segment.name in shown


def test_every_error_of_storage_has_an_exit_code():
    errors = {n for n in storage.__all__ if n.endswith("Error")}
    assert errors <= set(EXIT_CODES)


def test_every_error_of_the_packages_has_an_exit_code():
    paths = [p for name in ("flows", "rrl_core") for p in (ROOT / name).rglob("*.py")]
    found = {e for p in paths for e in re.findall(r"^class (\w+Error)\(", p.read_text(), re.M)}
    assert {"BundleError", "CriticError", "RescoreError", "JudgeError"} < found <= set(EXIT_CODES)
