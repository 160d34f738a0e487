"""Bad input to `rrl train`: a clear message, exit code 2, and no run in the store."""

import subprocess
import sys
from pathlib import Path

import pytest

import storage

ROOT = Path(__file__).resolve().parent.parent.parent


def train(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "flows.cli", "train", *arguments]
    done = subprocess.run(
        [*command, "--orchestrator", "none", "--store", str(folder / "store")],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


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
def test_a_wrong_key_is_named(override: str, message: str, tmp_path: Path):
    if "cuda" in override and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    code, shown = train(tmp_path, "smoke", "--set", override)
    assert (code, "Traceback" in shown) == (2, False), shown
    assert message in shown
    assert not (tmp_path / "store").exists() or storage.open(tmp_path / "store").head().number == 0


def test_a_folder_that_is_no_model_is_named(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code, shown = train(tmp_path, "smoke", "--set", f"model.name={tmp_path / 'model'}")
    assert (code, "Traceback" in shown) == (2, False), shown
    assert str(tmp_path / "model") in shown


def test_a_dry_run_of_a_resumed_run_is_refused(tmp_path: Path):
    code, shown = train(tmp_path, "--resume", "x", "--dry-run")
    assert code == 2
    assert "leave out `--resume`" in shown
