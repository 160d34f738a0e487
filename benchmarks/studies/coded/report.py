"""The table of arms and the plot: means over seeds, intervals by bootstrap, differences paired."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.studies.coded.arms import ARMS

RESAMPLES = 10_000
BASELINE = ARMS[0].name
MARK = "<!-- from here on written by benchmarks/studies/coded -->"
COLUMNS = (
    "arm",
    "seeds",
    "AUC",
    "AUC - " + BASELINE,
    "final",
    "common",
    "lift over retry",
    "lift over blank",
    "internalised",
    "sequences",
    "tokens",
    "updates",
)
COLORS = ("#1f3b57", "#c8632b", "#3d8361", "#9aa7b4", "#7a4b8c", "#b8a03c", "#4b8cb0", "#a3455a")

Rows = Sequence[Mapping[str, Any]]
"""Results as `results.read_results` gives them."""


def bootstrap(values_S: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean over seeds; the same for the same values."""
    held_S = np.array(values_S)
    draws = np.random.default_rng(0).integers(len(held_S), size=(RESAMPLES, len(held_S)))
    low, high = np.percentile(held_S[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def difference(rows: Rows, baseline: Rows, name: str) -> list[float]:
    """Return by how much each seed's result is above that of the baseline's same seed."""
    of_seed = {row["seed"]: row[name] for row in baseline}
    return [row[name] - of_seed[row["seed"]] for row in rows if row["seed"] in of_seed]


def cells(arm: str, rows: Rows, baseline: Rows) -> list[str]:
    """Return an arm's line, one text for each of `COLUMNS`."""
    gap = [] if arm == BASELINE else difference(rows, baseline, "auc")
    return [
        arm,
        str(len(rows)),
        _interval([row["auc"] for row in rows]),
        _interval(gap),
        _interval([row["final"] for row in rows]),
        _mean([row["common"] for row in rows]),
        _courses(rows, "retry"),
        _courses(rows, "blank"),
        _mean([row["evaluations"][-1]["internalised"] for row in rows]),
        f"{np.mean([row['num_sequences'] for row in rows]):.0f}",
        f"{np.mean([row['num_tokens'] for row in rows]):.0f}",
        f"{np.mean([row['num_iterations'] for row in rows]):.0f}",
    ]


def table(lines: Sequence[Sequence[str]], title: str) -> Table:
    """Return the lines for a terminal."""
    shown = Table(*COLUMNS, title=title)
    for line in lines:
        shown.add_row(*line)
    return shown


def page(sections: Mapping[str, Sequence[Sequence[str]]], plot_name: str) -> str:
    """Return the tables as markdown, a section each, and the plot."""
    parts = []
    for title, lines in sections.items():
        body = [COLUMNS, ["---"] * len(COLUMNS), *lines]
        parts += [f"## {title}", "\n".join("| " + " | ".join(line) + " |" for line in body)]
    return "\n\n".join([*parts, f"![Accuracy on rare classes by sequences]({plot_name})"]) + "\n"


def write_page(path: Path, text: str) -> None:
    """Write the page below `MARK`; what a person wrote above it is kept."""
    told = path.read_text(encoding="utf-8").split(MARK)[0] if path.exists() else ""
    path.write_text(f"{told}{MARK}\n\n{text}", encoding="utf-8")


def plot(curves: Mapping[float, Mapping[str, Rows]], path: Path) -> None:
    """Draw accuracy on rare classes by sampled sequences, a panel for each difficulty."""
    import matplotlib  # takes a second, which is not for who only reads a table

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(curves), figsize=(5.5 * len(curves), 4), squeeze=False, constrained_layout=True
    )
    for axes, (eps, by_arm) in zip(panels[0], curves.items(), strict=True):
        for number, (arm, rows) in enumerate(by_arm.items()):
            at, mean, low, high = _curve(rows)
            color, style = COLORS[number % len(COLORS)], "-" if number < len(COLORS) else "--"
            axes.plot(at, mean, style, color=color, label=arm)
            axes.fill_between(at, low, high, color=color, alpha=0.12, linewidth=0)
        axes.set(title=f"eps {eps}", xlabel="sampled sequences", ylabel="rare classes", ylim=(0, 1))
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def sections(rows: Rows) -> dict[float, dict[str, list[Mapping[str, Any]]]]:
    """Return the results of each difficulty by arm, in the order in which they come."""
    found: dict[float, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["eps"], {}).setdefault(row["arm"], []).append(row)
    return found


def _curve(rows: Rows) -> tuple[Any, Any, Any, Any]:
    """Return the mean over seeds and its interval on a common grid of sequences."""
    at = np.linspace(0, min(row["num_sequences"] for row in rows), 9)
    values_SX = np.array(
        [
            np.interp(
                at,
                [e["num_sequences"] for e in row["evaluations"]],
                [e["rare"] for e in row["evaluations"]],
            )
            for row in rows
        ]
    )
    low, high = zip(*(bootstrap(values_S) for values_S in values_SX.T), strict=True)
    return at, values_SX.mean(axis=0), low, high


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:  # one seed has no interval
        return _mean(values)
    low, high = bootstrap(values)
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3f}" if known else "-"


def _courses(rows: Rows, control: str) -> str:
    """Return the lift in mid-course and at the end."""
    told = [
        [e["lifts"][control] for e in row["evaluations"] if control in e["lifts"]] for row in rows
    ]
    told = [lifts for lifts in told if lifts]
    if not told:
        return "-"
    return f"{_mean([lifts[0] for lifts in told])}, {_mean([lifts[-1] for lifts in told])}"
