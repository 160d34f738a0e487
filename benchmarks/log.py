"""Compare the event log with JSONL, SQLite and Delta, and ask a log of a million rollouts.

- Append: a batch of rollouts, their ~200 tokens and log-probs and their scores, as Python dicts,
  until they are acknowledged as durable. The log checks every value, gives every row the hash of
  its place and of its content, and commits three tables at once; SQLite (WAL, synchronous=FULL)
  commits three tables; JSONL writes lines and syncs; Delta writes one wide table and does not sync.
  JSONL is written with Python's `json`; another column says what `orjson` makes of it.
- Writers: four processes at once, 64 rollouts an append; JSONL has a file for each.
- Questions: the latest scores by policy version, the top scores per prompt, the reward by
  iteration, the story of one rollout; JSONL with or without tokens is read by DuckDB and by Polars,
  and the quicker of them counts.
- A million rollouts, appended by the writer and compacted: opening, questions, rollouts by id, size
  and memory.

Each figure is a median within one run. Exit code 1: a bar is missed. `--keep FOLDER` keeps the
large store, so that the next run finds it.

    python benchmarks/log.py [--json] [--rollouts N] [--keep FOLDER] [--only append,writers,...]
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from common import machine_facts, print_machine, print_table, run_child
from log_children import (
    BATCH_SIZES,
    build_store,
    measure_append,
    measure_large,
    measure_questions,
    measure_writers,
)
from log_rivals import DELTA, JSONL, LOG, contenders, has_delta
from rich.console import Console

PARTS = ("append", "writers", "questions", "large")
CHILD_TIMEOUT_S = 3600
NUM_ROUNDS = 2  # of children, one after the other for each contender
QUESTION_ROLLOUTS = 100_000
WRITER_BATCHES = 40
MIB, GIB = 2**20, 2**30
# name: (bar, goal, is more better)
BARS = {
    "append of 4096, times JSONL": (5.0, 9.0, True),
    "4 writers, times Delta": (4.0, 5.0, True),
    "questions, times JSONL with tokens": (10.0, 15.0, True),
    "questions, times JSONL text only": (5.0, 15.0, True),
    "open, ms": (100.0, 50.0, False),
    "top scores per prompt, ms": (500.0, 100.0, False),
    "64 rollouts with tokens by id, ms": (150.0, 100.0, False),
    "peak memory of the questions, MiB": (1024.0, 1024.0, False),
    "memory while appending, at 100 % / at 10 %": (1.25, 1.1, False),
}
GOAL_BYTES = 1_000  # per rollout of 200 tokens


def run_as_child(arguments: argparse.Namespace) -> None:
    """Measure one part in this process and write down what came out."""
    folder, rollouts = Path(arguments.folder), arguments.rollouts
    store = Path(arguments.store or folder / "store")
    found: Any
    if arguments.child == "append":
        found = measure_append(arguments.contender, folder)
    elif arguments.child == "writers":
        found = measure_writers(arguments.contender, folder, WRITER_BATCHES)
    elif arguments.child == "build":
        found = build_store(store, rollouts)
    elif arguments.child == "questions":
        build_store(store, rollouts)
        found = measure_questions(store, rollouts)
    else:
        found = measure_large(store, seed=arguments.seed)
    Path(arguments.out).write_text(json.dumps(found))


def child(part: str, arguments: argparse.Namespace, **options: Any) -> Any:
    """Measure a part in a fresh process."""
    pairs = {"child": part, "rollouts": arguments.rollouts, **options}
    words = [word for name, value in pairs.items() for word in (f"--{name}", str(value))]
    return run_child(__file__, words, arguments.threads, CHILD_TIMEOUT_S)


def append_figures(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return rollouts per second by contender and batch size."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(NUM_ROUNDS):
        for contender in contenders():
            found = child("append", arguments, contender=contender)
            for size, values in found.items():
                seconds.setdefault(contender, {}).setdefault(size, []).extend(values)
    return {
        contender: {size: int(size) / statistics.median(s) for size, s in by_size.items()}
        for contender, by_size in seconds.items()
    }


def writers_figures(arguments: argparse.Namespace) -> dict[str, float]:
    """Return rollouts per second of four writers by contender."""
    rates: dict[str, list[float]] = {}
    for _ in range(NUM_ROUNDS):
        for contender in contenders():
            found = child("writers", arguments, contender=contender)
            rates.setdefault(contender, []).append(found["rollouts_per_s"])
    return {contender: statistics.median(found) for contender, found in rates.items()}


def large_figures(arguments: argparse.Namespace, keep: Path) -> dict[str, Any]:
    """Build the large store unless it is there, and ask it in fresh processes."""
    store, built = keep / f"store-{arguments.rollouts}", keep / f"store-{arguments.rollouts}.json"
    if not built.exists():
        if store.exists():
            raise SystemExit(f"`{store}` was not finished; delete it and run again")
        built.write_text(json.dumps(child("build", arguments, store=store)))
    facts = json.loads(built.read_text())
    rounds = [child("large", arguments, store=store, seed=n) for n in range(3)]
    seconds = {
        name: statistics.median(s for found in rounds for s in found["seconds"][name])
        for name in rounds[0]["seconds"]
    }
    num_rollouts = rounds[0]["num_rows"]["rollouts"]
    return {
        "num_rollouts": num_rollouts,
        "tokens_per_rollout": facts["num_tokens"] / num_rollouts,
        "bytes_per_rollout": sum(rounds[0]["size_bytes"].values()) / num_rollouts,
        "bytes_per_token": rounds[0]["size_bytes"]["rollout_tokens"] / facts["num_tokens"],
        "open_s": statistics.median(found["open_s"] for found in rounds),
        "seconds": seconds,
        "first_seconds": {
            name: statistics.median(found["seconds"][name][0] for found in rounds)
            for name in rounds[0]["seconds"]
        },
        "peak_bytes": max(found["peak_bytes"] for found in rounds),
        **{name: facts[name] for name in ("rss_bytes", "append_s", "compact_s")},
    }


def question_ratios(questions: dict[str, dict[str, float]], form: str) -> dict[str, float]:
    """Return, by question, the seconds of the quicker reader of a form divided by the log's."""
    readers = [found for name, found in questions.items() if name.startswith(form)]
    return {
        question: min(found[question] for found in readers) / seconds
        for question, seconds in questions["log"].items()
    }


