"""The table of arms: means over the seeds, final J with its 95 % bootstrap interval."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.studies.forgetting.training import Result
from rrl_core.intervals import bootstrap_interval

COLUMNS = {
    "reward": "J",
    "interval": "95 %",
    "greedy_reward": "greedy J",
    "area": "AUC",
    "idea_lost": "idea lost",
    "solved_lost": "solved lost",
    "recovered": "recovered",
    "num_sequences": "sequences",
}


def summary(result: Result) -> dict[str, Any]:
    """Return the means over the seeds that are no NaN, None where there are none."""
    row: dict[str, Any] = {}
    for name, values_S in asdict(result).items():
        known = values_S[~np.isnan(values_S)]
        row[name] = float(known.mean()) if len(known) else None
    row["interval"] = bootstrap_interval(result.reward.tolist())
    return row


def markdown(rows: Mapping[str, Mapping[str, Any]], num_seeds: int) -> str:
    """Return the table, an arm a line."""
    lines = [
        f"{num_seeds} runs an arm.",
        "",
        "| arm | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(key, row[key]) for key in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "interval":
        return f"[{value[0]:.3f}, {value[1]:.3f}]"
    return f"{value:.0f}" if key == "num_sequences" else f"{value:.3f}"
