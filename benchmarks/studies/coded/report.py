"""The table of arms and the plot: means over seeds, intervals by bootstrap, differences paired."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.studies.coded.arms import ARMS, TUNING_SEEDS
from rrl_core.intervals import bootstrap_interval

BASELINE = ARMS[0].name
MARK = "<!-- from here on written by benchmarks/studies/coded -->"
COLUMNS = (
    "arm",
    "seeds",
    "AUC",
    "AUC - " + BASELINE,
    "final",
    "final - " + BASELINE,
    "common",
    "lift over retry",
    "lift over blank",
    "internalised",
)
MORE_COLUMNS = (
    "arm",
    "pass@1",
    "pass@8",
    "distinct",
    "entropy",
    "lost_rate",
    "recovered",
    "sequences",
    "tokens",
    "updates",
    "CPU s",
)
CONTROLS = {  # what an arm is held against, beside the baseline
    "srrl": (
        "raw-feedback",
        "random-review",
        "retry",
        "blank",
        "srrl-no-memory",
        "srrl-no-distil",
        "srrl-no-feedback",
        "raft",
        "grpo-temperature",
        "grpo-entropy",
    ),
    "rrl+srrl": ("srrl", "rrl-trajectory"),
    "rrl-trajectory": ("uniform", "stale", "raft", "grpo-temperature", "grpo-entropy"),
    "rrl-state": ("rrl-state-uniform", "rrl-state-stale"),
}
CONTROL_COLUMNS = ("arm - control", "seeds", "AUC", "final")
COLORS = ("#c8632b", "#3d8361", "#7a4b8c", "#4b8cb0", "#b8a03c", "#a3455a", "#5d6b78")
PANELS = ("baselines", "replay", "second attempts by what they are given", "ways to review")
AS_IT_IS = next(arm for arm in ARMS if arm.name == "srrl")

Rows = Sequence[Mapping[str, Any]]
"""Results as `results.read_results` gives them."""


def difference(rows: Rows, baseline: Rows, name: str) -> list[float]:
    """Return by how much each seed's result is above that of the baseline's same seed."""
    of_seed = {row["seed"]: row[name] for row in baseline}
    return [row[name] - of_seed[row["seed"]] for row in rows if row["seed"] in of_seed]


def cells(arm: str, rows: Rows, baseline: Rows) -> list[str]:
    """Return an arm's line, one text for each of `COLUMNS`."""
    gaps = [
        [] if arm == BASELINE else difference(rows, baseline, name) for name in ("auc", "final")
    ]
    return [
        arm,
        str(len(rows)),
        _interval([row["auc"] for row in rows]),
        _interval(gaps[0]),
        _interval([row["final"] for row in rows]),
        _interval(gaps[1]),
        _mean([row["common"] for row in rows]),
        _courses(rows, "retry"),
        _courses(rows, "blank"),
        _mean([row["evaluations"][-1]["internalised"] for row in rows]),
    ]


def more_cells(arm: str, rows: Rows) -> list[str]:
    """Return an arm's line, one text for each of `MORE_COLUMNS`; some at start, middle and end."""
    varied = ("pass_at_1", "pass_at_8", "distinct", "entropy")
    counts = ("num_sequences", "num_tokens", "num_iterations", "cpu_s")
    return [
        arm,
        *(_over_time(rows, name) for name in varied),
        _interval([row["lost_rate"] for row in rows if row["lost_rate"] is not None]),
        f"{np.mean([row['recovered'] for row in rows]):.1f}",
        *(f"{np.mean([row[name] for row in rows]):.0f}" for name in counts),
    ]


def control_cells(by_arm: Mapping[str, Rows]) -> list[list[str]]:
    """Return a line for each arm and control that share seeds, for each of `CONTROL_COLUMNS`."""
    lines = []
    for arm, controls in CONTROLS.items():
        for control in controls:
            gaps = [
                difference(by_arm.get(arm, ()), by_arm.get(control, ()), name)
                for name in ("auc", "final")
            ]
            if gaps[0]:
                lines.append([f"{arm} - {control}", str(len(gaps[0])), *map(_interval, gaps)])
    return lines


def tables(by_arm: Mapping[str, Rows]) -> list[list[Sequence[str]]]:
    """Return the tables of a section, their first lines being the columns."""
    baseline, controls = by_arm.get(BASELINE, []), control_cells(by_arm)
    return [
        [COLUMNS, *(cells(name, rows, baseline) for name, rows in by_arm.items())],
        *([[CONTROL_COLUMNS, *controls]] if controls else []),
        [MORE_COLUMNS, *(more_cells(name, rows) for name, rows in by_arm.items())],
    ]


