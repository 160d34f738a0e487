"""The metrics of an iteration by MLflow name, read from the log alone."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from flows.batching import SUBSTITUTE
from rrl_core.exploration import distinct_n, pass_at_k, self_bleu4, unique_solution_rate
from rrl_core.replay.outcomes import is_success
from storage import Store

_VALUE = {
    "value/auroc": "auroc",
    "value/within_prompt_auroc": "within_prompt_auroc",
    "value/brier": "brier",
    "value/length_corr": "length_corr",
    "value/signature_corr": "signature_corr",
    "value/num_states": "num_states",
}
_FORGET = {
    "forget/ever_solved": "num_ever_solved",
    "forget/lost_rate": "lost_rate",
    "forget/recovered": "num_recovered",
    "forget/recovered_by_replay": "num_recovered_by_replay",
}

_REVIEW = {
    "review/trigger_rate": "trigger_rate",
    "review/success_rate": "success_rate",
    "review/malformed": "frac_malformed",
    "review/leak_rate": "leak_rate",
    "memory/size": "memory_size",
    "memory/hit_rate": "hit_rate",
    "distill/internalised_rate": "internalised_rate",
}
_LIFT = {
    "retry": "review/lift_vs_retry",
    "blank": "review/lift_vs_blank",
    "raw_feedback": "review/lift_vs_raw_feedback",
    "random_review": "review/lift_vs_random_review",
    "no_memory": "memory/use_lift",
}

Row = dict[str, Any]
Metrics = Iterator[tuple[str, float | None]]


class Reader(Protocol):
    """What rows are read from: a store, or a store as of a commit."""

    def read(
        self, table: str, /, *, run_id: str | None = None, iteration: int | None = None
    ) -> list[Row]:
        """Return the rows of a table that fit the filters."""


def iteration_metrics(store: Store, run_id: str, iteration: int) -> dict[str, float]:
    """Return the iteration's metrics by MLflow name; never NaN or infinite."""
    found: dict[str, Any] = {"iteration": float(iteration)}
    parts = (
        _history,
        _updates,
        _evaluations,
        _value,
        _forget,
        exploration,
        _diversity,
        _replay,
        _review,
    )
    for part in parts:
        found |= dict(part(store, run_id, iteration))
    return {k: float(v) for k, v in found.items() if v is not None and math.isfinite(v)}


def _history(store: Store, run_id: str, iteration: int) -> Metrics:
    for row in store.view("training_history", run_id=run_id, iteration=iteration):
        yield "reward/mean", row["mean_reward"]
        yield "group/frac_all_wrong", row["frac_groups_all_wrong"]
        yield "group/frac_all_right", row["frac_groups_all_right"]
        yield "throughput/sampled_tokens_per_s", row["sampled_tokens_per_s"]


def _updates(store: Store, run_id: str, iteration: int) -> Metrics:
    updates = store.read("updates", run_id=run_id, iteration=iteration)
    for row in updates:  # the last step of the iteration stands for it
        yield from json.loads(row["metrics_json"]).items()
        yield "learn/loss", row["loss"]
        yield "learn/grad_norm", row["grad_norm"]
    if updates:
        yield "time/learn_s", math.fsum(row["learn_s"] for row in updates)


def _evaluations(store: Store, run_id: str, iteration: int) -> Metrics:
    for row in store.read("evaluations", run_id=run_id, iteration=iteration):
        yield f"eval/{row['scorer']}", row["mean_score"]


def _value(store: Store, run_id: str, iteration: int) -> Metrics:
    for row in store.read("value_models", run_id=run_id, iteration=iteration):
        for name, column in _VALUE.items():
            yield name, row[column]
        yield "value/is_healthy", float(row["verdict"] == "healthy")
        yield "time/refit_s", row["fit_s"]
        for drift in store.view("value_drift", run_id=run_id):
            if drift["scorer_version"] == row["scorer_version"]:
                yield "value/drift", drift["mean_abs_change"]


def _forget(store: Store, run_id: str, iteration: int) -> Metrics:
    for row in store.view("forgetting", run_id=run_id, iteration=iteration):
        for name, column in _FORGET.items():
            yield name, row[column]


def exploration(store: Reader, run_id: str, iteration: int) -> Metrics:
    """Yield how varied the iteration's attempts are, and how likely one of several is right."""
    rollouts = store.read("rollouts", run_id=run_id, iteration=iteration)
    attempts = [r for r in rollouts if r["role"] == "attempt" and r["status"] == "ok"]
    if not attempts:
        return
    rewards = _rewards(store, run_id, iteration)
    texts = [row["completion"] for row in attempts]
    yield "explore/distinct_2", distinct_n(texts, 2)
    yield (
        "explore/self_bleu4",
        fmean(self_bleu4(group) for group in _grouped(attempts, texts).values()),
    )
    scored = [row for row in attempts if row["event_id"] in rewards]
    if not scored:
        return
    is_ok = [is_success(rewards[row["event_id"]]["value"]) for row in scored]
    signatures = [rewards[row["event_id"]]["signature"] for row in scored]
    marked = [s and f"{r['prompt_id']} {s}" for r, s in zip(scored, signatures, strict=True)]
    yield "explore/unique_solution_rate", unique_solution_rate(marked, is_ok)
    groups = list(_grouped(scored, is_ok).values())
    size = min(len(group) for group in groups)
    for k in sorted({1, size}):
        yield f"explore/pass_at_{k}", fmean(pass_at_k(len(g), sum(g), k) for g in groups)


