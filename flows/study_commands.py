"""What `rrl study` does: train the runs of a study, and say what it found."""

import json
import shlex
from pathlib import Path
from typing import Literal

import storage
from flows.cli import print_result
from flows.progress import Progress
from flows.study import load_study, run_study
from flows.study_results import curves, headings, table_rows, write_results
from storage.answers import table_text


def study(
    path: Path,
    store_path: Path,
    output: Path,
    orchestrator: Literal["prefect", "none"],
    as_json: bool,
) -> None:
    """Run a study, print its table, and write it with its plot into `output`."""
    given = load_study(path)
    store = storage.open(store_path, create=True)
    with Progress() as progress:
        progress.note(f"study {given.study.name} · store {store.path}")
        run_study(store, given, orchestrator, progress)
    found = curves(store, given)
    command = shlex.join(["rrl", "study", str(path)])
    page, picture = write_results(given, found, output, command)
    tables = {task: table_rows(given, of_arm) for task, of_arm in found.items()}
    if as_json:
        arms = [
            ({"task": task} if task else {}) | dict(zip(headings(given), row, strict=True))
            for task, rows in tables.items()
            for row in rows
        ]
        print_result(json.dumps({"study": given.study.name, "arms": arms, "page": str(page)}))
        return
    for task, rows in tables.items():
        if task:
            print_result(f"{task}:")
        print_result(table_text(headings(given), rows).rstrip())
    print_result(f"{page}\n{picture}")
