"""Measure which share of a training iteration is neither sampling, nor scoring, nor learning.

A shipped configuration (16 prompts x 8 completions of up to 48 tokens, vLLM, event log on disk,
MLflow in SQLite, Prefect with a server of its own) trains for a warm-up and a few timed iterations
in a child process. Timed from outside: the engine's `generate`, the scorers, and the learner's
`prepare` and `step`. Everything else between one iteration's pin and the next one's is overhead:
pin, picks, encoding, appends to the log, reading back, planning, digests, artifacts, weight sync,
tracking, the orchestrator. No evaluation falls into the timed iterations. The learner leaves out
groups whose rewards are all equal, as it does in any run, so its share is that of a young run.

The figure is the overhead of all timed iterations divided by their time: at most 5 % passes (exit
code 0), the goal is 2 %. The second table says where the overhead is: the step of the iteration,
then what it did ("learn / sync" is the weight sync, "learn / learn" the remainder of that step).

    python benchmarks/overhead.py [--json] [--orchestrator none]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import (
    LEARNING,
    SAMPLING,
    SCORING,
    base_parser,
    inner_seconds,
    machine_facts,
    print_machine,
    print_table,
    run_child,
    time_rrl,
)
from rich.console import Console

PASS_FRAC = 0.05
GOAL_FRAC = 0.02
NUM_WARMUPS = 1
SHOWN_S = 0.001
CHILD_TIMEOUT_S = 900
WORK = (SAMPLING, SCORING, LEARNING)


def make_config(arguments: argparse.Namespace) -> Any:
    """Return the configuration to run: as many iterations as asked for, and no evaluation."""
    from flows.config import load_config

    return load_config(
        Path(arguments.config),
        [
            f"run.iterations={NUM_WARMUPS + arguments.iterations}",
            f"model.name={arguments.model}",
            "sampler.engine=vllm",
            "evaluation.every=none",
        ],
    )


def run_as_child(arguments: argparse.Namespace) -> None:
    """Train and write down the seconds of every iteration."""
    import torch

    torch.set_num_threads(arguments.threads)
    timed = time_rrl(
        make_config(arguments), Path(arguments.folder, "store"), arguments.orchestrator
    )
    Path(arguments.out).write_text(json.dumps(timed))


def summarise(timed: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of an iteration by kind of work, and its overhead by operation."""
    laps = timed["laps"][NUM_WARMUPS:]
    total = sum(sum(lap.values()) for lap in laps)
    work = {kind: sum(inner_seconds(lap, kind) for lap in laps) for kind in WORK}
    overhead = total - sum(work.values())
    labels = {label for lap in laps for label in lap if label.split(" / ")[-1] not in WORK}
    by_label = {label: sum(lap.get(label, 0.0) for lap in laps) / len(laps) for label in labels}
    fracs = [1 - sum(inner_seconds(lap, kind) for kind in WORK) / sum(lap.values()) for lap in laps]
    return {
        "pass": overhead / total <= PASS_FRAC,
        "overhead_frac": overhead / total,
        "overhead_frac_median": statistics.median(fracs),
        "pass_frac": PASS_FRAC,
        "goal_frac": GOAL_FRAC,
        "start_s": timed["start_s"],
        "sampled_tokens": timed["sampled_tokens"][NUM_WARMUPS:],
        "iteration_s": total / len(laps),
        "work_s": {kind: seconds / len(laps) for kind, seconds in work.items()},
        "overhead_s": dict(sorted(by_label.items(), key=lambda item: -item[1])),
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables and the verdict."""
    console = Console()
    print_machine(console, result["machine"])
    total = result["iteration_s"]
    parts = result["work_s"] | {"overhead": result["overhead_frac"] * total, "all": total}
    rows = [(name, seconds, f"{100 * seconds / total:.1f} %") for name, seconds in parts.items()]
    print_table(console, "one iteration, means", ["", "s", "share"], rows)
    shown = {label: s for label, s in result["overhead_s"].items() if s >= SHOWN_S}
    shown["all smaller ones"] = sum(result["overhead_s"].values()) - sum(shown.values())
    rows = [
        (label, f"{1e3 * seconds:.1f}", f"{100 * seconds / total:.2f} %")
        for label, seconds in shown.items()
    ]
    print_table(console, "overhead by step / operation, means", ["", "ms", "share"], rows)
    verdict = "pass" if result["pass"] else "MISSED"
    console.print(
        f"{verdict}: overhead {100 * result['overhead_frac']:.2f} %; "
        f"at most {100 * PASS_FRAC:g} % passes, the goal is {100 * GOAL_FRAC:g} %",
        highlight=False,
    )


def main() -> int:
    """Run the child, print where its time went, and return the exit code."""
    parser = base_parser(__doc__ or "", num_iterations=4)
    parser.add_argument("--config", default="arithmetic-smollm2", help="shipped, or a TOML file")
    parser.add_argument("--orchestrator", choices=("prefect", "none"), default="prefect")
    arguments = parser.parse_args()
    if arguments.child:
        run_as_child(arguments)
        return 0
    machine = machine_facts(arguments.threads)
    options = ["--iterations", arguments.iterations, "--threads", arguments.threads]
    options += ["--model", arguments.model, "--orchestrator", arguments.orchestrator]
    options += ["--config", arguments.config]
    child = ["--child", "rrl", *map(str, options)]
    timed = run_child(__file__, child, arguments.threads, CHILD_TIMEOUT_S)
    result = {"machine": machine} | summarise(timed)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
