"""Compare ways to learn from failures: `python -m benchmarks.studies.coded`.

About ten CPU seconds a run, one thread. What is finished is a line of DIR/results.jsonl, with its
events in DIR/store, and is not run again: a study that was killed goes on with the same command.
Two processes may share the work: `--half 1/2` and `--half 2/2`. Tables go to stdout, the progress
bar to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.studies.coded.arms import TUNING, TUNING_SEEDS, Arm, named
from benchmarks.studies.coded.report import (
    Rows,
    page,
    plot,
    sections,
    shown,
    tables,
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
        wanted = _jobs(options)
        for folder in (options.work, out):
            folder.mkdir(parents=True, exist_ok=True)
        finished = read_results(options.work / RESULTS)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    left = [job for job in own_part(wanted, options.half) if job.digest() not in finished]
    try:
        _run(left, options.work, options.store or options.work / "store")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with what is left")
    finished = read_results(options.work / RESULTS)
    _report([finished[job.digest()] for job in wanted if job.digest() in finished], out)


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Return the runs that were asked for, seed by seed, so that arms can be paired early.

    Raises:
        ValueError: an arm is unknown, or a number is out of its range.
    """
    if min(options.seeds, options.budget) < 1 or not all(0 <= eps <= 1 for eps in options.eps):
        raise ValueError(
            f"expected --seeds and --budget of 1 or more and --eps in 0..1; came "
            f"{options.seeds}, {options.budget} and {options.eps}"
        )
    settings = Settings(budget=options.budget)
    if options.all:
        arms = named(options.arms)
        return [
            *jobs(settings, TUNING, [0.1], TUNING_SEEDS),
            *jobs(settings, arms, [0.1], range(8)),
            *jobs(settings, arms, [0.3, 1.0], range(4)),
        ]
    if options.tune:
        return jobs(settings, named(options.arms, TUNING), options.eps, TUNING_SEEDS)
    return jobs(settings, named(options.arms), options.eps, range(options.seeds))


def jobs(
    settings: Settings, arms: Sequence[Arm], eps: Sequence[float], seeds: Sequence[int]
) -> list[Job]:
    """Return every combination, those of one start policy together."""
    return [Job(settings, arm, each, seed) for each in eps for seed in seeds for arm in arms]


def own_part(jobs: Sequence[Job], half: tuple[int, int]) -> list[Job]:
    """Return the jobs of part k of n, from 1: every n-th start policy with all its arms."""
    starts = list(dict.fromkeys((job.eps, job.seed) for job in jobs))
    own = set(starts[half[0] - 1 :: half[1]])
    return [job for job in jobs if (job.eps, job.seed) in own]


def _half(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(
            f"expected K/N with 1 <= K <= N, such as 1/2; came {text!r}"
        )
    return int(part), int(parts)


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
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tune", action="store_true", help="the grid on seeds of its own")
    which.add_argument(
        "--all",
        action="store_true",
        help="the grid, then eps 0.1 with 8 seeds, 0.3 and 1.0 with 4 each",
    )
    parser.add_argument(
        "--half", type=_half, default=(1, 1), metavar="K/N", help="the K-th of N parts of the runs"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("bench-out/coded"),
        metavar="DIR",
        help="results and checkpoints, default bench-out/coded",
    )
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="log of every run, default WORK/store"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"{NAME}.md and its plots, default work"
    )
    return parser


def _run(jobs: Sequence[Job], work: Path, store: Path) -> None:
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
            outcome, journal = train(
                settings,
                job.arm,
                job.seed,
                start,
                lambda now, done=done: progress.update(bar, completed=done + now),  # type: ignore[misc]
                job.run_id,
            )
            journal.write(store, asdict(job), job.seed)
            add_result(work / RESULTS, job, outcome)


def _report(rows: Rows, out: Path) -> None:
    found, plots = sections(rows), {}
    console = Console(width=None if sys.stdout.isatty() else 220)
    for title, by_arm in found.items():
        for lines in tables(by_arm):
            console.print(shown(lines, title))
        if not title.startswith("Tuning"):
            plots[title] = f"{NAME}-{title.split(',')[0].replace(' ', '')}.png"
            plot(by_arm, title, out / plots[title])
    write_page(out / f"{NAME}.md", page(found, plots))


if __name__ == "__main__":
    main()
