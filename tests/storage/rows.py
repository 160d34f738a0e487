"""Rows of every table with unremarkable values, so that a test names only what it is about."""

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]

OPENED: Row = {
    "config_json": "{}",
    "seed_root": 7,
    "planned_iterations": 4,
    "code_version": "0.1.0",
    "packages_json": "{}",
}
EXACT = '{"exact":"1"}'


def rollout(prompt_id: str = "p1", sample_index: int = 0, iteration: int = 1, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "role": "attempt",
        "prompt_id": prompt_id,
        "sample_index": sample_index,
        "parent_id": "",
        "attempt": 0,
        "group_id": f"g-{prompt_id}",
        "policy_version": 0,
        "policy_digest": "d0",
        "num_prompt_tokens": 3,
        "prefix_tokens": 0,
        "num_completion_tokens": 10,
        "finish_reason": "stop",
        "status": "ok",
        "completion": "#### 4",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 16,
        "seed": 5,
        "engine": "fake",
        "sync": "shared",
        "logprob_mode": "processed",
        "batch_key": "b0",
        "generate_s": 0.5,
    } | facts


def tokens(rollout_id: str, iteration: int = 1, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "rollout_id": rollout_id,
        "prompt_ids": [1, 2, 3],
        "completion_ids": [4, 5],
        "sampler_logprobs": [-0.5, -0.25],
    } | facts


def score(target_id: str, value: float | None, iteration: int = 1, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "target_id": target_id,
        "scorer": "exact",
        "scorer_version": "1",
        "attempt": 0,
        "target_kind": "rollout",
        "kind": "reward",
        "value": value,
        "status": "unscorable" if value is None else "ok",
        "components_json": "{}",
        "feedback": "",
        "elapsed_ms": 1.0,
    } | facts


def pin(iteration: int = 1, scorer_versions_json: str = EXACT) -> Row:
    return {
        "iteration": iteration,
        "as_of": 0,
        "as_of_sha256": "",
        "scorer_versions_json": scorer_versions_json,
    }


def planned(rollout_id: str, position: int = 0, iteration: int = 1, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "step": 0,
        "rollout_id": rollout_id,
        "batch_id": "batch-1",
        "position": position,
        "unit": "fresh",
        "source_run_id": "r1",
        "group_id": "g-p1",
        "advantage": 0.5,
        "pick_kind": "fresh",
        "age": 0,
    } | facts


def update(iteration: int = 1, step: int = 0, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "step": step,
        "batch_id": "batch-1",
        "algorithm": "grpo",
        "loss": 0.5,
        "policy_loss": 0.5,
        "kl_loss": 0.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "num_sequences": 2,
        "num_loss_tokens": 20,
        "is_skipped": False,
        "metrics_json": "{}",
        "learn_s": 0.1,
    } | facts


def learned(rollout_id: str, iteration: int = 1, **facts: Any) -> Row:
    return {
        "iteration": iteration,
        "step": 0,
        "rollout_id": rollout_id,
        "num_loss_tokens": 10,
    } | facts


def prompt(prompt_id: str, answer: str = "4") -> Row:
    return {
        "prompt_id": prompt_id,
        "task": "arithmetic",
        "split": "train",
        "messages_json": "[]",
        "answer": answer,
        "difficulty": "easy",
        "meta_json": "{}",
    }


def failure(subject: str, iteration: int = 1, message: str = "out of memory") -> Row:
    return {
        "iteration": iteration,
        "phase": "generate",
        "subject": subject,
        "attempt": 0,
        "kind": "oom",
        "message": message,
    }


def facts_of(row: Mapping[str, Any]) -> Row:
    """The row as its caller gave it: without the common columns and without NULLs."""
    common = ("event_id", "content_sha256", "epoch", "recorded_at", "run_id")
    return {k: v for k, v in row.items() if k not in common and v is not None}
