"""Write what a replaying run's history says of its value models, picks and retries.

    python -m benchmarks.studies.replay_results RUN --store DIR --out docs/results/NAME.md

Every table is an SQL question that is printed above its answer; the plots stand beside the page.
What a person wrote above the line `MARK` of an existing page is kept.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import storage
from flows.auditing import audit
from flows.config import RunConfig
from flows.materializing import Moment, compare_moments
from flows.wiring import stored_config
from storage import Store
from storage.answers import table_text

MARK = "<!-- from here on written by benchmarks/studies/replay_results.py -->"
INK, MUTED, SECOND, THIRD = "#1f3b57", "#9aa7b4", "#c8632b", "#3d8361"

MODELS = """
select iteration, verdict, auroc, within_prompt_auroc, num_mixed_prompts, brier, num_states,
    mean_target, length_corr, signature_corr
from value_models where run_id = $run order by iteration"""
PLANS = """
select iteration, num_candidates, num_eligible, num_picked, share, priority_entropy, waiting_reason
from replay_plans where run_id = $run order by iteration"""
PICKED = """
select unit, pick_kind, count(*) as picks, avg(value) as value, avg(prompt_value) as prompt_value,
    avg(probability) as probability, avg(age) as age
from picks where run_id = $run group by all order by all"""
OUTCOMES = """
select unit, outcome, count(*) as answers from retries where run_id = $run
group by all order by all"""
WEIGHTS = """
select unit, count(*) as samples, avg(importance_mean) as importance, avg(frac_truncated) as
    truncated, avg(ratio_mean) as ratio, avg(age) as age, max(age) as oldest, avg(reward) as reward
from replay_audit where run_id = $run and state = 'learned' group by unit order by unit"""
SAMPLES = """
select unit, importance_mean, age from replay_audit
where run_id = $run and state = 'learned' and unit <> 'fresh' order by all"""
HISTORY = """
select iteration, mean_reward, frac_groups_all_wrong, num_steps, loss, mismatch_mean
from training_history where run_id = $run order by iteration"""
DRIFT = """
select scorer_version, previous_version, num_targets, mean_change, mean_abs_change, num_crossed,
    correlation
from value_drift where run_id = $run and scorer = 'value' order by all"""
EVALUATIONS = """
select iteration, scorer, mean_score, ci_low, ci_high from evaluations
where run_id = $run and scorer = 'final_number' order by iteration"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--store", type=Path, default=Path("rrl-data"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    store = storage.open(arguments.store)
    config = stored_config(store, arguments.run)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    told = arguments.out.read_text().split(MARK)[0] if arguments.out.exists() else ""
    generated = page(store, arguments.run, config, arguments.out)
    arguments.out.write_text(f"{told}{MARK}\n\n{generated}")


def page(store: Store, run_id: str, config: RunConfig, out: Path) -> str:
    """Return the page, and write its plots beside it."""
    parts = [
        f"Run `{run_id}`: {config.run.iterations} iterations of {config.sampler.prompts} x "
        f"{config.sampler.group_size}, {config.model.name}, {config.learner.algorithm}, replay of "
        f"{', '.join(config.replay.units) or 'nothing'}, credit {config.replay.credit}, a value "
        f"model every {config.value.every} iterations.",
    ]
    for title, query in (
        ("Held-out accuracy", EVALUATIONS),
        ("Value models", MODELS),
        ("What each refit changed", DRIFT),
        ("The buffer at each pin", PLANS),
        ("Picks", PICKED),
        ("What became of old answers", OUTCOMES),
        ("Importance and staleness by source", WEIGHTS),
        ("Training", HISTORY),
    ):
        parts += [f"## {title}", answered(store, run_id, query)]
    parts += ["## Which states rose after the last refit, and why", risen(store, run_id, config)]
    parts += ["## Audit", audited(store, run_id, config)]
    parts += [f"![{text}]({name})" for name, text in plots(store, run_id, out)]
    return "\n\n".join(parts) + "\n"


def answered(store: Store, run_id: str, query: str) -> str:
    """Return a question and its answer as text."""
    relation = store.sql(query, {"run": run_id})
    rows = [tuple(map(rounded, row)) for row in relation.fetchall()]
    shown = table_text(tuple(relation.columns), rows).rstrip()
    return f"```sql\n{query.strip()}\n```\n\n```text\n{shown}\n```"


def rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def risen(store: Store, run_id: str, config: RunConfig) -> str:
    """Return the entries whose priority rose most between the last two models."""
    models = store.read("value_models", run_id=run_id)
    if len(models) < 2:
        return "There were fewer than two value models."
    before, after = (model["scorer_version"] for model in models[-2:])
    head = store.head().number
    changes = compare_moments(store, run_id, config, Moment(head, before), Moment(head, after))
    kinds: dict[str, int] = {}
    for change in changes:
        kinds[change.kind] = kinds.get(change.kind, 0) + 1
    lines = [f"`{before}` against `{after}`, both as of commit {head}: {kinds}"]
    rose = sorted((c for c in changes if c.kind == "rose"), key=lambda c: -c.rise)[:5]
    lines += [
        f"- by {c.rise:.3f}: {c.after['unit']} `{c.after['entry_id']}` of "
        f"`{c.after['prompt_id']}`: {c.why}"
        for c in rose
        if c.after is not None
    ]
    return "\n".join(lines)


def audited(store: Store, run_id: str, config: RunConfig) -> str:
    """Say whether every step is as derived."""
    found = list(audit(store, run_id, config))
    differences = [str(d) for a in found for d in a.differences]
    return (
        f"`rrl audit {run_id}`: {len(found)} iterations, {len(differences)} differences."
        + "".join(f"\n- {text}" for text in differences[:10])
    )


def plots(store: Store, run_id: str, out: Path) -> list[tuple[str, str]]:
    """Draw calibration, outcomes and reward; return file names with what they show."""
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 7.4), constrained_layout=True)
    calibration(axes[0, 0], store.read("value_models", run_id=run_id))
    outcomes(axes[0, 1], store, run_id)
    importance(axes[1, 0], store, run_id)
    rewards(axes[1, 1], store, run_id)
    name = f"{out.stem}.png"
    figure.savefig(out.parent / name, dpi=110)
    told = "Calibration of the last value models; outcomes of retries; importance and age; reward"
    return [(name, told)]


