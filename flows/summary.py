"""What a finished run says: its table, three questions to ask the history, and a finding."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from storage import Store
from storage.views import ask_names, ask_sql


def run_summary(store: Store, run_id: str) -> dict[str, Any]:
    """Return the run's history, evaluations, head and finding, as plain values."""
    head = store.head()
    history = store.view("training_history", run_id=run_id)
    evaluations = store.read("evaluations", run_id=run_id)
    lost = store.view("lost_prompts", run_id=run_id)
    budget = store.view("sampled_budget", run_id=run_id)
    return {
        "run_id": run_id,
        "ended": "finished",
        "store": str(store.path),
        "head": {"number": head.number, "sha256": head.sha256},
        "iterations": [
            {key: row[key] for key in ("iteration", "mean_reward", "num_rollouts", "loss")}
            for row in history
        ],
        "evaluations": [
            {
                key: row[key]
                for key in ("iteration", "scorer", "mean_score", "ci_low", "ci_high", "num_prompts")
            }
            for row in evaluations
        ],
        "sampled": [
            {key: row[key] for key in ("role", "arm", "num_rollouts", "num_tokens", "is_training")}
            for row in budget
        ],
        "lost_prompts": [
            {key: row[key] for key in ("prompt_id", "role", "solved_iteration", "failed_iteration")}
            for row in lost
        ],
    }


def print_summary(summary: dict[str, Any], store: Store, store_path: Path) -> None:
    """Print the summary of a finished run for a person."""
    console = Console()
    console.print(_history_table(summary))
    run_id = summary["run_id"]
    console.print(_budget(summary), markup=False)
    console.print(_finding(summary), markup=False)
    console.print("\nAsk the history:", markup=False)
    for name in ask_names():
        query = ask_sql(name).replace("$run_id", f"'{run_id}'")
        console.print(f'  rrl sql "{query}" --store {store_path}', markup=False, soft_wrap=True)
    console.print(
        f"\nrun {run_id} · store {store.path}\n"
        f"head {summary['head']['number']}:{summary['head']['sha256']}",
        markup=False, soft_wrap=True, highlight=False,
    )  # fmt: skip


def _history_table(summary: dict[str, Any]) -> Table:
    scorers = list(dict.fromkeys(row["scorer"] for row in summary["evaluations"]))
    table = Table("iteration", "reward", *(f"held-out {s} [95 %]" for s in scorers))
    for row in summary["iterations"]:
        cells = [str(row["iteration"]), _number(row["mean_reward"])]
        for scorer in scorers:
            found = [
                e
                for e in summary["evaluations"]
                if (e["iteration"], e["scorer"]) == (row["iteration"], scorer)
            ]
            cells.append(
                f"{_number(found[0]['mean_score'])} "
                f"[{_number(found[0]['ci_low'])}, {_number(found[0]['ci_high'])}]"
                if found
                else ""
            )
        table.add_row(*cells)
    return table


def _budget(summary: dict[str, Any]) -> str:
    """Say what training sampled, and how large the groups of a run without review would be."""
    parts = [row for row in summary["sampled"] if row["is_training"]]
    total = sum(row["num_rollouts"] for row in parts)
    tokens = sum(row["num_tokens"] for row in parts)
    said = f"Sampled in training: {total:,} rollouts, {tokens:,} tokens"
    attempts = [row for row in parts if row["role"] == "attempt"]
    if len(parts) < 2 or not attempts:
        return f"{said}."
    by_role = ", ".join(
        f"{row['role']}{' ' + row['arm'] if row['arm'] else ''} {row['num_rollouts']:,} "
        f"({row['num_tokens']:,})"
        for row in parts
    )
    fresh = attempts[0]
    return (
        f"{said}: {by_role}. Fresh attempts alone cost as much with groups "
        f"{total / fresh['num_rollouts']:.2f} times as large by rollouts, "
        f"{tokens / max(1, fresh['num_tokens']):.2f} times by tokens."
    )


def _finding(summary: dict[str, Any]) -> str:
    lost = summary["lost_prompts"]
    if not lost:
        return "Finding: no prompt that was solved once failed later."
    first = lost[0]
    return (
        f"Finding: {len(lost)} prompts were solved once and failed later; "
        f"{first['prompt_id']} was solved in iteration {first['solved_iteration']} "
        f"and failed in iteration {first['failed_iteration']} ({first['role']})."
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
