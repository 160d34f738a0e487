"""Finished runs, a line of JSON each: what is there already is not run again.

Invariant: a line is read only for the very settings it was made under, by their digest. A line that
was cut off when the study was killed is dropped before the next one is written.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.coded.arms import Arm
from benchmarks.studies.coded.evaluation import Evaluation
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

    @property
    def run_id(self) -> str:
        """Its name in the log, which ends in the start of its digest."""
        return f"coded-{self.arm.name}-eps{self.eps}-s{self.seed}-{self.digest()[:6]}"


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
        "run_id": job.run_id,
        "arm": job.arm.name,
        "eps": job.eps,
        "seed": job.seed,
        "auc": area(outcome),
        "final": outcome.evaluations[-1].rare,
        "common": outcome.evaluations[-1].common,
        **forgotten(outcome.evaluations),
        **asdict(outcome),
        "job": asdict(job),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two halves of a study write to one file
        _drop_cut_off(file)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return row


def area(outcome: Outcome) -> float:
    """Return the mean accuracy on rare classes over the sequences that were sampled."""
    at = [e.num_sequences for e in outcome.evaluations]
    return float(np.trapezoid([e.rare for e in outcome.evaluations], at) / (at[-1] - at[0]))


def forgotten(evaluations: Sequence[Evaluation]) -> dict[str, float | None]:
    """Return what became of held-out problems that were solved, as the view `lost_prompts` does.

    Of problems sampled several times at several evaluations: `lost_rate`, the share of those ever
    solved that fail every time at the last evaluation, None where there is none; `recovered`, how
    many were lost in between.
    """
    told = [e.variety.num_ok for e in evaluations if e.variety is not None]
    is_solved_EX = np.array(told) > 0
    if not is_solved_EX.any():
        return {"lost_rate": None, "recovered": 0}
    is_known_EX = np.logical_or.accumulate(is_solved_EX)
    was_lost_X = (is_known_EX & ~is_solved_EX).any(0)
    num_lost = (is_known_EX[-1] & ~is_solved_EX[-1]).sum()
    return {
        "lost_rate": float(num_lost / is_known_EX[-1].sum()),
        "recovered": int((was_lost_X & is_solved_EX[-1]).sum()),
    }


def _drop_cut_off(file: Any) -> None:
    """Cut the file behind its last newline."""
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
