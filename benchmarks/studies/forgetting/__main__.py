"""Compare the arms: `python -m benchmarks.studies.forgetting [--seeds N] [--arms NAME …]`.

0.2 to 0.6 CPU seconds a run. The table goes to stdout, the progress bar to stderr; the same seeds
give the same table on the same machine.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.studies.forgetting.arms import ARMS, TUNING, TUNING_SEEDS, named
from benchmarks.studies.forgetting.report import markdown, summary
from benchmarks.studies.forgetting.training import train


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.forgetting", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=20, help="runs an arm, default 20")
    parser.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--tune", action="store_true", help="the grid the rivals were chosen from")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    options = parser.parse_args()
    seeds = TUNING_SEEDS if options.tune else range(options.seeds)
    try:
        arms = named(options.arms, TUNING if options.tune else ARMS)
    except ValueError as error:
        parser.error(str(error))
    if options.seeds < 1:
        parser.error(f"expected --seeds of 1 or more; came {options.seeds}")
    rows = {}
    with _progress() as progress:
        bar = progress.add_task("", total=sum(arm.settings.iterations for arm in arms))
        for arm in arms:
            progress.update(bar, description=arm.name)
            rows[arm.name] = summary(train(arm, seeds, lambda: progress.advance(bar)))
    table = markdown(rows, len(seeds))
    sys.stdout.write(json.dumps(rows, indent=2) + "\n" if options.json else table)
    if options.out is not None:
        options.out.write_text(table, encoding="utf-8")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


if __name__ == "__main__":
    main()