def shown(lines: Sequence[Sequence[str]], title: str) -> Table:
    """Return a table for a terminal."""
    table = Table(*lines[0], title=title)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def page(sections: Mapping[str, Mapping[str, Rows]], plots: Mapping[str, str]) -> str:
    """Return the tables as markdown, a section each, with the plot of those that have one."""
    parts = []
    for title, by_arm in sections.items():
        parts.append(f"## {title}")
        for head, *lines in tables(by_arm):
            body = [head, ["---"] * len(head), *lines]
            parts.append("\n".join("| " + " | ".join(line) + " |" for line in body))
        if title in plots:
            parts.append(f"![Accuracy on rare classes by sequences, {title}]({plots[title]})")
    return "\n\n".join(parts) + "\n"


def write_page(path: Path, text: str) -> None:
    """Write the page below `MARK`; what a person wrote above it is kept."""
    told = path.read_text(encoding="utf-8").split(MARK)[0] if path.exists() else ""
    path.write_text(f"{told}{MARK}\n\n{text}", encoding="utf-8")


def plot(by_arm: Mapping[str, Rows], title: str, path: Path) -> None:
    """Draw accuracy on rare classes by sampled sequences: arms of a kind share a panel."""
    import matplotlib  # takes a second, which is not for who only reads a table

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in PANELS if any(_panel(rows[0]) == kind for rows in by_arm.values())]
    width = min(2, len(kinds))
    figure, panels = plt.subplots(
        -(-len(kinds) // 2),
        width,
        figsize=(6.5 * width, 4.2 * -(-len(kinds) // 2)),
        squeeze=False,
        constrained_layout=True,
    )
    for axes in panels.flat[len(kinds) :]:
        axes.set_axis_off()
    for axes, kind in zip(panels.flat, kinds, strict=False):
        own = [n for n, rows in by_arm.items() if _panel(rows[0]) == kind and n != BASELINE]
        for color, name in zip(itertools.cycle(COLORS), own, strict=False):
            _draw(axes, by_arm[name], name, color, "-" if own.index(name) < len(COLORS) else "--")
        if BASELINE in by_arm:
            _draw(axes, by_arm[BASELINE], BASELINE, "black", ":")
        axes.set(title=kind, xlabel="sampled sequences", ylabel="rare classes", ylim=(0, 1))
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw(axes: Any, rows: Rows, name: str, color: str, style: str) -> None:
    at, mean, low, high = _curve(rows)
    axes.plot(at, mean, style, color=color, label=f"{name} {mean[-1]:.2f}")
    axes.fill_between(at, low, high, color=color, alpha=0.1, linewidth=0)


def _panel(row: Mapping[str, Any]) -> str:
    """Return the panel of a result's arm."""
    arm = row["job"]["arm"]
    if arm["second"] is None:
        return PANELS[1] if arm["unit"] is not None else PANELS[0]
    is_other_review = arm["second"] == "review" and arm["has_feedback"]
    return PANELS[3] if is_other_review and arm["name"] != AS_IT_IS.name else PANELS[2]


def sections(rows: Rows) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Return the results by section and arm, in the order in which they come."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        title = f"eps {row['eps']}, {row['job']['settings']['budget']} sequences"
        if row["seed"] in TUNING_SEEDS:
            title = f"Tuning on other seeds, {title}"
        found.setdefault(title, {}).setdefault(row["arm"], []).append(row)
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
    means = values_SX.mean(axis=0)
    intervals = [bootstrap_interval(values_S) for values_S in values_SX.T]
    low, high = zip(
        *(found or (mean, mean) for found, mean in zip(intervals, means, strict=True)), strict=True
    )
    return at, means, low, high


def _interval(values: Sequence[float]) -> str:
    found = bootstrap_interval(values)
    if found is None:
        return _mean(values)
    return f"{np.mean(values):.3f} [{found[0]:.3f}, {found[1]:.3f}]"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3f}" if known else "-"


def _over_time(rows: Rows, name: str) -> str:
    """Return means at the start, in the middle and at the end."""
    told = [
        [e["variety"][name] for e in row["evaluations"] if e["variety"] is not None] for row in rows
    ]
    return ", ".join(_mean(each) for each in zip(*told, strict=False))


def _courses(rows: Rows, control: str) -> str:
    """Return the lift in mid-course and at the end."""
    told = [
        [e["lifts"][control] for e in row["evaluations"] if control in e["lifts"]] for row in rows
    ]
    told = [lifts for lifts in told if lifts]
    if not told:
        return "-"
    return f"{_mean([lifts[0] for lifts in told])}, {_mean([lifts[-1] for lifts in told])}"
