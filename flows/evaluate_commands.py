"""What `rrl evaluate` does: evaluate a stored policy and print what came of it."""

import json
from pathlib import Path
from typing import Any

import storage
from flows.cli import print_result
from flows.evaluate import EvaluateRequest
from flows.evaluate import evaluate as evaluate_policy
from flows.progress import Progress
from storage.answers import table_text

SHOWN = ("scorer", "scorer_version", "policy_version", "num_prompts", "num_unscored", "mean_score",
         "ci_low", "ci_high", "temperature")  # fmt: skip


def evaluate(
    run_id: str, iteration: int | None, prompts: int | None, name: str, store_path: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Print one line per scorer, or the same as JSON."""
    request = EvaluateRequest(run_id, iteration, prompts, name)
    store = storage.open(store_path)
    with Progress() as progress:
        progress.note(f"evaluating {request.run_id} · store {store.path}")
        rows = evaluate_policy(store, request, progress)
    shown: list[dict[str, Any]] = [{key: row[key] for key in SHOWN} for row in rows]
    if as_json:
        facts = {"run_id": request.run_id, "stream": request.stream, "name": request.name}
        print_result(json.dumps(facts | {"evaluations": shown}))
        return
    print_result(f"{request.stream} · store {store.path}")
    print_result(table_text(SHOWN, [tuple(row.values()) for row in shown]).rstrip())
