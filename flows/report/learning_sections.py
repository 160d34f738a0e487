"""How learning went: importance and staleness by source, value model, time, failures."""

import json

from flows.report.figures import Plot, Points, Series
from flows.report.markup import number
from flows.report.section import ITERATION, Runs, Section, by, lines, of_runs

_MAX_FAILURES = 20
_MAX_VERDICTS = 12


def importance(runs: Runs) -> Section:
    def by_unit(column: str) -> dict[str, list[Series]]:
        return by(runs, "learning_by_unit", "unit", column)

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


def value(runs: Runs) -> Section:
    aurocs = (("within_prompt_auroc", "within prompts"), ("auroc", "pooled"))
    columns = (
        ITERATION, "version", "verdict", "states", "mixed prompts", "AUROC within",
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
        for row in run.rows["value_models"][-_MAX_VERDICTS:]
    ]  # fmt: skip
    title = f"Verdicts, the newest {_MAX_VERDICTS} of a run"
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
                lines(runs, "value_models", aurocs), is_fraction=True,
                guides=(("least within prompts", 0.55), ("least pooled", 0.6)),
            ),
            Plot(
                "How much does a new version change its mind?", ITERATION,
                "mean |change| of a value", _drift(runs),
            ),
        ],
        of_runs(runs, columns, rows, title),
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


def time(runs: Runs) -> Section:
    return Section(
        "time",
        "Time and tokens",
        "Where the budget went. Learning time is that of the optimizer steps, without refits.",
        [
            Plot(
                "Is sampling steady?", ITERATION, "sampled tokens a second",
                lines(runs, "training_history", [("sampled_tokens_per_s", "")]),
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


def failures(runs: Runs) -> Section:
    rows = [
        [run.run_id, str(row[ITERATION]), row["phase"], row["kind"], row["subject"], row["message"]]
        for run in runs
        for row in run.rows["failures"][-_MAX_FAILURES:]
    ]
    total = sum(len(run.rows["failures"]) for run in runs)
    columns = (ITERATION, "phase", "kind", "subject", "message")
    title = f"{len(rows)} of {number(total)} failures, the newest"
    return Section(
        "failures",
        "What went wrong and was survived",
        "Each failure cost what it names, not the run.",
        tables=of_runs(runs, columns, rows, title),
    )
