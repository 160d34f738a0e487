"""List one step of a very long run: the bar is 100 ms at a million rollouts.

The run has 128 rollouts an iteration, all of them planned and learned from; it is asked compacted.
Listing reads by place and by id, so it must not grow with the history. Beside it, without a bar:
verifying the step, that is deriving its batch again and comparing (the rows are made up, so
differences are found), and reading the rows it compares with their hashes checked, which it waits
for. Both open the store anew. The buffer, which a run that replays derives too, is `buffer.py`'s.

    python benchmarks/audit.py [--json] [--rollouts N] [--keep FOLDER]

Exit code 1: listing takes longer than the bar.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from buffer_data import OPENED, RUN_ID, compact
from buffer_data import plain_iteration as rows_of_iteration
from common import machine_facts, print_machine, print_table
from rich.console import Console

import storage
from flows.auditing import audit, step_samples
from flows.config import load_config

BAR_S = 0.1
PER_ITERATION, PER_APPEND = 128, 128  # rollouts an iteration, iterations an append
NUM_ANSWERS, NUM_VERIFIED = 9, 3
TABLES = ("views_pinned", "rollouts", "scores", "replays", "learned_samples", "updates", "policies",
          "retries")  # fmt: skip


def build(path: Path, num_rollouts: int) -> None:
    """Write a run of so many rollouts and compact it, unless it is there."""
    if path.exists():
        return
    store = storage.open(path, create=True)
    writer = store.open_stream(RUN_ID, OPENED | {"kind": "train"})
    num_iterations = num_rollouts // PER_ITERATION
    for first in range(1, num_iterations + 1, PER_APPEND):
        last = min(first + PER_APPEND - 1, num_iterations)
        tables: dict[str, list[dict[str, Any]]] = {}
        for iteration in range(first, last + 1):
            for name, rows in rows_of_iteration(iteration, PER_ITERATION).items():
                tables.setdefault(name, []).extend(rows)
        writer.append(tables, f"i{first}", closes_iteration=last)
    compact(store)


def measure(path: Path, num_rollouts: int) -> dict[str, Any]:
    """Return the median seconds of opening a store, and of listing and verifying one step of it."""
    num_iterations = num_rollouts // PER_ITERATION
    listed, opened = [], []
    for number in range(NUM_ANSWERS):
        iteration = 1 + number * (num_iterations - 1) // (NUM_ANSWERS - 1)
        started = time.perf_counter()
        store = storage.open(path)
        store.head()
        opened.append(time.perf_counter() - started)
        started = time.perf_counter()
        samples = step_samples(store, RUN_ID, iteration)
        listed.append(time.perf_counter() - started)
        assert len(samples) == PER_ITERATION
    facts, verified = [], []
    config = load_config(Path("demo"))
    for number in range(NUM_VERIFIED):
        iteration = 2 + number * (num_iterations - 2) // NUM_VERIFIED
        started = time.perf_counter()
        store = storage.open(path)
        storage.require_whole(store)
        for name in TABLES:
            store.read(name, run_id=RUN_ID, iteration=iteration)
        facts.append(time.perf_counter() - started)
        started = time.perf_counter()
        [audited] = audit(storage.open(path), RUN_ID, config, [iteration])
        verified.append(time.perf_counter() - started)
        assert (audited.num_planned, audited.num_learned) == (PER_ITERATION, PER_ITERATION)
    laps = {"open_s": opened, "list_s": listed, "facts_s": facts, "verify_s": verified}
    return {name: statistics.median(seconds) for name, seconds in laps.items()}


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="of the run")
    parser.add_argument("--keep", help="folder that keeps the store for the next run")
    parser.add_argument("--threads", type=int, default=2, help="CPUs to use")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    common.PACKAGES = ("duckdb", "pyarrow")
    result: dict[str, Any] = {"machine": machine_facts(arguments.threads)}
    with tempfile.TemporaryDirectory(prefix="rrl-benchmark-") as temporary:
        path = Path(arguments.keep or temporary).absolute() / f"audit-{arguments.rollouts}"
        path.parent.mkdir(parents=True, exist_ok=True)
        build(path, arguments.rollouts)
        result |= measure(path, arguments.rollouts)
    result |= {"num_rollouts": arguments.rollouts, "pass": result["list_s"] <= BAR_S}
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        console = Console()
        print_machine(console, result["machine"])
        names = {
            "open": "open_s",
            "list a step": "list_s",
            "read its facts": "facts_s",
            "verify it": "verify_s",
        }
        rows = [(name, 1e3 * result[key]) for name, key in names.items()]
        print_table(console, f"{arguments.rollouts:,} rollouts", ["", "ms"], rows)
        console.print(f"bar {1e3 * BAR_S:.0f} ms: {'pass' if result['pass'] else 'MISSED'}")
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
