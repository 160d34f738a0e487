"""Make the report of a long run, and open it: a page is to be there within two seconds.

The store is that of `buffer_data.py`, 128 rollouts an iteration, compacted. The page is written as
`rrl report` writes it, then opened several times in headless Chromium, each time in a new context:
from the request until its rollouts are listed. Told are the medians, and what the page complained
of, which must be nothing.

    python benchmarks/report.py [--json] [--iterations N] [--keep FOLDER]

Exit code 1: the page takes longer than the bar, or complains; 2: there is no Chromium.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from buffer import stores
from buffer_data import RUN_ID
from common import machine_facts, print_machine, print_table
from rich.console import Console

import storage
from flows.report.page import make_page

BAR_S = 2.0
NUM_OPENED, NUM_ROLLOUTS = 7, 5_000
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run"]


def write_page(path: Path, output: Path) -> float:
    """Write the page of the run of a store; return the seconds it took."""
    started = time.perf_counter()
    store = storage.open(path)
    moment = storage.Moment(store, store.head().number)
    page = make_page(moment, [RUN_ID], NUM_ROLLOUTS, lambda done, note: None)
    output.write_text(page.html, encoding="utf-8")
    return time.perf_counter() - started


def open_page(chromium: str, path: Path) -> tuple[list[float], list[str]]:
    """Return the seconds of each opening of a page, and its complaints."""
    from playwright.sync_api import sync_playwright

    seconds, complaints = [], list[str]()
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS) as browser,
    ):
        for _ in range(NUM_OPENED):
            with browser.new_context() as context:
                page = context.new_page()
                page.on("console", lambda message: complaints.append(message.text))
                page.on("pageerror", lambda error: complaints.append(str(error)))
                started = time.perf_counter()
                page.goto(path.as_uri())
                page.wait_for_selector("html[data-ready=true]")
                page.wait_for_selector(".row")
                seconds.append(time.perf_counter() - started)
    return seconds, complaints


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--iterations", type=int, default=782, help="of the run")
    parser.add_argument("--keep", help="folder that keeps the stores for the next run")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("expected `chromium` on PATH, found none: install it first", file=sys.stderr)
        return 2
    common.PACKAGES = ("duckdb", "pyarrow", "playwright")
    machine = machine_facts(2)
    with tempfile.TemporaryDirectory(prefix="rrl-benchmark-") as temporary:
        folder = Path(arguments.keep or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        _, compacted = stores(folder, arguments.iterations)
        output = Path(temporary, "report.html")
        write_s = write_page(compacted, output)
        seconds, complaints = open_page(chromium, output)
        size_mb = output.stat().st_size / 1e6
    open_s = statistics.median(seconds)
    result: dict[str, Any] = {
        "machine": machine,
        "num_rollouts": 128 * arguments.iterations,
        "write_s": write_s,
        "page_mb": size_mb,
        "open_s": open_s,
        "slowest_open_s": max(seconds),
        "complaints": complaints,
        "pass": open_s < BAR_S and not complaints,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0 if result["pass"] else 1
    console = Console()
    print_machine(console, machine)
    names = ("num_rollouts", "write_s", "page_mb", "open_s", "slowest_open_s")
    print_table(console, "The report", ["", ""], [(n, float(result[n])) for n in names])
    console.print(*complaints, sep="\n", end="")
    console.print(f"bar {BAR_S:.0f} s: {'pass' if result['pass'] else 'MISSED'}")
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
