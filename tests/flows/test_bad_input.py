"""Bad input to `rrl train`: a clear message, exit code 2, and no run in the store."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import storage
from flows.cli import main


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str]]:
    """`rrl train ARGUMENTS` in this process: exit code and stderr, a traceback included."""

    def run(*arguments: str) -> tuple[object, str]:
        command = ["rrl", "train", *arguments, "--orchestrator", "none"]
        monkeypatch.setattr(sys, "argv", [*command, "--store", str(tmp_path / "store")])
        with pytest.raises(SystemExit) as end:  # any other error fails the test with its traceback
            main()
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora.target_modules=nonsense", "target_modules"),
        ("model.device=cuda", "found none; use 'auto' or 'cpu'"),
        ("sampler.temperature=0.005", "`sampler.temperature`"),
        ("evaluation.temperature=0.001", "`evaluation.temperature`"),
        ("evaluation.max_tokens=1000", "`evaluation.max_tokens`"),
        ("learner.learning_rate=inf", "`learner.learning_rate`"),
        ("run.seed=99999999999999999999999", "`run.seed`"),
    ],
)
def test_a_wrong_key_is_named(
    override: str, message: str, tmp_path: Path, train: Callable[..., tuple[object, str]]
):
    if "cuda" in override and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    code, shown = train("smoke", "--set", override)
    assert code == 2, shown
    assert message in shown
    assert not (tmp_path / "store").exists() or storage.open(tmp_path / "store").head().number == 0


def test_a_folder_that_is_no_model_is_named(
    tmp_path: Path, train: Callable[..., tuple[object, str]]
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code, shown = train("smoke", "--set", f"model.name={tmp_path / 'model'}")
    assert code == 2, shown
    assert str(tmp_path / "model") in shown


def test_a_dry_run_of_a_resumed_run_is_refused(train: Callable[..., tuple[object, str]]):
    code, shown = train("--resume", "x", "--dry-run")
    assert code == 2
    assert "leave out `--resume`" in shown