def _diversity(store: Store, run_id: str, iteration: int) -> Metrics:
    """Yield how alike the attempts at a prompt are, over the prompts."""
    rows = store.view("prompt_diversity", run_id=run_id, iteration=iteration)
    if not rows:
        return
    yield "explore/frac_distinct_texts", fmean(r["num_texts"] / r["num_attempts"] for r in rows)
    similar = [r["self_similarity"] for r in rows if r["self_similarity"] is not None]
    yield "explore/self_similarity", fmean(similar) if similar else None


def _replay(store: Store, run_id: str, iteration: int) -> Metrics:
    """Yield what was replayed, from how far back, and what became of the old answers."""
    read = partial(store.read, run_id=run_id, iteration=iteration)
    replays = read("replays")
    ages = [row["age"] for row in replays]
    if ages:
        yield "stale/age_mean", fmean(ages)
        yield "stale/age_max", max(ages)
    plans = read("replay_plans")
    if not plans:
        return
    [plan] = plans
    yield "replay/size", plan["num_eligible"]
    num_substitutes = sum(row["pick_kind"] == SUBSTITUTE for row in read("picks"))
    yield "replay/uses", plan["num_picked"] + num_substitutes
    yield "replay/priority_entropy", plan["priority_entropy"]
    replayed = [row for row in replays if row["unit"] in ("state", "trajectory", "prompt")]
    yield "replay/share_samples", len(replayed) / max(1, len(replays))
    learned = {row["rollout_id"]: row["num_loss_tokens"] for row in read("learned_samples")}
    num_tokens = sum(learned.get(row["rollout_id"], 0) for row in replayed)
    yield "replay/share_tokens", num_tokens / max(1, sum(learned.values()))
    outcomes = Counter(row["outcome"] for row in read("retries"))
    for outcome in ("rescued", "retained", "regressed", "still_failed"):
        yield f"replay/{outcome}", outcomes[outcome]
    yield from _by_source(replays, read("learned_samples"))


def _review(store: Store, run_id: str, iteration: int) -> Metrics:
    """Yield how failed attempts were reviewed, and what that is worth by comparison so far."""
    for row in store.view("review_history", run_id=run_id, iteration=iteration):
        for name, column in _REVIEW.items():
            yield name, row[column]
        targets = store.read("distillations", run_id=run_id, iteration=iteration)
        yield "distill/count", len(targets)
        yield "distill/token_share", distilled_share(store, run_id, iteration)
        for lift in store.view("review_lifts", run_id=run_id):
            if lift["leak"] == "all" and lift["arm"] in _LIFT:
                yield _LIFT[lift["arm"]], lift["lift"]


def distilled_share(store: Reader, run_id: str, iteration: int) -> float | None:
    """Return the share of the tokens trained on that are distilled; None where nothing was."""
    read = partial(store.read, run_id=run_id, iteration=iteration)
    units = {(row["step"], row["rollout_id"]): row["unit"] for row in read("replays")}
    tokens: Counter[bool] = Counter()
    for row in read("learned_samples"):
        is_distilled = units.get((row["step"], row["rollout_id"])) == "distill"
        tokens[is_distilled] += row["num_loss_tokens"]
    return tokens[True] / tokens.total() if tokens.total() else None


def _by_source(replays: Sequence[Row], learned: Sequence[Row]) -> Metrics:
    """Yield the importance and clip statistics of each unit that was learned from."""
    unit_of = {row["rollout_id"]: row["unit"] for row in replays}
    for unit in sorted(set(unit_of.values())):
        rows = [row for row in learned if unit_of.get(row["rollout_id"]) == unit]
        for name, column in (
            (f"is/mismatch_{unit}", "mismatch_mean"),
            (f"is/importance_{unit}", "importance_mean"),
            (f"is/frac_truncated_{unit}", "frac_truncated"),
            (f"clip/frac_{unit}", "frac_clipped"),
        ):
            values = [row[column] for row in rows if row[column] is not None]
            yield name, fmean(values) if values else None


def _rewards(store: Reader, run_id: str, iteration: int) -> dict[str, Row]:
    """Return the iteration's reward rows that have a value, by rollout id."""
    [pin] = store.read("views_pinned", run_id=run_id, iteration=iteration)
    [judge, *_] = json.loads(pin["scorer_versions_json"]).items()
    return {
        row["target_id"]: row
        for row in store.read("scores", run_id=run_id, iteration=iteration)
        if (row["scorer"], row["scorer_version"]) == judge and row["value"] is not None
    }


def _grouped(rows: Sequence[Row], values: Sequence[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for row, value in zip(rows, values, strict=True):
        groups.setdefault(row["group_id"], []).append(value)
    return groups
