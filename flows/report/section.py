"""A section of the page, and how rows of the runs become what is drawn in it."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree as ET

from flows.report.figures import Plot, Series
from flows.report.history import History, Row
from flows.report.markup import table

ITERATION = "iteration"
Runs = Sequence[History]
Column = tuple[str, str]  # of a view or table, and what it is called here


@dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read what follows, plots and tables; `anchor` links to it."""

    anchor: str
    title: str
    lead: str
    plots: list[Plot] = field(default_factory=list)
    tables: list[ET.Element] = field(default_factory=list)

    @property
    def shown_plots(self) -> list[Plot]:
        """Those with something to draw."""
        return [plot for plot in self.plots if not plot.is_empty]

    @property
    def is_empty(self) -> bool:
        """Whether the runs have nothing of this."""
        return not self.shown_plots and not self.tables


def lines(runs: Runs, name: str, columns: Sequence[Column]) -> dict[str, list[Series]]:
    """Return columns of a table or view by iteration, for each run."""
    return {
        run.run_id: [Series(label, run.points(name, column)) for column, label in columns]
        for run in runs
    }


def by(runs: Runs, name: str, key: str, column: str) -> dict[str, list[Series]]:
    """Return a column by iteration, a series for each value of `key`."""
    return {
        run.run_id: [
            Series(str(value), run.points(name, column, **{key: value}))
            for value in run.distinct(name, key)
        ]
        for run in runs
    }


def counted(
    runs: Runs, name: str, kind: Callable[[Row], str], order: Sequence[str] = ()
) -> dict[str, list[Series]]:
    """Return how many rows of each kind an iteration has; the kinds are the same for all runs."""
    counts = {
        run.run_id: Counter((row[ITERATION], kind(row)) for row in run.rows[name]) for run in runs
    }
    kinds = order or sorted({k for found in counts.values() for _, k in found})
    return {
        run_id: [
            Series(k, [(i, found[i, k]) for i in sorted({i for i, _ in found})]) for k in kinds
        ]
        for run_id, found in counts.items()
    }


def of_runs(
    runs: Runs, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str
) -> list[ET.Element]:
    """Return a table with a first column for the run, where there are several; none if empty."""
    start = 1 if len(runs) == 1 else 0
    shown = [row[start:] for row in rows]
    return [table(["run", *columns][start:], shown, title)] if shown else []
