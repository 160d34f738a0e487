"""Write what a reviewing run's history says of its reviews, memory, controls and distillation.

    python -m benchmarks.studies.review_results RUN --store DIR --out docs/results/NAME.md

Every table is an SQL question that is printed above its answer; the plot stands beside the page.
What a person wrote above the line `MARK` of an existing page is kept.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import storage
from benchmarks.studies.replay_results import (
    EVALUATIONS,
    HISTORY,
    INK,
    MUTED,
    SECOND,
    THIRD,
    answered,
    audited,
    rewards,
)
from flows.wiring import stored_config
from storage import Store

MARK = "<!-- from here on written by benchmarks/studies/review_results.py -->"

BUDGET = """
select role, arm, num_rollouts, num_tokens, is_training from sampled_budget
where run_id = $run order by all"""
REVIEWS = """
select iteration, num_attempted, num_failed_prompts, num_gated, trigger_rate, num_reviews, num_ok,
    frac_malformed, num_truncated, num_parrot, leak_rate, success_rate, hit_rate, memory_size,
    num_distilled, internalised_rate
from review_history where run_id = $run order by iteration"""
LIFTS = """
select arm, leak, num, treated, control, lift, ci_low, ci_high from review_lifts
where run_id = $run order by arm, leak"""
STRATA = """
select review_status, leak, count(*) as second_attempts, avg(reward) as success,
    avg(num_review_tokens) as review_tokens, avg(num_memory) as memory
from review_outcomes where run_id = $run and arm = 'review' and reward is not null
group by all order by all"""
TERMS = """
select unit, count(*) as samples, avg(advantage) as advantage, avg(weight) as weight,
    avg(reward) as reward from replay_audit where run_id = $run and state = 'learned'
group by unit order by unit"""
VERIFIED = """
select iteration, num_helpful, num_harmful, what_went_wrong, what_to_do from memory
where run_id = $run order by num_helpful desc, position limit 6"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--store", type=Path, default=Path("rrl-data"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    store = storage.open(arguments.store)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    told = arguments.out.read_text().split(MARK)[0] if arguments.out.exists() else ""
    generated = page(store, arguments.run, arguments.out)
    arguments.out.write_text(f"{told}{MARK}\n\n{generated}")


def page(store: Store, run_id: str, out: Path) -> str:
    """Return the page, and write its plot beside it."""
    config = stored_config(store, run_id)
    review, sampler = config.review, config.sampler
    parts = [
        f"Run `{run_id}`: {config.run.iterations} iterations of {sampler.prompts} x "
        f"{sampler.group_size}, {config.model.name}, {config.learner.algorithm}, gate "
        f"{review.gate}, {review.reviews} reviews, memory {review.memory}, distillation "
        f"{review.distill_coef}.",
    ]
    for title, query in (
        ("Held-out accuracy", EVALUATIONS),
        ("What was sampled", BUDGET),
        ("Reviews by iteration", REVIEWS),
        ("Reviews against controls", LIFTS),
        ("Second attempts by how the review was read, and by what it gives away", STRATA),
        ("What was learned from", TERMS),
        ("Verified reviews that helped most", VERIFIED),
        ("Training", HISTORY),
    ):
        parts += [f"## {title}", answered(store, run_id, query)]
    parts += ["## Audit", audited(store, run_id, config), plot(store, run_id, out)]
    return "\n\n".join(parts) + "\n"


def plot(store: Store, run_id: str, out: Path) -> str:
    """Draw rates, lifts and reward; return the line that shows the picture."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    rows = store.sql(REVIEWS, {"run": run_id}).pl()
    for column, color in (
        ("trigger_rate", MUTED), ("success_rate", INK), ("leak_rate", SECOND),
        ("internalised_rate", THIRD),
    ):  # fmt: skip
        left.plot(rows["iteration"], rows[column], color=color, label=column)
    left.set(title="Reviews and what became of them", xlabel="iteration", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    lifts = store.sql(LIFTS, {"run": run_id}).pl().to_dicts()
    lifts = [row for row in lifts if row["leak"] == "all"]
    middle.bar([r["arm"] for r in lifts], [r["treated"] - r["control"] for r in lifts], color=INK)
    middle.axhline(0, color=MUTED, linewidth=1)
    middle.tick_params(axis="x", labelrotation=30)
    middle.set(title="Second attempts less controls", ylabel="difference of success rates")
    rewards(right, store, run_id)
    name = f"{out.stem}.png"
    figure.savefig(out.parent / name, dpi=110)
    return f"![Rates of reviews; lifts over controls; reward by iteration]({name})"


if __name__ == "__main__":
    main()
