"""What `rrl evaluate` does: evaluate a stored policy and print what came of it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import storage
from flows.cli import print_result
from flows.evaluate import EvaluateRequest
from flows.evaluate import evaluate as evaluate_policy
from flows.progress import Progress
from flows.reflecting import Mode, mode_cost
from storage.answers import table_text

SHOWN = (
    "name", "scorer", "scorer_version", "policy_version", "num_prompts", "num_unscored",
    "mean_score", "ci_low", "ci_high", "temperature",
)  # fmt: skip


def evaluate(
    run_id: str, iteration: int | None, prompts: int | None, name: str, mode: Mode,
    store_path: Path, as_json: bool,
) -> None:  # fmt: skip
    """Print one line per scorer and what the answers took, or the same as JSON."""
    request = EvaluateRequest(run_id, iteration, prompts, name, mode)
    store = storage.open(store_path)
    with Progress() as progress:
        progress.note(f"evaluating {request.run_id} · store {store.path}")
        rows = evaluate_policy(store, request, progress)
    shown: list[dict[str, Any]] = [{key: row[key] for key in SHOWN} for row in rows]
    version = rows[0]["policy_version"]
    modes: tuple[Mode, ...] = ("direct", "reflect") if request.mode == "reflect" else ("direct",)
    costs = [mode_cost(store, request.stream, version, mode) for mode in modes]
    if as_json:
        facts = {"run_id": request.run_id, "stream": request.stream, "name": request.name}
        took = {cost.mode: asdict(cost) for cost in costs}
        print_result(json.dumps(facts | {"evaluations": shown, "costs": took}))
        return
    print_result(f"{request.stream} · store {store.path}")
    print_result(table_text(SHOWN, [tuple(row.values()) for row in shown]).rstrip())
    for cost in costs:
        number = max(1, cost.num_answers)
        print_result(
            f"{cost.mode}: {cost.num_sampled_tokens / number:.1f} tokens an answer, of them "
            f"{cost.num_review_tokens / number:.1f} of reviews; {cost.seconds / number:.2f} s"
        )
        if cost.num_standing:
            print_result(
                f"{cost.num_standing} of {cost.num_answers} first answers stand: reviewing them "
                "did not fit `sampler.context_tokens`"
            )
