"""`rrl doctor` tells what this machine offers; `rrl init` refuses a folder that holds no store."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage.probe
from flows import machine
from storage.files import Disk
from tests.flows.test_cli import rrl  # noqa: F401 - a fixture

Result = tuple[Any, str, str]


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(self: Disk, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Disk, "link", link)


def test_doctor_tells_what_there_is_and_makes_nothing(
    rrl: Callable[..., Result],  # noqa: F811
    tmp_path: Path,
):
    code, shown, _ = rrl("doctor")
    assert code == 0
    for word in ("Python", "platform", "torch", "vLLM", "GPU", "smollm2-135m", "hard links", "ms"):
        assert word in shown
    assert str(tmp_path / "rrl-data") in shown
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_json(rrl: Callable[..., Result]):  # noqa: F811
    code, shown, _ = rrl("doctor", "--store", "x", "--json")
    found = json.loads(shown)
    assert code == 0
    assert found["is_ok"] is True
    assert found["packages"]["duckdb"] == machine.package_versions()["duckdb"]
    assert {"python", "platform", "has_vllm", "num_gpus", "model_folder", "store"} < set(found)
    assert {"name", "is_ok", "is_needed", "detail"} == set(found["checks"][0])


@pytest.mark.usefixtures("no_links")
def test_a_folder_without_hard_links_is_refused_before_anything_is_made(
    rrl: Callable[..., Result],  # noqa: F811
    tmp_path: Path,
):
    code, _, shown = rrl("init", "--store", "x/store")
    assert code == 2
    assert "hard links" in shown
    assert "--store" in shown
    assert list(tmp_path.iterdir()) == []
    code, shown, _ = rrl("doctor", "--store", "x/store")
    assert code == 1
    assert "FAILED" in shown
    code, shown, _ = rrl("doctor", "--json")
    assert (code, json.loads(shown)["is_ok"]) == (1, False)


def test_too_little_space_is_a_warning(
    rrl: Callable[..., Result],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(storage.probe, "MIN_FREE_BYTES", 2**70)
    code, shown, _ = rrl("doctor")
    assert code == 0
    assert "warning" in shown
    assert rrl("init")[0] == 0


def test_devices_are_counted_by_their_files(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine.num_gpus(tmp_path) == 2
    assert machine.num_gpus(tmp_path / "none") == 0


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 1)
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": "2.13.0+cpu"})
    assert "built without CUDA" in dict(machine.machine().lines())["GPU"]