def verdicts(result: dict[str, Any]) -> dict[str, float]:
    """Return the figure of each bar that was measured; of several questions the worst counts."""
    found: dict[str, float] = {}
    if append := result.get("append"):
        found["append of 4096, times JSONL"] = append[LOG]["4096"] / append[JSONL]["4096"]
    if (writers := result.get("writers")) and DELTA in writers:
        found["4 writers, times Delta"] = writers[LOG] / writers[DELTA]
    if questions := result.get("questions"):
        for form in ("with tokens", "text only"):
            ratio = min(question_ratios(questions, form).values())
            found[f"questions, times JSONL {form}"] = ratio
    if large := result.get("large"):
        found["open, ms"] = 1e3 * large["open_s"]
        found["top scores per prompt, ms"] = 1e3 * large["seconds"]["top"]
        found["64 rollouts with tokens by id, ms"] = 1e3 * large["seconds"]["look_up"]
        found["peak memory of the questions, MiB"] = large["peak_bytes"] / MIB
        early, late = large["rss_bytes"]
        found["memory while appending, at 100 % / at 10 %"] = late / early
    return found


def passes(name: str, value: float, limit: float) -> bool:
    """Tell whether a figure reaches a bar or goal."""
    return value >= limit if BARS[name][2] else value <= limit


