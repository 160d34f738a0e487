"""Compare ways to learn from failures: `python -m benchmarks.studies.coded`.

About ten CPU seconds a run, one thread. What is finished is a line of DIR/results.jsonl and is not
run again: a study that was killed goes on with the same command. Tables go to stdout, the progress
bar to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.studies.coded.arms import ARMS, TUNING, TUNING_SEEDS, named
from benchmarks.studies.coded.report import (
    BASELINE,
    Rows,
    cells,
    page,
    plot,
    sections,
    table,
    write_page,
)
from benchmarks.studies.coded.results import Job, add_result, read_results
from benchmarks.studies.coded.training import Settings, train
from benchmarks.studies.coded.warm_start import num_steps, start_policy

NAME = "coded-transforms"
RESULTS = "results.jsonl"


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    out = options.out or options.work
    try:
        jobs = _jobs(options)
        for folder in (options.work, out):
            folder.mkdir(parents=True, exist_ok=True)
        finished = read_results(options.work / RESULTS)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    try:
        _run([job for job in jobs if job.digest() not in finished], options.work)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with what is left")
    finished = read_results(options.work / RESULTS)
    _report([finished[job.digest()] for job in jobs], options.budget, out)


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Return the runs that were asked for, seed by seed, so that arms can be paired early.

    Raises:
        ValueError: an arm is unknown, or a number is out of its range.
    """
    arms = named(options.arms, TUNING if options.tune else ARMS)
    if min(options.seeds, options.budget) < 1 or not all(0 <= eps <= 1 for eps in options.eps):
        raise ValueError(
            f"expected --seeds and --budget of 1 or more and --eps in 0..1; came "
            f"{options.seeds}, {options.budget} and {options.eps}"
        )
    seeds = TUNING_SEEDS if options.tune else range(options.seeds)
    settings = Settings(budget=options.budget)
    return [Job(settings, arm, eps, seed) for eps in options.eps for seed in seeds for arm in arms]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.coded", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, default=6, help="runs an arm and eps, default 6")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.1], help="default 0.1")
    parser.add_argument(
        "--budget", type=int, default=8000, help="sampled sequences a run, default 8000"
    )
    parser.add_argument("--tune", action="store_true", help="the grid on seeds of its own")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("bench-out/coded"),
        metavar="DIR",
        help="results and checkpoints, default bench-out/coded",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"{NAME}.md and .png, default work")
    return parser


def _run(jobs: Sequence[Job], work: Path) -> None:
    """Run what is left."""
    if not jobs:
        return
    starts = {(job.seed, job.eps) for job in jobs}
    settings, folder = jobs[0].settings, work / "checkpoints"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        warming = progress.add_task(
            "warm start, steps", total=num_steps(settings.warm, starts, folder)
        )
        bar = progress.add_task("", total=settings.budget * len(jobs))
        for number, job in enumerate(jobs):
            progress.update(bar, description=f"{job.arm.name}, eps {job.eps}, seed {job.seed}")
            start = start_policy(
                settings.warm, job.seed, job.eps, folder, lambda: progress.advance(warming)
            )
            done = number * settings.budget
            outcome = train(
                settings,
                job.arm,
                job.seed,
                start,
                lambda now, done=done: progress.update(bar, completed=done + now),  # type: ignore[misc]
            )
            add_result(work / RESULTS, job, outcome)


def _report(rows: Rows, budget: int, out: Path) -> None:
    curves = sections(rows)
    lines = {
        f"eps {each}, {budget} sequences": [
            cells(name, held, by_arm.get(BASELINE, [])) for name, held in by_arm.items()
        ]
        for each, by_arm in curves.items()
    }
    console = Console(width=None if sys.stdout.isatty() else 220)
    for title, body in lines.items():
        console.print(table(body, title))
    plot(curves, out / f"{NAME}.png")
    write_page(out / f"{NAME}.md", page(lines, f"{NAME}.png"))


if __name__ == "__main__":
    main()
