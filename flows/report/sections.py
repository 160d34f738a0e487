"""What the page shows of the runs, section by section: which rows, drawn how, to look for what."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any
from xml.etree import ElementTree as ET

from flows.report.figures import Plot, Points, Series
from flows.report.history import History, Row
from flows.report.markup import bar, number, table

ITERATION = "iteration"
Runs = Sequence[History]
Column = tuple[str, str]  # of a view or table, and what it is called here

_Z95 = 1.96
_MAX_FAILURES = 20
_OUTCOMES = ("rescued", "retained", "regressed", "still_failed")


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


def sections(runs: Runs) -> list[Section]:
    """Return the sections that have something to show."""
    made = (section(runs) for section in _SECTIONS)
    return [section for section in made if not section.is_empty]


def _lines(runs: Runs, name: str, columns: Iterable[Column], **equal: Any) -> dict[str, list[Series]]:
    """Return columns of a table or view by iteration, for each run."""
    return {
        run.run_id: [Series(label, run.points(name, c, **equal)) for c, label in columns]
        for run in runs
    }


def _by(runs: Runs, name: str, key: str, column: str) -> dict[str, list[Series]]:
    """Return a column by iteration, a series for each value of `key`."""
    return {
        run.run_id: [
            Series(str(value), run.points(name, column, **{key: value}))
            for value in run.distinct(name, key)
        ]
        for run in runs
    }


def _counted(
    runs: Runs, name: str, kind: Callable[[Row], str], order: Sequence[str] = ()
) -> dict[str, list[Series]]:
    """Return how many rows of each kind an iteration has; the kinds are the same for all runs."""
    counts = {
        run.run_id: Counter((row[ITERATION], kind(row)) for row in run.rows[name]) for run in runs
    }
    kinds = order or sorted({k for counted in counts.values() for _, k in counted})
    return {
        run_id: [
            Series(k, [(i, counted[i, k]) for i in sorted({i for i, _ in counted})]) for k in kinds
        ]
        for run_id, counted in counts.items()
    }


def _reward(runs: Runs) -> Section:
    rewards = {}
    for run in runs:
        bounds = []
        for row in run.rows["reward_spread"]:
            half = row["std_of_prompts"]
            if half is not None:
                half *= _Z95 / sqrt(row["num_prompts"])
                mean = row["mean_of_prompts"]
                bounds.append((row[ITERATION], mean - half, mean + half))
        rewards[run.run_id] = [Series("", run.points("training_history", "mean_reward"), bounds)]
    groups = (("frac_groups_all_wrong", "all wrong"), ("frac_groups_all_right", "all right"))
    return Section(
        "reward",
        "Reward and held-out accuracy",
        "Reward is what training saw, held-out accuracy is what it is for. Bands are 95 % intervals: "
        "of the reward over prompts, of an evaluation as it was recorded.",
        [
            Plot("Does the reward rise, by more than its band?", ITERATION, "mean reward", rewards),
            *_evaluations(runs),
            Plot(
                "Do groups still differ? Those that do not teach nothing", ITERATION,
                "share of groups", _lines(runs, "training_history", groups), is_fraction=True,
            ),
            Plot(
                "Does the loss stay finite, without jumps?", ITERATION, "loss",
                _lines(runs, "training_history", [("loss", "")]),
            ),
        ],
    )  # fmt: skip


def _evaluations(runs: Runs) -> list[Plot]:
    judges = dict.fromkeys(
        (row["name"], row["scorer"], row["scorer_version"])
        for run in runs
        for row in run.rows["evaluations"]
    )
    plots = []
    for judge in judges:
        series = {}
        for run in runs:
            rows = [
                row
                for row in run.rows["evaluations"]
                if (row["name"], row["scorer"], row["scorer_version"]) == judge
            ]
            points = [(row[ITERATION], row["mean_score"]) for row in rows]
            bounds = [(row[ITERATION], row["ci_low"], row["ci_high"]) for row in rows]
            series[run.run_id] = [Series("", points, bounds)]
        name, scorer, version = judge
        title = f"Does it hold on {name} prompts? {scorer} (version {version[:16]})"
        plots.append(Plot(title, ITERATION, "mean score", series))
    return plots


def _exploration(runs: Runs) -> Section:
    def explored(*columns: Column) -> dict[str, list[Series]]:
        return {
            run.run_id: [
                Series(label, [(i, found.get(column)) for i, found in run.explored.items()])
                for column, label in columns
            ]
            for run in runs
        }

    sizes = {key for run in runs for found in run.explored.values() for key in found}
    passes = sorted(
        (key for key in sizes if key.startswith("explore/pass_at_")),
        key=lambda key: int(key.rpartition("_")[2]),
    )
    return Section(
        "exploration",
        "Exploration",
        "A policy that stops trying different things stops learning. Falling entropy is normal; "
        "pass@k that falls while pass@1 rises means that variety was traded for certainty. Texts are "
        "compared in at most 60 iterations, evenly chosen.",
        [
            Plot(
                "Does entropy fall slowly, not to zero?", ITERATION, "entropy (nats a token)",
                _by(runs, "learning_by_unit", "unit", "entropy_mean"),
            ),
            Plot(
                "Do completions stay different from each other?", ITERATION, "share",
                explored(
                    ("explore/distinct_2", "distinct word pairs"),
                    ("explore/unique_solution_rate", "different right solutions"),
                    ("explore/self_bleu4", "self-BLEU (1: copies)"),
                ), is_fraction=True,
            ),
            Plot(
                "Does pass@k stay above pass@1, and rise?", ITERATION, "pass@k",
                explored(*((key, f"k = {key.rpartition('_')[2]}") for key in passes)),
                is_fraction=True,
            ),
        ],
    )  # fmt: skip


def _forgetting(runs: Runs) -> Section:
    counts = (
        ("num_ever_solved", "ever solved"),
        ("num_lost", "lost"),
        ("num_recovered", "recovered"),
        ("num_recovered_by_replay", "recovered by replay"),
    )
    return Section(
        "forgetting",
        "Forgetting",
        "A prompt is lost when it was solved once and its last 16 attempts all failed. It is "
        "recovered when it is solved again after that.",
        [
            Plot(
                "Do prompts that were solved stay solved?", ITERATION, "prompts",
                _lines(runs, "forgetting", counts),
            ),
            Plot(
                "Does the share that is lost stay near zero?", ITERATION, "lost / ever solved",
                _lines(runs, "forgetting", [("lost_rate", "")]), is_fraction=True,
            ),
        ],
    )  # fmt: skip


def _buffer(runs: Runs) -> Section:
    sizes = (("num_candidates", "candidates"), ("num_eligible", "eligible"))
    counted = [
        ("by unit and reason", lambda row: f"{row['unit']}: {row['eligibility_reason']}"),
        ("eligible, by difficulty", _eligible(lambda row: row["difficulty"] or "unknown")),
        ("eligible, by age in policy versions", _eligible(_age_bucket)),
    ]
    has_entries = any(run.rows["buffer_counts"] for run in runs)
    tables = [_counts_table(runs, f"The buffer now, {what}", key) for what, key in counted]
    return Section(
        "replay",
        "Replay buffer",
        "What history offers, what of it may be gone back to, and what was. Every candidate has a "
        "reason why it is eligible or not; every iteration that replays less than its share says why.",
        [
            Plot(
                "Is there enough that may be replayed?", ITERATION, "entries",
                _lines(runs, "replay_plans", sizes),
            ),
            Plot(
                "What was picked?", ITERATION, "picks",
                _counted(runs, "picks", lambda row: str(row["unit"])), kind="stacked",
            ),
            Plot(
                "From how far back? Old picks are early ideas", ITERATION,
                "mean age (policy versions)", _mean_age(runs),
            ),
            Plot(
                "Are picks spread out? Near zero, the same few come again", ITERATION,
                "priority entropy (nats)", _lines(runs, "replay_plans", [("priority_entropy", "")]),
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
    for run, counted in zip(runs, counts, strict=True):
        for row in sorted(run.rows["buffer_counts"], key=lambda row: int(row["min_age"])):
            if (kind := key(row)) is not None:
                counted[kind] += row["num_entries"]
    kinds = dict.fromkeys(kind for counted in counts for kind in counted)
    if len(runs) > 1:
        rows = [[kind, *(counted[kind] for counted in counts)] for kind in kinds]
        return table(["", *(run.run_id for run in runs)], rows, title)
    [counted] = counts
    most = max(counted.values(), default=1)
    return table(["", "entries", ""], [[k, counted[k], bar(counted[k] / most)] for k in kinds], title)


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
    return [table(["run", "reason", "iterations"], rows, title)] if rows else []


def _retries(runs: Runs) -> Section:
    return Section(
        "retries",
        "Retry outcomes",
        "An old answer and a new one to the same problem, under one scorer version. Rescued: failed "
        "then, solved now. Regressed: solved then, failed now.",
        [
            Plot(
                "Is more rescued than regressed?", ITERATION, "retries",
                _counted(runs, "retries", lambda row: str(row["outcome"]), _OUTCOMES),
                kind="stacked",
            )
        ],
        _outcome_table(runs),
    )  # fmt: skip


def _outcome_table(runs: Runs) -> list[ET.Element]:
    rows = []
    for run in runs:
        counted = Counter((row["unit"], row["outcome"]) for row in run.rows["retries"])
        for unit in sorted({unit for unit, _ in counted}):
            rows.append([run.run_id, unit, *(counted[unit, o] for o in _OUTCOMES)])
    title = "Outcomes by unit, all iterations"
    return [table(["run", "unit", *_OUTCOMES], rows, title)] if rows else []


def _review(runs: Runs) -> Section:
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
    columns = ("run", "compared with", "reviews", "pairs", "after review", "control", "lift [95 %]")
    title = "Does the review help? Second attempts against controls at the same prompts"
    return Section(
        "review",
        "Review and memory",
        "After a failed attempt the policy reviews it and tries again. The review helps only as far "
        "as its second attempts beat the controls; no lift is shown below 30 pairs.",
        [
            Plot(
                "Do second attempts succeed, and does it carry over?", ITERATION, "share",
                _lines(runs, "review_history", rates), is_fraction=True,
            ),
            Plot(
                "Are reviews well formed, and do few give the answer away?", ITERATION,
                "share of reviews", _lines(runs, "review_history", flaws), is_fraction=True,
            ),
            Plot(
                "Does memory grow, and is something distilled?", ITERATION, "count",
                _lines(runs, "review_history", sizes),
            ),
        ],
        [table(columns, lifts, title)] if lifts else [],
    )  # fmt: skip


def _lift(row: Row) -> str:
    if row["lift"] is None:
        return "fewer than 30 pairs"
    return f"{row['lift']:+.3f} [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]"


def _importance(runs: Runs) -> Section:
    def by_unit(column: str) -> dict[str, list[Series]]:
        return _by(runs, "learning_by_unit", "unit", column)

    return Section(
        "importance",
        "Importance and staleness, by source",
        "Old samples come from another policy and are weighted for it. Weights far from 1, much "
        "truncation or few effective samples mean that a source is too stale to learn from.",
        [
            Plot(
                "How old is what was learned from?", ITERATION, "mean age (policy versions)",
                by_unit("age_mean"),
            ),
            Plot(
                "Do importance weights stay near 1?", ITERATION, "mean importance weight",
                by_unit("importance_mean"), guides=(("on-policy", 1.0),),
            ),
            Plot(
                "How many samples carry the weight? 1: all of them", ITERATION,
                "effective share of samples", by_unit("ess_frac"), is_fraction=True,
            ),
            Plot(
                "Do trainer and sampler agree?", ITERATION, "mean |log-prob difference| (nats)",
                by_unit("mismatch_mean"),
            ),
            Plot(
                "How much is clipped?", ITERATION, "share of tokens", by_unit("frac_clipped"),
            ),
            Plot(
                "How far is the policy from its reference?", ITERATION, "KL (nats a token)",
                by_unit("kl_mean"),
            ),
        ],
    )  # fmt: skip


def _value(runs: Runs) -> Section:
    aurocs = (("within_prompt_auroc", "within prompts"), ("auroc", "pooled"))
    columns = (
        "run", ITERATION, "version", "verdict", "states", "mixed prompts", "AUROC within",
        "AUROC pooled", "Brier", "corr. with length", "corr. with signature",
    )  # fmt: skip
    figures = (
        "num_states", "num_mixed_prompts", "within_prompt_auroc", "auroc", "brier", "length_corr",
        "signature_corr",
    )  # fmt: skip
    rows = [
        [run.run_id, str(row[ITERATION]), row["scorer_version"], row["verdict"],
         *(row[name] for name in figures)]
        for run in runs
        for row in run.rows["value_models"][-12:]
    ]  # fmt: skip
    title = "Verdicts, the newest twelve of a run"
    return Section(
        "value",
        "Value model",
        "It judges which states of history are promising. Below 0.55 within prompts or 0.6 pooled "
        "it is not listened to, and success rates judge instead.",
        [
            Plot(
                "Is it calibrated? Dots belong on the diagonal", "mean value given",
                "share that succeeded", _calibration(runs), kind="calibration", is_fraction=True,
            ),
            Plot(
                "Does it rank well enough to be listened to?", ITERATION, "AUROC",
                _lines(runs, "value_models", aurocs), is_fraction=True,
                guides=(("least within prompts", 0.55), ("least pooled", 0.6)),
            ),
            Plot(
                "How much does a new version change its mind?", ITERATION,
                "mean |change| of a value", _drift(runs),
            ),
        ],
        [table(columns, rows, title)] if rows else [],
    )  # fmt: skip


def _calibration(runs: Runs) -> dict[str, list[Series]]:
    """Return (mean value, mean outcome) of each bin of the newest model that has bins."""
    found = {}
    for run in runs:
        points: Points = []
        for row in run.rows["value_models"]:
            bins = json.loads(row["metrics_json"]).get("calibration", [])
            filled = [b for b in bins if b["num_states"]]
            points = [(b["mean_value"], b["mean_outcome"]) for b in filled] or points
        found[run.run_id] = [Series("newest model", points)]
    return found


def _drift(runs: Runs) -> dict[str, list[Series]]:
    found = {}
    for run in runs:
        fitted = {row["scorer_version"]: row[ITERATION] for row in run.rows["value_models"]}
        points = [
            (fitted[row["scorer_version"]], row["mean_abs_change"])
            for row in run.rows["value_drift"]
            if row["scorer_version"] in fitted
        ]
        found[run.run_id] = [Series("", sorted(points))]
    return found


def _time(runs: Runs) -> Section:
    return Section(
        "time",
        "Time and tokens",
        "Where the budget went. Learning time is that of the optimizer steps, refits are counted on "
        "their own.",
        [
            Plot(
                "Is sampling steady?", ITERATION, "sampled tokens a second",
                _lines(runs, "training_history", [("sampled_tokens_per_s", "")]),
            ),
            Plot(
                "How long are answers? Growth may be padding", ITERATION, "tokens an attempt",
                _tokens_an_attempt(runs),
            ),
            Plot("What takes the time?", ITERATION, "seconds", _seconds(runs)),
        ],
    )  # fmt: skip


def _tokens_an_attempt(runs: Runs) -> dict[str, list[Series]]:
    return {
        run.run_id: [
            Series("", [
                (row[ITERATION], row["tokens_sampled"] / row["num_rollouts"])
                for row in run.rows["training_history"] if row["num_rollouts"]
            ])
        ]
        for run in runs
    }  # fmt: skip


def _seconds(runs: Runs) -> dict[str, list[Series]]:
    found = {}
    for run in runs:
        learned: dict[int, float] = {}
        for row in run.rows["updates"]:
            learned[row[ITERATION]] = learned.get(row[ITERATION], 0.0) + row["learn_s"]
        sampled = [
            (row[ITERATION], row["tokens_sampled"] / row["sampled_tokens_per_s"])
            for row in run.rows["training_history"]
            if row["sampled_tokens_per_s"]
        ]
        found[run.run_id] = [
            Series("sample", sampled),
            Series("learn", sorted(learned.items())),
            Series("refit the value model", run.points("value_models", "fit_s")),
        ]
    return found


def _failures(runs: Runs) -> Section:
    rows = [
        [run.run_id, str(row[ITERATION]), row["phase"], row["kind"], row["subject"], row["message"]]
        for run in runs
        for row in run.rows["failures"][-_MAX_FAILURES:]
    ]
    total = sum(len(run.rows["failures"]) for run in runs)
    columns = ("run", ITERATION, "phase", "kind", "subject", "message")
    title = f"{len(rows)} of {number(total)} failures, the newest"
    return Section(
        "failures",
        "What went wrong and was survived",
        "Each failure cost what it names, not the run.",
        tables=[table(columns, rows, title)] if rows else [],
    )


_SECTIONS: tuple[Callable[[Runs], Section], ...] = (
    _reward,
    _exploration,
    _forgetting,
    _buffer,
    _retries,
    _review,
    _importance,
    _value,
    _time,
    _failures,
)
