"""Finished runs, a line of JSON each: what is there already is not run again.

Invariant: a line is read only for the very settings it was made under, by their digest. A line that
was cut off when the study was killed is dropped before the next one is written.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.training import Outcome, Settings


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    settings: Settings
    arm: Arm
    eps: float
    seed: int

    def digest(self) -> str:
        """Return 16 hex digits that depend on everything the run depends on."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the finished runs of a file by their digest; none if there is no file.

    Raises:
        ValueError: a line, but for a last one that was cut off, is not a result.
    """
    if not path.exists():
        return {}
    *lines, _cut_off = path.read_text(encoding="utf-8").split("\n")
    rows = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows[row["digest"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a result as JSON with a `digest`; came "
                f"{line[:60]!r}; delete the line to run it again"
            ) from error
    return rows


def add_result(path: Path, job: Job, outcome: Outcome) -> dict[str, Any]:
    """Append a finished run to the file, durably, and return it."""
    row = {
        "digest": job.digest(),
        "arm": job.arm.name,
        "eps": job.eps,
        "seed": job.seed,
        "auc": area(outcome),
        "final": outcome.evaluations[-1].rare,
        "common": outcome.evaluations[-1].common,
        **asdict(outcome),
        "job": asdict(job),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _drop_cut_off(file)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return row


def area(outcome: Outcome) -> float:
    """Return the mean accuracy on rare classes over the sequences that were sampled."""
    at = [e.num_sequences for e in outcome.evaluations]
    return float(np.trapezoid([e.rare for e in outcome.evaluations], at) / (at[-1] - at[0]))


def _drop_cut_off(file: Any) -> None:
    """Cut the file behind its last newline."""
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
