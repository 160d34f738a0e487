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
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree as ET

from flows.report.markup import element, number, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float | None]]
Bounds = Sequence[tuple[float, float | None, float | None]]

NUM_COLOURS = 6
MAX_TABLE_ROWS = 60
MOST_MARKERS = 40  # points that are marked one by one
MOST_ROUGH = 60  # points of a line; a longer one is averaged over windows
_SIZE_INCHES = (4.4, 2.6)
_PLACE = (0.12, 0.17, 0.85, 0.73)  # of the axes: left, bottom, width, height
_LEAST_SPREAD = 0.01  # of y: less is rounding, and would look like change
_ROLES = {"ink": "#010000", "grid": "#010001", "guide": "#010002"} | {
    f"s{n}": f"#0200{n:02x}" for n in range(NUM_COLOURS)
}
_VARIABLES = {colour: f"var(--{role})" for role, colour in _ROLES.items()}
_DASHES = ("-", "--", ":", "-.")
_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "rrl", "font.size": 9, "text.parse_math": False,
    "figure.facecolor": "none", "axes.facecolor": "none",
    "axes.edgecolor": _ROLES["grid"], "axes.labelcolor": _ROLES["ink"],
    "text.color": _ROLES["ink"], "xtick.color": _ROLES["ink"], "ytick.color": _ROLES["ink"],
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": _ROLES["grid"], "grid.linewidth": 0.6,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "xtick.major.size": 3, "ytick.major.size": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One line or layer: points (x, y), y None where unknown; `bounds` are (x, low, high)."""

    label: str
    points: Points
    bounds: Bounds = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        return all(y is None for _, y in self.points)


@dataclass(frozen=True)
class Plot:
    """What to draw; `title` says what to look for.

    `series` holds those of each run, by run id. Layers are drawn for one run alone, lines for
    several. `guides` are values of y to compare with, by name;
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
        return all(series.is_empty for of_run in self.series.values() for series in of_run)


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
    """Return (name, series, colour, dash) of what is not empty.

    Runs differ in colour and the series of a run in dashes; those of one run alone in colour.
    """
    is_alone = len(plot.series) == 1
    found = []
    for run_number, (run_id, of_run) in enumerate(plot.series.items()):
        for place, series in enumerate(of_run):
            colour, dash = (place, 0) if is_alone else (run_number, place)
            name = series.label if is_alone else f"{run_id} · {series.label}".removesuffix(" · ")
            if not series.is_empty:
                found.append((name, series, colour % NUM_COLOURS, dash % len(_DASHES)))
    return found


def _legend(plot: Plot) -> ET.Element | None:
    looks = _looks(plot)
    is_plain = len(looks) == 1 and len(plot.series) == 1
    items = [
        element("li", _swatch(colour, dash), name)
        for name, _, colour, dash in looks
        if not is_plain
    ]
    if any(_window(series) > 1 for _, series, _, _ in looks if plot.kind == "line"):
        items.append(element("li", "strong: moving average"))
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
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        drawn = Figure(figsize=_SIZE_INCHES)
        axes = drawn.add_axes(_PLACE)
        is_layered = plot.kind == "stacked" and len(plot.series) == 1
        (_draw_layers if is_layered else _draw_lines)(axes, plot)
        _label(axes, plot)
        target = io.StringIO()
        drawn.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    root = _restyled(ET.fromstring(target.getvalue()), place)
    root.set("role", "img")
    root.set("aria-label", f"{plot.title} {plot.y_label} by {plot.x_label}.")
    return root


def _draw_lines(axes: "Axes", plot: Plot) -> None:
    for _, series, colour, dash in _looks(plot):
        ink = _ROLES[f"s{colour}"]
        xs = [x for x, _ in series.points]
        ys = [math.nan if y is None else y for _, y in series.points]
        window = _window(series) if plot.kind == "line" else 1
        look: dict[str, Any] = {"color": ink, "linestyle": _DASHES[dash], "linewidth": 1.5}
        if window > 1:
            axes.plot(xs, ys, color=ink, linewidth=0.6, alpha=0.3)
            axes.plot(xs, _moving_average(ys, window), **look)
        else:
            axes.plot(xs, ys, marker="o" if len(xs) <= MOST_MARKERS else "", markersize=2.8, **look)
        bounds = [b for b in series.bounds if b[1] is not None and b[2] is not None]
        if bounds:
            places, lows, highs = zip(*bounds, strict=True)
            axes.fill_between(places, lows, highs, color=ink, alpha=0.16, linewidth=0)
    for _, y in plot.guides:
        axes.axhline(y, color=_ROLES["guide"], linewidth=1, linestyle="--")
    if plot.kind == "calibration":
        axes.plot((0, 1), (0, 1), color=_ROLES["guide"], linewidth=1, linestyle="--")


def _window(series: Series) -> int:
    """Return over how many points a line is averaged: long ones are too rough to be read."""
    return max(1, len(series.points) // MOST_ROUGH)


def _moving_average(ys: Sequence[float], window: int) -> list[float]:
    """Return the mean of the known values among `window` points before and after each."""
    found = []
    for place in range(len(ys)):
        near = [y for y in ys[max(0, place - window) : place + window + 1] if not math.isnan(y)]
        found.append(math.fsum(near) / len(near) if near else math.nan)
    return found


def _draw_layers(axes: "Axes", plot: Plot) -> None:
    """Draw layers on each other: bars, or areas where bars would be too thin."""
    [of_run] = plot.series.values()
    xs = [x for x, _ in of_run[0].points]
    layers = [[y or 0.0 for _, y in series.points] for series in of_run]
    inks = [_ROLES[f"s{place % NUM_COLOURS}"] for place in range(len(layers))]
    if len(xs) > MOST_MARKERS:
        axes.stackplot(xs, layers, colors=inks, linewidth=0, step="mid")
        return
    below = [0.0] * len(xs)
    for layer, ink in zip(layers, inks, strict=True):
        axes.bar(xs, layer, 0.8, below, color=ink, linewidth=0)
        below = [low + y for low, y in zip(below, layer, strict=True)]


def _label(axes: "Axes", plot: Plot) -> None:
    """Name the axes, that of y above it, where it takes no width; keep rounding out of sight."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel(plot.x_label)
    axes.set_title(plot.y_label, loc="left", fontsize=9)
    if plot.kind == "calibration":
        axes.set_xlim(0, 1)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    low, high = axes.get_ylim()
    largest = max(abs(low), abs(high))
    if plot.is_fraction:
        axes.set_ylim(-0.02, 1.02)
    elif high - low < _LEAST_SPREAD * largest:
        axes.set_ylim(low - _LEAST_SPREAD * largest, high + _LEAST_SPREAD * largest)
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if largest >= 1e4 else "{x:.4g}")


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
