"""Retrieve memory for an iteration: 64 problems against 50,000 remembered reviews.

Every entry belongs to a problem of its own, a made-up one of about 35 words and the instruction of
the shipped tasks. Each figure includes what is made of the entries anew at each iteration (terms
counted and weighed, stored vectors put together), exclusion of near-duplicates and of entries with
the gold, ranking and budget. Vectors of entries are read from the store in a run; what it costs to
make them is printed too, and has no bar.

    python benchmarks/retrieval.py [--json] [--entries N] [--queries N]

Exit code 1: a ranking takes longer than its bar.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common
from common import machine_facts, print_machine, print_table
from rich.console import Console

from rrl_core.review.memory import MemoryEntry, MemoryRule, Query, retrieve
from rrl_core.review.similarity import Bm25Index, embed
from rrl_core.tasks.prompts import INSTRUCTION

BARS_S = {"bm25": 3.2, "embedding": 1.5}
NUM_WORDS, NUM_PROBLEM_WORDS = 4000, 35
MAX_NUMBER = 200


def make_problems(number: int, seed: int) -> list[str]:
    """Return problems of words that are about as unevenly frequent as those of a language."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucm"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(NUM_WORDS)]
    weights = [1 / (rank + 10) for rank in range(NUM_WORDS)]
    problems = []
    for _ in range(number):
        said = draw.choices(words, weights, k=NUM_PROBLEM_WORDS)
        for place in draw.sample(range(NUM_PROBLEM_WORDS), 3):
            said[place] = str(draw.randint(2, MAX_NUMBER))
        problems.append(f"{' '.join(said)}? {INSTRUCTION}")
    return problems


def make_memory(num_entries: int, num_queries: int) -> tuple[list[MemoryEntry], list[Query]]:
    """Return entries without vectors, and queries."""
    draw = random.Random(1)
    problems = make_problems(num_entries + num_queries, seed=0)
    entries = [
        MemoryEntry(
            review_id=f"rv-{draw.getrandbits(64):016x}",
            prompt_id=f"p-{number}",
            problem=problem,
            text=f"Wrong: the sum is {draw.randint(0, MAX_NUMBER)}\nInstead: add again, in order",
            num_tokens=draw.randint(20, 60),
            num_helpful=draw.randint(0, 5),
            num_harmful=draw.randint(0, 5),
        )
        for number, problem in enumerate(problems[:num_entries])
    ]
    queries = [
        Query(f"q-{number}", problem, str(draw.randint(0, MAX_NUMBER)))
        for number, problem in enumerate(problems[num_entries:])
    ]
    return entries, queries


def measure(num_entries: int, num_queries: int, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Return the median seconds of each part."""
    entries, queries = make_memory(num_entries, num_queries)
    problems, asked = [e.problem for e in entries], [q.problem for q in queries]
    started, cpu_started = time.perf_counter(), time.process_time()
    vectors = embed(problems)
    made_s, made_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    entries = [replace(e, vector=vector) for e, vector in zip(entries, vectors, strict=True)]

    def bm25_alone() -> None:
        index = Bm25Index(problems, asked)
        for query in range(num_queries):
            index.scores(query)

    def retrieve_by(ranking: Any) -> Callable[[], object]:
        return lambda: retrieve(entries, queries, MemoryRule(ranking, 2, 200))

    parts: dict[str, Callable[[], object]] = {
        "retrieve by recency": retrieve_by("recency"),
        "retrieve by bm25": retrieve_by("bm25"),
        "retrieve by embedding": retrieve_by("embedding"),
        "bm25 alone": bm25_alone,
        "embedding alone": lambda: vectors @ embed(asked).T,
    }
    found = {name: median_seconds(part, num_rounds) for name, part in parts.items()}
    found["vectors of all entries, once"] = {"seconds": made_s, "cpu_s": made_cpu_s}
    for ranking, bar in BARS_S.items():
        found[f"retrieve by {ranking}"]["bar"] = bar
    return found


def median_seconds(part: Callable[[], object], num_rounds: int) -> dict[str, float]:
    """Return the median seconds of a part, passed and of the processor; round one is a warm-up."""
    passed, cpu = [], []
    for _ in range(1 + num_rounds):
        started, cpu_started = time.perf_counter(), time.process_time()
        part()
        passed.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    return {"seconds": statistics.median(passed[1:]), "cpu_s": statistics.median(cpu[1:])}


def show(result: dict[str, Any]) -> None:
    """Print the medians and the verdict."""
    console = Console()
    print_machine(console, result["machine"])
    rows = [
        (name, found["seconds"], found["cpu_s"], f"{found['bar']:g}" if "bar" in found else "")
        for name, found in result["parts"].items()
    ]
    title = f"{result['num_queries']} queries, {result['num_entries']:,} entries"
    print_table(console, title, ["", "s", "CPU s", "bar"], rows)
    verdict = "pass" if result["pass"] else "MISSED"
    console.print(f"{verdict}; peak memory {result['peak_mib']} MiB", highlight=False)


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="timed, after a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="CPUs to use")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    common.PACKAGES = ("numpy", "scipy", "scikit-learn")
    machine = machine_facts(arguments.threads)
    parts = measure(arguments.entries, arguments.queries, arguments.rounds)
    passed = all(found["seconds"] <= found.get("bar", float("inf")) for found in parts.values())
    result = {
        "machine": machine,
        "num_entries": arguments.entries,
        "num_queries": arguments.queries,
        "parts": parts,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "pass": passed,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
