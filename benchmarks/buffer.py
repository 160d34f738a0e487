"""Ask a long run's history what it can replay: the bar is half a second at 100,000 rollouts.

A store with one run (see `buffer_data.py`) is asked compacted, and its buffer also as the run left
it, with thousands of small segments. Segments are hashed before anything is timed, as a run has
done it at its first pin. A figure is the median of the askings, the answer held in memory.

    python benchmarks/buffer.py [--json] [--iterations N] [--keep FOLDER]

Exit code 1: the buffer of the compacted store takes longer than the bar.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from buffer_data import RUN_ID, VERSIONS, build_store, compact
from common import machine_facts, print_machine, print_table
from rich.console import Console

import storage
from flows.config import load_config
from flows.replaying import Pin, decide

BAR_S = 0.5
BUFFER, DECIDE = "replay_buffer", "facts and picks of an iteration"
NUM_ANSWERS, NUM_SMALL_ANSWERS = 7, 3
QUESTIONS = {
    BUFFER: "from replay_buffer",
    "replay_buffer of the run": "from replay_buffer($number, run := $run)",
    "replay_buffer, all judged": "from replay_buffer($number, version := $oldest)",
    "replay_buffer, no model": "from replay_buffer($number, version := 'none')",
    "forgetting": "from forgetting",
    "value_drift": "from value_drift",
    "replay_audit": "from replay_audit",
}


def ask(path: Path, questions: list[str], num_answers: int) -> dict[str, Any]:
    """Return the median seconds of each question to a store, and how many rows it answers."""
    store = storage.open(path)
    given = {"number": store.head().number, "run": RUN_ID, "oldest": VERSIONS[0]}
    found: dict[str, Any] = {}
    for name in questions:
        query = QUESTIONS[name]
        params = {key: value for key, value in given.items() if f"${key}" in query}
        num_rows = len(store.sql(query, params))
        seconds = []
        for _ in range(num_answers):
            started = time.perf_counter()
            store.sql(query, params)
            seconds.append(time.perf_counter() - started)
        found[name] = {"seconds": statistics.median(seconds), "num_rows": num_rows}
    found[DECIDE] = decide_seconds(store, num_answers)
    live = store.log.refresh().segments.values()
    return {"num_segments": len(live), "questions": found}


def decide_seconds(store: storage.Store, num_answers: int) -> dict[str, Any]:
    """Return the median seconds of what an iteration does before it samples: facts and picks."""
    config = load_config(Path("rrl-arithmetic"), ["run.iterations=10000", "value.every=off"])
    pin = Pin(store.head().number, VERSIONS[1])
    iteration = 1 + max(row["iteration"] for row in store.read("views_pinned", run_id=RUN_ID))
    seconds = []
    for _ in range(num_answers):
        started = time.perf_counter()
        decided = decide(store, RUN_ID, config, iteration, pin)
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds), "num_rows": len(decided.picks)}


def stores(folder: Path, num_iterations: int) -> tuple[Path, Path]:
    """Return the stores, written unless they are there: as the run left it, and compacted."""
    small, compacted = (folder / f"{name}-{num_iterations}" for name in ("small", "compacted"))
    if not compacted.exists():
        shutil.rmtree(small, ignore_errors=True)
        build_store(small, num_iterations)
        copy = folder / f"copy-{num_iterations}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(small, copy)
        compact(storage.open(copy))
        copy.rename(compacted)
    return small, compacted


def show(result: dict[str, Any]) -> None:
    """Print the medians and the verdict."""
    console = Console()
    print_machine(console, result["machine"])
    rows = [
        (f"{name}, {of['num_segments']} segments", 1e3 * found["seconds"], f"{found['num_rows']:,}")
        for of in result["stores"]
        for name, found in of["questions"].items()
    ]
    title = f"{result['num_iterations']} iterations of 128 rollouts with 4 states each"
    print_table(console, title, ["", "ms", "rows"], rows)
    console.print(f"bar {1e3 * BAR_S:.0f} ms: {'pass' if result['pass'] else 'MISSED'}")


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--iterations", type=int, default=780, help="of the run")
    parser.add_argument("--keep", help="folder that keeps the stores for the next run")
    parser.add_argument("--threads", type=int, default=2, help="CPUs to use")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    common.PACKAGES = ("duckdb", "pyarrow")
    result: dict[str, Any] = {"machine": machine_facts(arguments.threads)}
    with tempfile.TemporaryDirectory(prefix="rrl-benchmark-") as temporary:
        folder = Path(arguments.keep or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        small, compacted = stores(folder, arguments.iterations)
        found = ask(compacted, list(QUESTIONS), NUM_ANSWERS)
        result["stores"] = [found, ask(small, [BUFFER], NUM_SMALL_ANSWERS)]
    passed = found["questions"][BUFFER]["seconds"] <= BAR_S
    result |= {"num_iterations": arguments.iterations, "pass": passed}
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