def show(result: dict[str, Any]) -> None:
    """Print the tables and the verdict of each bar."""
    console = Console()
    print_machine(console, result["machine"])
    if not has_delta():
        console.print("`deltalake` is not installed: its columns are left out", style="yellow")
    if append := result.get("append"):
        rows = []
        for size in map(str, BATCH_SIZES):
            rates = {name: by_size[size] for name, by_size in append.items()}
            ratios = [rates[LOG] / rate for name, rate in rates.items() if name != LOG]
            rows.append([size, *(f"{r:,.0f}" for r in rates.values()), *ratios])
        rivals = [f"log / {name}" for name in append if name != LOG]
        print_table(console, "append, rollouts/s", ["batch", *append, *rivals], rows)
    if writers := result.get("writers"):
        cells = [f"{rate:,.0f}" for rate in writers.values()]
        print_table(console, "4 writers, rollouts/s", ["", *writers], [["", *cells]])
    if questions := result.get("questions"):
        ratios = [question_ratios(questions, form) for form in ("with tokens", "text only")]
        rows = [
            [q, *(f"{1e3 * found[q]:.0f}" for found in questions.values()),
             *(f"{ratio[q]:.1f}" for ratio in ratios)]
            for q in questions["log"]
        ]  # fmt: skip
        columns = ["ms", *questions, "x with tokens", "x text only"]
        print_table(console, f"questions at {result['question_rollouts']:,}", columns, rows)
    if large := result.get("large"):
        show_large(console, large)
    rows = []
    for name, value in result["bars"].items():
        bar, goal, _ = BARS[name]
        verdict = "goal" if passes(name, value, goal) else "pass"
        rows.append((name, value, bar, goal, verdict if passes(name, value, bar) else "MISSED"))
    print_table(console, "bars", ["", "figure", "bar", "goal", "verdict"], rows)


def show_large(console: Console, large: dict[str, Any]) -> None:
    """Print what was measured on the large store."""
    early, late = large["rss_bytes"]
    rows = [
        ("open, ms", 1e3 * large["open_s"]),
        *((f"{name}, ms", 1e3 * s) for name, s in large["seconds"].items()),
        *(
            (f"{name}, first of a process, ms", 1e3 * s)
            for name, s in large["first_seconds"].items()
        ),
        ("tokens per rollout", large["tokens_per_rollout"]),
        (f"bytes per rollout (goal {GOAL_BYTES:,})", large["bytes_per_rollout"]),
        ("bytes per token, with log-probs and ids", large["bytes_per_token"]),
        ("peak memory of the questions, MiB", large["peak_bytes"] / MIB),
        ("memory while appending, at 10 %, MiB", early / MIB),
        ("memory while appending, at 100 %, MiB", late / MIB),
        ("all appends, s", large["append_s"]),
        ("compaction, s", large["compact_s"]),
    ]
    print_table(console, f"{large['num_rollouts']:,} rollouts", ["", ""], rows)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every part that is asked for."""
    parts = arguments.only.split(",")
    common.PACKAGES = ("duckdb", "polars", "pyarrow", "deltalake", "orjson")
    result: dict[str, Any] = {"machine": machine_facts(arguments.threads)}
    if "append" in parts:
        result["append"] = append_figures(arguments)
    if "writers" in parts:
        result["writers"] = writers_figures(arguments)
    if "questions" in parts:
        smaller = argparse.Namespace(**vars(arguments) | {
            "rollouts": min(QUESTION_ROLLOUTS, arguments.rollouts)
        })  # fmt: skip
        result["questions"] = child("questions", smaller)
        result["question_rollouts"] = smaller.rollouts
    if "large" in parts:
        with tempfile.TemporaryDirectory(prefix="rrl-benchmark-") as temporary:
            result["large"] = large_figures(arguments, Path(arguments.keep or temporary).absolute())
    bars = verdicts(result)
    return result | {
        "bars": bars,
        "pass": all(passes(name, value, BARS[name][0]) for name, value in bars.items()),
    }


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="of the large store")
    parser.add_argument("--keep", help="folder that keeps the large store for the next run")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each child")
    for internal in ("--child", "--out", "--folder", "--contender", "--store"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, came {', '.join(unknown)}")
    if arguments.child:
        run_as_child(arguments)
        return 0
    if arguments.keep:
        Path(arguments.keep).mkdir(parents=True, exist_ok=True)
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
