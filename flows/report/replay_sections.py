"""What was gone back to, and what came of it: replay buffer, retries, review and memory."""

from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree as ET

from flows.report.figures import Plot, Series
from flows.report.history import Row
from flows.report.markup import bar, table
from flows.report.section import ITERATION, Runs, Section, counted, lines, of_runs

_OUTCOMES = ("rescued", "retained", "regressed", "still_failed")


def buffer(runs: Runs) -> Section:
    sizes = (("num_candidates", "candidates"), ("num_eligible", "eligible"))
    kinds = [
        ("by unit and reason", lambda row: f"{row['unit']}: {row['eligibility_reason']}"),
        ("eligible, by difficulty", _eligible(lambda row: row["difficulty"] or "unknown")),
        ("eligible, by age in policy versions", _eligible(_age_bucket)),
    ]
    has_entries = any(run.rows["buffer_counts"] for run in runs)
    tables = [_counts_table(runs, f"The buffer now, {what}", key) for what, key in kinds]
    return Section(
        "replay",
        "Replay buffer",
        "What history offers, what of it may be gone back to, and what was. Every candidate has a "
        "reason why it is eligible or not, every iteration one for replaying less than its share.",
        [
            Plot(
                "Is there enough that may be replayed?", ITERATION, "entries",
                lines(runs, "replay_plans", sizes),
            ),
            Plot(
                "What was picked?", ITERATION, "picks",
                counted(runs, "picks", lambda row: str(row["unit"])), kind="stacked",
            ),
            Plot(
                "From how far back? Old picks are early ideas", ITERATION,
                "mean age (policy versions)", _mean_age(runs),
            ),
            Plot(
                "Are picks spread out? Near zero, the same few come again", ITERATION,
                "priority entropy (nats)", lines(runs, "replay_plans", [("priority_entropy", "")]),
            ),
        ],
        [*(tables if has_entries else []), *_waiting(runs)],
    )  # fmt: skip


def _eligible(key: Callable[[Row], str]) -> Callable[[Row], str | None]:
    return lambda row: key(row) if row["eligibility_reason"] == "eligible" else None


def _age_bucket(row: Row) -> str:
    low, high = row["min_age"], row["max_age"]
    return str(low) if low == high else f"{low} to {high}"


def _counts_table(runs: Runs, title: str, key: Callable[[Row], str | None]) -> ET.Element:
    """Return how many entries of the buffer are of each kind, with a bar for one run alone."""
    counts = [Counter[str]() for _ in runs]
    for run, found in zip(runs, counts, strict=True):
        for row in sorted(run.rows["buffer_counts"], key=lambda row: int(row["min_age"])):
            if (kind := key(row)) is not None:
                found[kind] += row["num_entries"]
    kinds = dict.fromkeys(kind for found in counts for kind in found)
    if len(runs) > 1:
        rows = [[kind, *(found[kind] for found in counts)] for kind in kinds]
        return table(["", *(run.run_id for run in runs)], rows, title)
    [found] = counts
    most = max(found.values(), default=1)
    return table(["", "entries", ""], [[k, found[k], bar(found[k] / most)] for k in kinds], title)


def _mean_age(runs: Runs) -> dict[str, list[Series]]:
    found = {}
    for run in runs:
        ages: dict[int, list[int]] = {}
        for row in run.rows["picks"]:
            ages.setdefault(row[ITERATION], []).append(row["age"])
        found[run.run_id] = [Series("", [(i, sum(a) / len(a)) for i, a in sorted(ages.items())])]
    return found


def _waiting(runs: Runs) -> list[ET.Element]:
    rows = []
    for run in runs:
        reasons = Counter(row["waiting_reason"] for row in run.rows["replay_plans"])
        rows += [[run.run_id, str(why), n] for why, n in sorted(reasons.items(), key=str) if why]
    title = "Iterations that replayed less than their share, by reason"
    return of_runs(runs, ["reason", "iterations"], rows, title)


def retries(runs: Runs) -> Section:
    return Section(
        "retries",
        "Retry outcomes",
        "An old answer and a new one to the same problem, under one scorer version. Rescued: "
        "failed then, solved now. Regressed: solved then, failed now.",
        [
            Plot(
                "Is more rescued than regressed?", ITERATION, "retries",
                counted(runs, "retries", lambda row: str(row["outcome"]), _OUTCOMES),
                kind="stacked",
            )
        ],
        _outcome_table(runs),
    )  # fmt: skip


def _outcome_table(runs: Runs) -> list[ET.Element]:
    rows = []
    for run in runs:
        found = Counter((row["unit"], row["outcome"]) for row in run.rows["retries"])
        rows += [
            [run.run_id, unit, *(found[unit, outcome] for outcome in _OUTCOMES)]
            for unit in sorted({unit for unit, _ in found})
        ]
    return of_runs(runs, ["unit", *_OUTCOMES], rows, "Outcomes by unit, all iterations")


def review(runs: Runs) -> Section:
    rates = (
        ("trigger_rate", "prompts that were reviewed"),
        ("success_rate", "second attempts that succeed"),
        ("internalised_rate", "attempts at distilled prompts that succeed"),
    )
    flaws = (
        ("frac_malformed", "malformed"),
        ("leak_rate", "state an answer"),
        ("hit_rate", "shown an earlier review"),
    )
    sizes = (("memory_size", "reviews in memory"), ("num_distilled", "distilled"))
    lifts = [
        [run.run_id, row["arm"], row["leak"], row["num"], row["treated"], row["control"],
         _lift(row)]
        for run in runs
        for row in run.rows["review_lifts"]
    ]  # fmt: skip
    columns = ("compared with", "reviews", "pairs", "after review", "control", "lift [95 %]")
    title = "Does the review help? Second attempts against controls at the same prompts"
    return Section(
        "review",
        "Review and memory",
        "After a failed attempt the policy reviews it and tries again. The review helps only as "
        "far as its second attempts beat the controls; no lift is shown below 30 pairs.",
        [
            Plot(
                "Do second attempts succeed, and does it carry over?", ITERATION, "share",
                lines(runs, "review_history", rates), is_fraction=True,
            ),
            Plot(
                "Are reviews well formed, and do few give the answer away?", ITERATION,
                "share of reviews", lines(runs, "review_history", flaws), is_fraction=True,
            ),
            Plot(
                "Does memory grow, and is something distilled?", ITERATION, "count",
                lines(runs, "review_history", sizes),
            ),
        ],
        of_runs(runs, columns, lifts, title),
    )  # fmt: skip


def _lift(row: Row) -> str:
    if row["lift"] is None:
        return "fewer than 30 pairs"
    return f"{row['lift']:+.3f} [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]"
