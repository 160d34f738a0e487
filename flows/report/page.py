"""The page: header, sections and rollout browser, from a store as of one commit."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from flows.report.figures import figure
from flows.report.history import History, configs_that_differ, read_history
from flows.report.markup import Node, document, element, json_block, number, table
from flows.report.pieces import token_pieces
from flows.report.rollouts import Browsable, browsable, role_name
from flows.report.section import Section, of_runs
from flows.report.sections import sections
from storage import Moment

Advance = Callable[[float, str], None]

_OUTCOMES = ("solved", "failed", "unscored", "error")
_WHY = {
    "newest_evaluation": "of the newest evaluation",
    "replayed": "picked for replay",
    "failed": "that failed to be sampled or scored",
    "even": "spread evenly over iterations and roles",
}


@dataclass(frozen=True)
class Page:
    """The finished text, and what it holds."""

    html: str
    num_rollouts: int
    num_shown: int
    num_plots: int


def make_page(moment: Moment, run_ids: Sequence[str], num_rollouts: int, advance: Advance) -> Page:
    """Return the report of some runs.

    Args:
        moment: the store as of a commit.
        run_ids: the runs, each once.
        num_rollouts: the most rollouts that can be browsed.
        advance: told how far it is.
    """
    runs = []
    for place, run_id in enumerate(run_ids):
        advance(0.5 * place / len(run_ids), f"reads {run_id}")
        runs.append(read_history(moment, run_id))
    advance(0.5, "reads rollouts")
    found = browsable(moment, run_ids, num_rollouts)
    advance(0.8, "draws")
    shown = sections(runs)
    plots = iter(range(sum(len(section.shown_plots) for section in shown)))
    body: list[Node] = [
        _navigation(shown),
        element(
            "main",
            _masthead(moment, runs),
            *(_section(section, plots) for section in shown),
            _browser(found, runs),
            _footer(moment),
            class_="page",
        ),
    ]
    data = json_block("rollouts", found.data | {"pieces": _pieces(runs, found)})
    html = document(f"RRL: {', '.join(run_ids)}", body, data)
    num_plots = sum(len(section.shown_plots) for section in shown)
    return Page(html, found.num_rollouts, found.num_shown, num_plots)


def _navigation(shown: Sequence[Section]) -> ET.Element:
    anchors = ["runs", *(section.anchor for section in shown), "rollouts-browser"]
    links = [(anchor, anchor.partition("-")[0].capitalize()) for anchor in anchors]
    items = [element("li", element("a", name, href=f"#{anchor}")) for anchor, name in links]
    return element("nav", element("ul", *items), class_="contents", aria_label="Contents")


def _masthead(moment: Moment, runs: Sequence[History]) -> ET.Element:
    where = f"store {moment.store.path}, as of commit {moment.number}:{moment.sha256}"
    title = runs[0].run_id if len(runs) == 1 else f"{len(runs)} runs side by side"
    facts = table(
        ["", *(run.run_id for run in runs)], _facts(runs), "The runs" if len(runs) > 1 else ""
    )
    budget = of_runs(runs, ["role", "rollouts", "tokens"], _budget(runs), "Sampled, by role")
    return element(
        "section",
        element(
            "header",
            element("h1", title),
            element("p", where, class_="quiet"),
            class_="masthead",
        ),
        _tiles(runs[0]) if len(runs) == 1 else None,
        element("div", facts, *budget, class_="tables"),
        *_configs(runs),
        id="runs",
    )  # fmt: skip


def _tiles(run: History) -> ET.Element:
    """Return the few numbers a person asks for first."""
    history = [row for row in run.rows["training_history"] if row["mean_reward"] is not None]
    tiles: list[tuple[str, str, str]] = []
    if history:
        first, last = history[0], history[-1]
        before = f"{number(first['mean_reward'])} in iteration {first['iteration']}"
        tiles.append(("mean reward", number(last["mean_reward"]), before))
    for row in _newest_evaluations(run):
        interval = f"95 % interval {number(row['ci_low'])} to {number(row['ci_high'])}"
        tiles.append((f"{row['name']}, {row['scorer']}", number(row["mean_score"]), interval))
    if run.rows["forgetting"]:
        row = run.rows["forgetting"][-1]
        tiles.append(("prompts ever solved", number(row["num_ever_solved"]),
                      f"{row['num_lost']} lost, {row['num_recovered']} recovered"))  # fmt: skip
    sampled = run.rows["sampled_budget"]
    if sampled:
        tokens = sum(row["num_tokens"] for row in sampled)
        tiles.append(("rollouts", number(sum(row["num_rollouts"] for row in sampled)),
                      f"{number(tokens)} tokens sampled"))  # fmt: skip
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", beside)))
            for name, value, beside in tiles
        ),
        class_="tiles",
    )


def _newest_evaluations(run: History) -> list[dict[str, Any]]:
    rows = run.rows["evaluations"]
    newest = max((row["iteration"] for row in rows), default=None)
    return [row for row in rows if row["iteration"] == newest]


def _facts(runs: Sequence[History]) -> list[list[Any]]:
    """Return what the runs are, a row for each fact and a column for each run."""
    rows: list[tuple[str, Callable[[History], Any]]] = [
        ("state", lambda run: run.overview["state"]),
        ("kind", lambda run: run.overview["kind"]),
        ("opened", lambda run: f"{run.overview['opened_at']:%Y-%m-%d %H:%M} UTC"),
        ("iterations", lambda run: f"{number(run.overview['last_iteration'])} of "
                                   f"{number(run.overview['planned_iterations'])}"),
        ("last mean reward", lambda run: number(run.overview["last_mean_reward"])),
        ("newest evaluation", _evaluated),
        ("configuration", lambda run: run.config.get("run", {}).get("name", "")),
        ("model", lambda run: run.config.get("model", {}).get("name", "")),
        ("task", lambda run: run.config.get("task", {}).get("name", "")),
        ("algorithm", lambda run: run.config.get("learner", {}).get("algorithm", "")),
        ("forked from", lambda run: run.opened["parent_run_id"] or ""),
        ("code", lambda run: run.opened["code_version"]),
        ("packages", _packages),
        ("rollouts, tokens", _sampled),
    ]  # fmt: skip
    cells = [[name, *(str(read(run)) for run in runs)] for name, read in rows]
    return [row for row in cells if any(row[1:])]


def _evaluated(run: History) -> str:
    return "; ".join(
        f"{row['scorer']} {number(row['mean_score'])} [{number(row['ci_low'])}, "
        f"{number(row['ci_high'])}]"
        for row in _newest_evaluations(run)
    )


def _packages(run: History) -> str:
    packages = json.loads(run.opened["packages_json"])
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def _sampled(run: History) -> str:
    rows = run.rows["sampled_budget"]
    return ", ".join(number(sum(row[c] for row in rows)) for c in ("num_rollouts", "num_tokens"))


def _budget(runs: Sequence[History]) -> list[list[Any]]:
    return [
        [run.run_id, role_name(row["role"], row["arm"]), row["num_rollouts"], row["num_tokens"]]
        for run in runs
        for row in run.rows["sampled_budget"]
    ]


def _configs(runs: Sequence[History]) -> list[ET.Element]:
    """Return one run's configuration, or where those of several differ."""
    if len(runs) == 1:
        text = json.dumps(runs[0].config, indent=2, ensure_ascii=False)
        return [element("details", element("summary", "Configuration"), element("pre", text))]
    rows = configs_that_differ(runs)
    columns = ["key", *(run.run_id for run in runs)]
    differing = table(columns, rows, "Where the configurations differ")
    return (
        [differing] if rows else [element("p", "The configurations are the same.", class_="quiet")]
    )


