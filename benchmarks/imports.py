"""Measure how quickly a large file of another framework is imported, and in how much memory.

A file of `--lines` verl lines of about 1 kB, 8 to a prompt, every 1,024 a step, is written, then
imported by `flows.importing.import_rollouts` into an empty store, in a process of its own. The
figure is lines a second; at least 20,000 with a million lines passes (exit code 0).
`cpu_lines_per_s` divides by the processor seconds of all threads and of the process that reads
(`child_cpu_s`) instead, which tells the cost also where other work runs on the machine. Memory is
resident memory of both processes when a tenth, a half and all of the lines were read, and the sum
of their peaks up to then. Then the same file is imported again, which must add nothing.

    python benchmarks/imports.py [--lines 1000000] [--json]
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from common import base_parser, machine_facts, print_machine, print_table, run_child
from rich.console import Console

PASS_LINES_PER_S = 20_000
GROUP, STEP = 8, 1_024
CHILD_TIMEOUT_S = 3600
WORDS = "We add the tens first and then the ones, carry what is over, and check the sum again. "


def write_lines(path: Path, num_lines: int) -> None:
    """Write a file as verl does; no two completions are equal."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(num_lines):
            problem = n // GROUP
            line = {
                "input": f"system\nYou are a helpful assistant.\nuser\nWhat is {problem} + 17? "
                'Let\'s think step by step and output the final answer after "####".\nassistant\n',
                "output": f"Attempt {n}. {WORDS * 8}\n#### {problem + 17 + n % 3}",
                "gts": str(problem + 17),
                "score": float(n % 3 == 0),
                "step": n // STEP,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def memory_mb() -> tuple[float, float]:
    """Return the resident memory of this process and its children in MB, and its peaks' sum."""
    children = Path("/proc/self/task").glob("*/children")
    numbers = ["self", *(number for path in children for number in path.read_text().split())]
    texts = [Path(f"/proc/{number}/status").read_text() for number in numbers]
    resident, peak = (  # a child that has ended has neither
        sum(int(kb) for text in texts for kb in re.findall(rf"{name}:\s+(\d+) kB", text))
        for name in ("VmRSS", "VmHWM")
    )
    return resident * 1024 / 1e6, peak * 1024 / 1e6


def cpu_s() -> tuple[float, float]:
    """Return the processor seconds of this process, and of its children that ended."""
    used = os.times()
    return used.user + used.system, used.children_user + used.children_system


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Import the file twice, and return what the first time took."""
    import storage
    from flows import importing
    from flows.progress import Progress

    folder = Path(arguments.folder)
    path = folder / "1.jsonl"
    write_lines(path, arguments.lines)
    memory: list[tuple[int, float, float]] = []
    count = importing._count

    def count_and_look(job: Any, part: Any) -> None:
        count(job, part)
        memory.append((job.counts["lines"], *memory_mb()))

    importing._count = count_and_look
    store = storage.open(folder / "store", create=True)
    request = importing.ImportRequest("verl", path)
    with Progress(quiet=True) as progress:
        started, started_cpu = time.perf_counter(), cpu_s()
        first = importing.import_rollouts(store, request, progress)
        elapsed = time.perf_counter() - started
        own_cpu, child_cpu = (now - then for now, then in zip(cpu_s(), started_cpu, strict=True))
        again = importing.import_rollouts(store, request, progress)
    reached = {
        f"{name}_mb_at_{percent}_percent": round(mb, 1)
        for percent in (10, 50, 100)
        for _, *found in [next(m for m in memory if 100 * m[0] >= percent * arguments.lines)]
        for name, mb in zip(("resident", "peak"), found, strict=True)
    }
    return {
        "line_bytes": path.stat().st_size / arguments.lines,
        "num_rollouts": first.num_rollouts,
        "num_again": again.num_rollouts,
        "elapsed_s": elapsed,
        "lines_per_s": arguments.lines / elapsed,
        "cpu_lines_per_s": arguments.lines / (own_cpu + child_cpu),
        "child_cpu_s": child_cpu,
        "again_s": again.elapsed_s,
        **reached,
        "store_mb": sum(p.stat().st_size for p in store.path.rglob("*.parquet")) / 1e6,
    }


def main() -> int:
    """Measure in a child, print, and return the exit code."""
    parser = base_parser(__doc__ or "", num_iterations=1)
    parser.add_argument("--lines", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(measure(arguments)))
        return 0
    machine = machine_facts(arguments.threads)
    found = run_child(
        __file__, ["--lines", str(arguments.lines)], arguments.threads, CHILD_TIMEOUT_S
    )
    is_whole = found["num_rollouts"] == arguments.lines and found["num_again"] == 0
    is_passed = is_whole and found["lines_per_s"] >= PASS_LINES_PER_S
    result = {"machine": machine, "pass": is_passed, "num_lines": arguments.lines, **found}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0 if is_passed else 1
    console = Console()
    print_machine(console, machine)
    print_table(console, f"{arguments.lines:,} lines", ["", ""], list(found.items()))
    verdict = "pass" if is_passed else "MISSED"
    console.print(f"{verdict}: {PASS_LINES_PER_S:,} lines a second pass", highlight=False)
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
