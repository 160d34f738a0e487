"""Plots as SVG that the page's style sheet colours, in light and in dark.

matplotlib lays out and draws with colours that stand for roles (ink, grid, a series); what it wrote
is then rewritten so that no style is inline, which the page's policy would refuse. A drawing holds
no text but numbers and our own labels: names of runs and scorers stand in the HTML around it.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree as ET

from flows.report.markup import element, number, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float | None]]
Bounds = Sequence[tuple[float, float | None, float | None]]

NUM_COLOURS = 6
MAX_TABLE_ROWS = 60
_SIZE_INCHES = (4.4, 2.6)
_ROLES = {"ink": "#010000", "grid": "#010001", "guide": "#010002"} | {
    f"s{n}": f"#0200{n:02x}" for n in range(NUM_COLOURS)
}
_VARIABLES = {colour: f"var(--{role})" for role, colour in _ROLES.items()}
_DASHES = ("-", "--", ":", "-.")
_SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "rrl", "font.size": 8.5, "text.parse_math": False,
    "figure.facecolor": "none", "axes.facecolor": "none",
    "axes.edgecolor": _ROLES["grid"], "axes.labelcolor": _ROLES["ink"],
    "text.color": _ROLES["ink"], "xtick.color": _ROLES["ink"], "ytick.color": _ROLES["ink"],
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": _ROLES["grid"], "grid.linewidth": 0.6,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "xtick.major.size": 3, "ytick.major.size": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One line or one layer of bars: points (x, y), y None where unknown; `bounds` (x, low, high)."""

    label: str
    points: Points
    bounds: Bounds = ()


@dataclass(frozen=True)
class Plot:
    """What to draw; `title` says what to look for.

    `series` holds those of each run, by run id. `guides` are values of y to compare with, by name;
    in a `calibration` x and y are compared with each other.
    """

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[Series]]
    kind: Literal["line", "stacked", "calibration"] = "line"
    guides: tuple[tuple[str, float], ...] = ()
    is_fraction: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(y is not None for s in self._all() for _, y in s.points)

    def _all(self) -> list[Series]:
        return [series for of_run in self.series.values() for series in of_run]


def figure(plot: Plot, place: int) -> ET.Element:
    """Return a plot with its title, legend, drawing and numbers; `place` is its own on the page."""
    return element(
        "figure",
        element("figcaption", plot.title),
        _legend(plot),
        _drawing(plot, place),
        element("details", element("summary", "Numbers"), _numbers(plot)),
    )


def _looks(plot: Plot) -> list[tuple[str, Series, int, int]]:
    """Return (name, series, colour, dash): runs differ in colour, the series of one in dashes.

    One run alone, and layers of bars, differ in colour.
    """
    is_alone = len(plot.series) == 1
    by_series = is_alone or plot.kind == "stacked"
    found = []
    for run_number, (run_id, of_run) in enumerate(plot.series.items()):
        for place, series in enumerate(of_run):
            colour, dash = (place, 0) if by_series else (run_number, place)
            name = series.label if is_alone else f"{run_id} · {series.label}".removesuffix(" · ")
            found.append((name, series, colour % NUM_COLOURS, dash % len(_DASHES)))
    return found


def _legend(plot: Plot) -> ET.Element | None:
    looks = _looks(plot)
    names = [(name, colour, dash) for name, _, colour, dash in looks if len(looks) > 1]
    items = [element("li", _swatch(colour, dash), name) for name, colour, dash in names]
    if plot.kind == "stacked" and len(plot.series) > 1:
        items.append(element("li", f"bars from left to right: {', '.join(plot.series)}"))
    items += [element("li", _swatch(None, 1), f"{name} {y:g}") for name, y in plot.guides]
    return element("ul", *items, class_="legend") if items else None


def _swatch(colour: int | None, dash: int) -> ET.Element:
    kind = "guide" if colour is None else f"s{colour}"
    drawn = ET.Element("svg", {"class": "swatch", "viewBox": "0 0 22 8", "aria-hidden": "true"})
    line = {"x1": "0", "x2": "22", "y1": "4", "y2": "4", "stroke": f"var(--{kind})"}
    dashes = {} if dash == 0 else {"stroke-dasharray": ("", "6 3", "2 3", "7 2 2 2")[dash]}
    ET.SubElement(drawn, "line", line | {"stroke-width": "2.5"} | dashes)
    return drawn


def _numbers(plot: Plot) -> ET.Element:
    """Return the plot as a table, at most so many rows, evenly chosen."""
    looks = _looks(plot)
    columns = [dict(series.points) for _, series, _, _ in looks]
    xs = sorted({x for column in columns for x in column})
    shown = evenly(xs, MAX_TABLE_ROWS)
    rows = [[_plain(x), *(_with_bounds(s, column, x) for (_, s, _, _), column in
             zip(looks, columns, strict=True))] for x in shown]  # fmt: skip
    caption = plot.title
    if len(shown) < len(xs):
        caption += f" ({len(shown)} of {len(xs)} rows, evenly chosen)"
    return table([plot.x_label, *(name or plot.y_label for name, _, _, _ in looks)], rows, caption)