def _section(section: Section, places: Any) -> ET.Element:
    drawn = [figure(plot, next(places)) for plot in section.shown_plots]
    return element(
        "section",
        element("h2", section.title),
        element("p", section.lead, class_="lead"),
        element("div", *drawn, class_="plots") if drawn else None,
        element("div", *section.tables, class_="tables") if section.tables else None,
        id=section.anchor,
    )


def _pieces(runs: Sequence[History], found: Browsable) -> dict[str, dict[int, str] | None]:
    models = {run.run_id: run.config.get("model", {}).get("name", "") for run in runs}
    default = next(iter(models.values()))
    return {
        run_id: token_pieces(models.get(run_id, default), ids)
        for run_id, ids in found.vocabulary.items()
    }


def _browser(found: Browsable, runs: Sequence[History]) -> ET.Element:
    chosen = ", ".join(
        f"{found.why[why]:,} {text}" for why, text in _WHY.items() if why in found.why
    )
    lead = f"This page holds {found.num_shown:,} of {found.num_rollouts:,} rollouts"
    lead += f": {chosen}." if chosen else "."
    if found.num_cut:
        lead += (
            f" Of {found.num_cut:,} long ones it holds the first {found.limits.characters:,} "
            f"characters and {found.limits.tokens:,} tokens."
        )
    listing = element(
        "div", element("div", id="rows"), id="list", role="listbox", tabindex="0",
        aria_label="Rollouts; arrow keys move",
    )  # fmt: skip
    detail = element(
        "div", id="detail", tabindex="0", role="region", aria_label="The chosen rollout"
    )
    return element(
        "section",
        element("h2", "Rollouts"),
        element(
            "p",
            f"{lead} ",
            element("code", "--rollouts N"),
            " asks for more or fewer.",
            class_="lead",
        ),
        _filters(found, runs) if found.num_shown else None,
        element("div", listing, detail, class_="browser") if found.num_shown else None,
        element("noscript", element("p", "The list of rollouts needs this page's script.")),
        id="rollouts-browser",
    )