def calibration(axes: Any, models: list[dict[str, Any]]) -> None:
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1)
    for model, color in zip(models[-3:], (MUTED, THIRD, INK), strict=False):
        bins = [b for b in json.loads(model["metrics_json"])["calibration"] if b["num_states"]]
        sizes = [4 + 60 * (b["num_states"] / model["num_states"]) for b in bins]
        xs, ys = [b["mean_value"] for b in bins], [b["mean_outcome"] for b in bins]
        axes.plot(xs, ys, color=color, linewidth=1.2, label=f"iteration {model['iteration']}")
        axes.scatter(xs, ys, s=sizes, color=color)
    axes.set(title="Value models out of fold", xlabel="judged", ylabel="happened")
    axes.legend(frameon=False, fontsize=8)


def outcomes(axes: Any, store: Store, run_id: str) -> None:
    order = ("rescued", "retained", "regressed", "still_failed")
    rows = store.sql(OUTCOMES, {"run": run_id}).fetchall()
    bottom = dict.fromkeys(order, 0)
    for unit, color in zip(("state", "trajectory", "prompt"), (INK, SECOND, THIRD), strict=True):
        counts = [next((n for u, o, n in rows if (u, o) == (unit, name)), 0) for name in order]
        axes.bar(order, counts, bottom=list(bottom.values()), color=color, label=unit)
        bottom = {name: bottom[name] + n for name, n in zip(order, counts, strict=True)}
    axes.set(title="What became of old answers", ylabel="new answers")
    axes.legend(frameon=False, fontsize=8)


def importance(axes: Any, store: Store, run_id: str) -> None:
    rows = store.sql(SAMPLES, {"run": run_id}).fetchall()
    axes.axhline(1, color=MUTED, linewidth=1)
    for unit, color in zip(("prompt", "state", "trajectory"), (THIRD, INK, SECOND), strict=True):
        found = [(age, mean) for name, mean, age in rows if name == unit]
        axes.scatter(
            *zip(*found, strict=True) if found else ((), ()), s=14, color=color, label=unit
        )
    axes.set(
        title="Replayed samples", xlabel="age, policy versions", ylabel="mean importance weight"
    )
    axes.legend(frameon=False, fontsize=8)


def rewards(axes: Any, store: Store, run_id: str) -> None:
    rows = store.sql(HISTORY, {"run": run_id}).fetchall()
    axes.plot([r[0] for r in rows], [r[1] for r in rows], color=INK, label="fresh attempts")
    points = store.sql(EVALUATIONS, {"run": run_id}).fetchall()
    xs, ys = [p[0] for p in points], [p[2] for p in points]
    errors = [[p[2] - p[3] for p in points], [p[4] - p[2] for p in points]]
    axes.errorbar(xs, ys, yerr=errors, fmt="o", color=SECOND, label="held out, greedy")
    axes.set(title="Reward", xlabel="iteration", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
