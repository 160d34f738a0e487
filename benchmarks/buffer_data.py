"""A store with one long training run and two judgements of its states, for `buffer.py`.

128 rollouts an iteration in groups of 8 over 2,000 prompts, four states a rollout. A value model
judged all states, the newest one the states of the last iterations. Four states an iteration are
picked and continued four times each; a picked sample is learned from. Rewards are 0 or 1 by a rate
of the prompt, tokens are few and random: the questions read none of them.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import storage

Row = dict[str, Any]

RUN_ID = "benchmark"
GROUPS, GROUP_SIZE, STATES_PER_ROLLOUT = 16, 8, 4
PICKS, CONTINUATIONS = 4, 4
NUM_PROMPTS = 2_000
COMPLETION_TOKENS = 40
VERSIONS = ("value-1", "value-2")
SHARD = 16_000  # states judged in one append
OPENED: Row = {
    "config_json": "{}", "seed_root": 7, "planned_iterations": 1, "code_version": "benchmark",
    "packages_json": "{}",
}  # fmt: skip


@dataclass
class Run:
    """The run so far: its writer, its chance, and the ids of its states in order."""

    writer: storage.StreamWriter
    rng: np.random.Generator
    solve_rates: np.ndarray
    state_ids: list[str] = field(default_factory=list)


def build_store(path: Path, num_iterations: int) -> storage.Store:
    """Write the run and the judgements to a new store, without compacting it."""
    store = storage.open(path, create=True)
    rng = np.random.default_rng(0)
    run = Run(
        store.open_stream(RUN_ID, OPENED | {"kind": "train"}), rng, rng.beta(0.6, 0.6, NUM_PROMPTS)
    )
    run.writer.append({"prompts": [_prompt(n) for n in range(NUM_PROMPTS)]}, "prompts")
    for iteration in range(1, num_iterations + 1):
        run.writer.append(
            _iteration_rows(run, iteration), f"i{iteration}", closes_iteration=iteration
        )
    iteration = num_iterations
    for version, ids in zip(VERSIONS, (run.state_ids, run.state_ids[-SHARD:]), strict=True):
        run.writer.append({"value_models": [_model(version, iteration + 1)]}, version)
        for start in range(0, len(ids), SHARD):
            iteration += 1
            part = ids[start : start + SHARD]
            values = rng.random(len(part)).tolist()
            rows = [
                _score(i, iteration, "value", version, v) for i, v in zip(part, values, strict=True)
            ]
            run.writer.append({"scores": rows}, f"values-{iteration}", closes_iteration=iteration)
    return store


def compact(store: storage.Store) -> None:
    """Merge the segments and delete what they replace."""
    for _ in storage.compact(store):
        pass
    for _ in range(2):  # condemned, then deleted
        storage.collect(store, grace_s=0)


def _iteration_rows(run: Run, iteration: int) -> dict[str, list[Row]]:
    rng = run.rng
    prompts = np.repeat(rng.choice(NUM_PROMPTS, GROUPS, replace=False), GROUP_SIZE).tolist()
    rollouts = [
        _rollout(iteration, prompt, n % GROUP_SIZE, "attempt", "")
        for n, prompt in enumerate(prompts)
    ]
    picked = []
    if run.state_ids:
        chosen = rng.choice(len(run.state_ids), PICKS, replace=False).tolist()
        picked = [run.state_ids[n] for n in chosen]
        owners = rng.integers(0, NUM_PROMPTS, PICKS).tolist()
        rollouts += [
            _rollout(iteration, prompt, n, "continuation", state)
            for state, prompt in zip(picked, owners, strict=True)
            for n in range(CONTINUATIONS)
        ]
    ids = [storage.event_id("rollouts", row | {"run_id": RUN_ID}) for row in rollouts]
    is_right = (
        rng.random(len(ids)) < run.solve_rates[[int(r["prompt_id"][-6:]) for r in rollouts]]
    ).tolist()
    cuts = [(n, t) for n in range(len(prompts)) for t in range(8, 8 * STATES_PER_ROLLOUT + 1, 8)]
    states = [_state(iteration, ids[n], rollouts[n]["prompt_id"], t) for n, t in cuts]
    run.state_ids += [storage.event_id("states", row | {"run_id": RUN_ID}) for row in states]
    picks = [_pick(iteration, state, n) for n, state in enumerate(picked)]
    pick_ids = [storage.event_id("picks", row | {"run_id": RUN_ID}) for row in picks]
    return {
        "views_pinned": [_pin(iteration)],
        "rollouts": rollouts,
        "rollout_tokens": [_tokens(rng, iteration, i) for i in ids],
        "scores": [
            _score(i, iteration, "exact", "1", float(ok), signature=f"s{n % 7}")
            for n, (i, ok) in enumerate(zip(ids, is_right, strict=True))
        ],
        "states": states,
        "picks": picks,
        "replays": [_replay(iteration, i, n, pick_ids) for n, i in enumerate(ids)],
        "updates": [_update(iteration)],
        "policies": [_policy(iteration)],
    }


def plain_iteration(iteration: int, num_rollouts: int) -> dict[str, list[Row]]:
    """Return the rows of an iteration that replays nothing, without tokens and states."""
    rollouts = [
        _rollout(iteration, n // GROUP_SIZE, n % GROUP_SIZE, "attempt", "")
        for n in range(num_rollouts)
    ]
    ids = [storage.event_id("rollouts", row | {"run_id": RUN_ID}) for row in rollouts]
    scores = [_score(i, iteration, "exact", "1", float(n % 2)) for n, i in enumerate(ids)]
    score_ids = [storage.event_id("scores", row | {"run_id": RUN_ID}) for row in scores]
    replays = [
        _replay(iteration, i, n, []) | {"score_id": score_id, "reward": float(n % 2)}
        for n, (i, score_id) in enumerate(zip(ids, score_ids, strict=True))
    ]
    learned = [
        {"iteration": iteration, "step": 0, "rollout_id": i, "num_loss_tokens": 40} for i in ids
    ]
    return {
        "views_pinned": [_pin(iteration)],
        "rollouts": rollouts,
        "scores": scores,
        "replays": replays,
        "learned_samples": learned,
        "updates": [_update(iteration)],
    }


def _prompt(number: int) -> Row:
    return {
        "prompt_id": f"prompt-{number:06d}", "task": "sums", "split": "train",
        "messages_json": "[]", "answer": "4",
        "difficulty": ("easy", "hard")[number % 2], "meta_json": "{}",
    }  # fmt: skip


def _rollout(iteration: int, prompt: int, sample: int, role: str, parent: str) -> Row:
    return {
        "iteration": iteration, "role": role, "prompt_id": f"prompt-{prompt:06d}",
        "sample_index": sample, "parent_id": parent, "attempt": 0,
        "group_id": f"g-{iteration}-{prompt}", "policy_version": iteration - 1,
        "policy_digest": f"{iteration:064x}", "num_prompt_tokens": 50, "prefix_tokens": 0,
        "num_completion_tokens": COMPLETION_TOKENS, "finish_reason": "stop", "status": "ok",
        "completion": "so many words " * 10, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "max_tokens": 64, "seed": 7, "engine": "vllm", "sync": "lora", "logprob_mode": "processed",
        "batch_key": f"i{iteration:06d}-attempt-0", "generate_s": 12.5,
    }  # fmt: skip


def _tokens(rng: np.random.Generator, iteration: int, rollout_id: str) -> Row:
    return {
        "iteration": iteration, "rollout_id": rollout_id, "prompt_ids": [1, 2, 3],
        "completion_ids": rng.integers(0, 49_152, COMPLETION_TOKENS).tolist(),
        "sampler_logprobs": (-rng.random(COMPLETION_TOKENS)).tolist(),
    }  # fmt: skip


def _score(
    target: str, iteration: int, scorer: str, version: str, value: float, **facts: Any
) -> Row:
    is_value = scorer == "value"
    return {
        "iteration": iteration, "target_id": target, "scorer": scorer, "scorer_version": version,
        "attempt": 0, "target_kind": "state" if is_value else "rollout",
        "kind": "value" if is_value else "reward", "value": value, "status": "ok",
        "components_json": "{}", "feedback": "", "elapsed_ms": 1.0, **facts,
    }  # fmt: skip


def _state(iteration: int, rollout_id: str, prompt_id: str, prefix_tokens: int) -> Row:
    sha = hashlib.sha256(f"{rollout_id} {prefix_tokens}".encode()).hexdigest()
    return {
        "iteration": iteration, "rollout_id": rollout_id, "prefix_tokens": prefix_tokens,
        "source_run_id": RUN_ID, "prompt_id": prompt_id, "prefix_sha256": sha, "cut": "line",
    }  # fmt: skip


def _pick(iteration: int, state: str, position: int) -> Row:
    return {
        "iteration": iteration, "unit": "state", "entry_id": state, "position": position,
        "prompt_id": "prompt", "prefix_tokens": 8, "value": 0.5, "prompt_value": 0.25,
        "p_hat": 0.25, "base": 0.25,
        "freshness": 1.0, "rarity": 1.0, "priority": 1.0, "probability": 0.01, "gumbel_key": 0.0,
        "pick_kind": "prioritised", "age": 1,
    }  # fmt: skip


def _replay(iteration: int, rollout_id: str, position: int, pick_ids: list[str]) -> Row:
    picked = position - GROUPS * GROUP_SIZE
    pick_id = pick_ids[picked // CONTINUATIONS] if picked >= 0 else None
    return {
        "iteration": iteration, "step": 0, "rollout_id": rollout_id, "batch_id": f"b{iteration}",
        "position": position, "unit": "fresh" if pick_id is None else "state",
        "source_run_id": RUN_ID, "group_id": "g", "advantage": 0.5,
        "pick_kind": "fresh" if pick_id is None else "prioritised", "age": 0, "pick_id": pick_id,
    }  # fmt: skip


def _update(iteration: int) -> Row:
    return {
        "iteration": iteration, "step": 0, "batch_id": f"b{iteration}", "algorithm": "grpo",
        "loss": 0.5, "policy_loss": 0.5, "kl_loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-4,
        "num_sequences": 144, "num_loss_tokens": 5000, "is_skipped": False, "metrics_json": "{}",
        "learn_s": 1.0,
    }  # fmt: skip


def _policy(iteration: int) -> Row:
    return {
        "policy_version": iteration, "iteration": iteration, "base_digest": "b",
        "adapter_digest": f"{iteration:064x}", "policy_digest": f"{iteration:064x}",
        "adapter_artifact": "a",
    }  # fmt: skip


def _pin(iteration: int) -> Row:
    return {
        "iteration": iteration, "as_of": 0, "as_of_sha256": "",
        "scorer_versions_json": '{"exact":"1"}',
    }  # fmt: skip


def _model(version: str, iteration: int) -> Row:
    return {
        "iteration": iteration, "scorer": "value", "scorer_version": version, "as_of": 0,
        "artifact": "a", "backbone_digest": "b", "num_states": 1, "num_prompts": 1,
        "num_mixed_prompts": 1, "mean_target": 0.5, "verdict": "healthy", "metrics_json": "{}",
        "fit_s": 1.0,
    }  # fmt: skip