def _filters(found: Browsable, runs: Sequence[History]) -> ET.Element:
    data = found.data
    names = zip(data["role"], data["arm"], strict=True)
    roles = sorted({role_name(role, arm) for role, arm in names})
    outcomes = [outcome for outcome in _OUTCOMES if outcome in data["outcome"]]
    outcomes += ["replayed"] if data["picks"] else []
    return element(
        "form",
        element(
            "label",
            "Search prompts, completions, ids",
            element("input", id="search", type="search", autocomplete="off"),
        ),
        _choice("run", "Run", [run.run_id for run in runs]) if len(runs) > 1 else None,
        _choice("role", "Role", roles),
        _choice("outcome", "Outcome", outcomes),
        _range("Iterations", ("first", "last"), "1"),
        _range("Score", ("low", "high"), "any"),
        element("button", "Clear", type="reset"),
        element("p", id="found", class_="quiet", role="status", aria_live="polite"),
        id="filters",
    )


def _choice(name: str, label: str, values: Sequence[str]) -> ET.Element:
    options = [element("option", "all", value="")]
    options += [element("option", value, value=value) for value in values]
    return element("label", label, element("select", *options, id=name))


def _range(label: str, names: tuple[str, str], step: str) -> ET.Element:
    inputs = [
        element("input", id=name, type="number", step=step, placeholder=hint,
                aria_label=f"{label}, {hint}")
        for name, hint in zip(names, ("from", "to"), strict=True)
    ]  # fmt: skip
    return element("fieldset", element("legend", label), element("div", *inputs, class_="pair"))


def _footer(moment: Moment) -> ET.Element:
    query = f"rrl sql QUERY --as-of {moment.number} --store {moment.store.path}"
    text = "Made from the event log alone. Every figure can be asked again: "
    return element("footer", text, element("code", query))