def evenly(items: Sequence[float], most: int) -> list[float]:
    """Return at most `most` items, first and last among them, at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def _plain(x: float) -> str:
    return f"{x:g}"


def _with_bounds(series: Series, column: dict[float, float | None], x: float) -> str | float | None:
    y = column.get(x)
    for place, low, high in series.bounds:
        if place == x and low is not None and high is not None:
            return f"{number(y)} [{number(low)}, {number(high)}]"
    return y


def _drawing(plot: Plot, place: int) -> ET.Element:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        drawn = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = drawn.add_subplot()
        (_draw_stacked if plot.kind == "stacked" else _draw_lines)(axes, plot)
        _label(axes, plot)
        target = io.StringIO()
        FigureCanvasSVG(drawn).print_svg(target, metadata={"Date": None, "Creator": None})
    root = _restyled(ET.fromstring(target.getvalue()), place)
    root.set("role", "img")
    root.set("aria-label", f"{plot.title} {plot.y_label} by {plot.x_label}.")
    return root


def _draw_lines(axes: "Axes", plot: Plot) -> None:
    for _, series, colour, dash in _looks(plot):
        ink = _ROLES[f"s{colour}"]
        points = [(x, math.nan if y is None else y) for x, y in series.points]
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        marker = "o" if len(points) <= 40 else ""
        axes.plot(xs, ys, color=ink, linestyle=_DASHES[dash], linewidth=1.5, marker=marker,
                  markersize=2.8)  # fmt: skip
        bounds = [b for b in series.bounds if b[1] is not None and b[2] is not None]
        if bounds:
            places, lows, highs = zip(*bounds, strict=True)
            axes.fill_between(places, lows, highs, color=ink, alpha=0.16, linewidth=0)
    for _, y in plot.guides:
        axes.axhline(y, color=_ROLES["guide"], linewidth=1, linestyle="--")
    if plot.kind == "calibration":
        axes.plot((0, 1), (0, 1), color=_ROLES["guide"], linewidth=1, linestyle="--")


def _draw_stacked(axes: "Axes", plot: Plot) -> None:
    """Draw layers of bars on each other, the runs side by side."""
    width = 0.8 / len(plot.series)
    for run_number, of_run in enumerate(plot.series.values()):
        below: dict[float, float] = {}
        for place, series in enumerate(of_run):
            xs = [x for x, _ in series.points]
            ys = [y or 0.0 for _, y in series.points]
            axes.bar([x + (run_number + 0.5) * width - 0.4 for x in xs], ys, width,
                     [below.get(x, 0.0) for x in xs],
                     color=_ROLES[f"s{place % NUM_COLOURS}"], linewidth=0)  # fmt: skip
            below = {x: below.get(x, 0.0) + y for x, y in zip(xs, ys, strict=True)}


def _label(axes: "Axes", plot: Plot) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.kind == "calibration":
        axes.set_xlim(0, 1)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if plot.is_fraction:
        axes.set_ylim(-0.02, 1.02)
    elif max(map(abs, axes.get_ylim())) >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)


def _restyled(root: ET.Element, place: int) -> ET.Element:
    """Return the drawing without inline styles, foreign names and ids that are not used."""
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:href="|url\()#([\w.-]+)', text))
    for node in list(root.iter()):
        node.tag = node.tag.rpartition("}")[2]
        for child in list(node):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                node.remove(child)
        _restyle(node, used, place)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("class", "plot")
    return root


def _restyle(node: ET.Element, used: set[str], place: int) -> None:
    attributes: dict[str, str] = {}
    for name, value in node.attrib.items():
        name = name.rpartition("}")[2]
        if name == "style":
            attributes |= dict(_presentation(value))
        elif name == "id":
            attributes |= {"id": f"g{place}-{value}"} if value in used else {}
        elif name in ("href", "clip-path"):
            attributes[name] = value.replace("#", f"#g{place}-", 1)
        else:
            attributes[name] = value
    for name in ("fill", "stroke"):
        if (colour := attributes.get(name)) in _VARIABLES:
            attributes[name] = _VARIABLES[colour]
    node.attrib.clear()
    node.attrib.update(attributes)


def _presentation(style: str) -> list[tuple[str, str]]:
    """Return the declarations of a style as attributes; of a font only its size."""
    found = []
    for declaration in style.split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            found += [("font-size", size[1])] if size else []
        elif name and name != "font-family":
            found.append((name, value))
    return found
