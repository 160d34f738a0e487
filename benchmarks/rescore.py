"""Measure whether judging history by a value model costs more than the forward passes it needs.

A store with one run of `--rollouts` responses of random tokens, each to a prompt of its own (so
there is nothing to share), is judged by `flows.rescoring.rescore` with a value model: hashes are
checked, shards found and read, responses decoded and cut, features made and judged, states and
scores committed. Loading the model is left out. The rival is the base model as transformers loads
it, over the same token ids up to the last cut of each response: the same batches, padded, backbone
only, hidden states thrown away.

The sides take turns in one process, each round on a fresh copy of the store. The figure is the
median bare seconds divided by the median seconds of the rescoring: at least 0.9 passes (exit code
0). The project's own figure is that of 2,000 rollouts. `bare_cpu_s` and `ours_cpu_s` are processor
seconds of all threads, which tell the cost also where other work runs on the machine.

    python benchmarks/rescore.py [--rollouts 2000] [--json]
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import base_parser, machine_facts, print_machine, print_table, run_child
from rich.console import Console
from value_features import COMPLETION_TOKENS, MAX_ID, PROMPT_TOKENS, bare_batches

PASS_RATIO = 0.9
ROLLOUTS_PER_COMMIT = 128
RUN_ID, VERSION = "benchmark", "benchmark-1"
CHILD_TIMEOUT_S = 7200
SECONDS = ("bare_s", "bare_cpu_s", "ours_s", "ours_cpu_s")


def write_store(path: Path, num_rollouts: int, config: Any, policy: Any) -> None:
    """Make a store with a run, its rollouts, and a value model with arbitrary heads."""
    import numpy as np

    import storage
    from flows.wiring import opened_row
    from rrl_core.value.features import backbone_digest
    from rrl_core.value.model import ValueModel

    store = storage.open(path, create=True)
    writer = store.open_stream(RUN_ID, opened_row(config, "benchmark") | {"kind": "train"})
    draw = random.Random(0)
    for first in range(0, num_rollouts, ROLLOUTS_PER_COMMIT):
        numbers = range(first, min(first + ROLLOUTS_PER_COMMIT, num_rollouts))
        rows = [rollout_row(n) for n in numbers]
        tokens = [tokens_row(writer.event_id_of("rollouts", row), draw) for row in rows]
        writer.append({"rollouts": rows, "rollout_tokens": tokens}, f"b{first}")
    width = policy.model.get_base_model().config.hidden_size
    weights = np.random.default_rng(0).normal(0, 0.01, (2, width))
    model = ValueModel(weights, np.zeros(2), backbone_digest(policy))
    row = {
        "iteration": 1, "scorer": "value", "scorer_version": VERSION, "as_of": 1,
        "artifact": store.artifacts.put(model.to_bytes(), "value_model"),
        "backbone_digest": model.backbone_digest, "num_states": 0, "num_prompts": 0,
        "num_mixed_prompts": 0, "mean_target": 0.5, "verdict": "healthy", "metrics_json": "{}",
        "fit_s": 0.0,
    }  # fmt: skip
    writer.append({"value_models": [row]}, "model")


def rollout_row(number: int) -> dict[str, Any]:
    return {
        "iteration": 1, "role": "attempt", "prompt_id": f"p{number}", "sample_index": 0,
        "parent_id": "", "attempt": 0, "group_id": f"g{number}", "policy_version": 0,
        "policy_digest": "", "num_prompt_tokens": 0, "prefix_tokens": 0,
        "num_completion_tokens": 0, "finish_reason": "stop", "status": "ok", "completion": "",
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": COMPLETION_TOKENS[1], "seed": 0,
        "engine": "fake", "sync": "shared", "logprob_mode": "none", "batch_key": "b",
        "generate_s": 0.0,
    }  # fmt: skip


def tokens_row(rollout_id: str, draw: random.Random) -> dict[str, Any]:
    prompt_ids, completion_ids = (
        [draw.randrange(MAX_ID) for _ in range(draw.randint(*bounds))]
        for bounds in (PROMPT_TOKENS, COMPLETION_TOKENS)
    )
    return {
        "iteration": 1, "rollout_id": rollout_id, "prompt_ids": prompt_ids,
        "completion_ids": completion_ids, "logprobs_reason": "random tokens",
    }  # fmt: skip


def now() -> tuple[float, float]:
    """Return seconds on the wall and of the processor."""
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds that passed since `started`."""
    wall, cpu = now()
    return wall - started[0], cpu - started[1]


def time_rescore(path: Path) -> tuple[tuple[float, float], Any]:
    """Return the seconds of a rescoring without those of loading the model, and the store."""
    import storage
    from flows import value_judging
    from flows.progress import Progress
    from flows.rescoring import RescoreRequest, rescore

    load, loading_s = value_judging.load_value_judge, (0.0, 0.0)

    def timed_load(*arguments: Any) -> Any:
        nonlocal loading_s
        started = now()
        judge = load(*arguments)
        loading_s = since(started)
        return judge

    value_judging.load_value_judge = timed_load
    try:
        store = storage.open(path)
        started = now()
        with Progress(quiet=True) as progress:
            done = rescore(store, RescoreRequest("value"), progress)
        wall_s, cpu_s = since(started)
    finally:
        value_judging.load_value_judge = load
    assert done.ended == "finished", done
    assert set(done.scores) == {"ok"}, done.scores
    return (wall_s - loading_s[0], cpu_s - loading_s[1]), store


def sequences_of(store: Any) -> list[Any]:
    """Return what was run of each response: its ids, and the states it was cut into."""
    from rrl_core.value.features import StateSequence

    prefixes: dict[str, list[int]] = {}
    for state in store.read("states"):
        prefixes.setdefault(state["rollout_id"], []).append(state["prefix_tokens"])
    return [
        StateSequence(
            tuple(row["prompt_ids"]),
            tuple(row["completion_ids"]),
            tuple(sorted(prefixes[row["rollout_id"]])),
        )
        for row in store.read("rollout_tokens")
    ]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of every round of both sides, warm-ups left out."""
    import torch
    from transformers import AutoModelForCausalLM

    from flows.config import load_config
    from flows.wiring import model_spec
    from rrl_core.policy.fetch import find_model
    from rrl_core.policy.model import load_policy_model

    torch.set_num_threads(arguments.threads)
    config = load_config(Path("demo"), [f"model.name={arguments.model}", "model.device=cpu"])
    policy = load_policy_model(model_spec(config), seed=0)
    folder = Path(arguments.folder)
    write_store(folder / "store", arguments.rollouts, config, policy)
    bare = AutoModelForCausalLM.from_pretrained(find_model(arguments.model), dtype=policy.dtype)
    backbone = bare.eval().get_decoder()
    del policy

    rounds: dict[str, list[float]] = {name: [] for name in SECONDS}
    for number in range(1 + arguments.iterations):
        path = shutil.copytree(folder / "store", folder / f"round-{number}")
        ours, store = time_rescore(path)
        sequences = sequences_of(store)
        started = now()
        with torch.no_grad():
            for input_ids, mask in bare_batches(sequences, 0):
                backbone(input_ids=input_ids, attention_mask=mask, use_cache=False)
        for name, seconds in zip(SECONDS, (*since(started), *ours), strict=True):
            rounds[name].append(seconds)
        shutil.rmtree(path)
    return {
        "num_tokens": sum(len(s.prompt_ids) + s.prefix_tokens[-1] for s in sequences),
        "num_states": sum(len(s.prefix_tokens) for s in sequences),
        **{name: laps[1:] for name, laps in rounds.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    console = Console()
    print_machine(console, result["machine"])
    columns = ("num_rollouts", "num_tokens", "num_states", *SECONDS)
    rows = [(column, str(result[column])) for column in columns]
    print_table(console, "medians", ["", ""], rows)
    verdict = "pass" if result["pass"] else "MISSED"
    console.print(
        f"{verdict}: {result['ratio']:.2f} of the bare pass's speed, {PASS_RATIO:g} passes",
        highlight=False,
    )


def main() -> int:
    """Measure in a child, print, and return the exit code."""
    parser = base_parser(__doc__ or "", num_iterations=3)
    parser.add_argument("--rollouts", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(measure(arguments)))
        return 0
    machine = machine_facts(arguments.threads)
    own = ("rollouts", "iterations", "threads", "model")
    options = [part for name in own for part in (f"--{name}", str(getattr(arguments, name)))]
    found = run_child(__file__, options, arguments.threads, CHILD_TIMEOUT_S)
    medians = {name: round(statistics.median(found.pop(name)), 2) for name in SECONDS}
    ratio = medians["bare_s"] / medians["ours_s"]
    result = {
        "machine": machine,
        "pass": ratio >= PASS_RATIO,
        "ratio": round(ratio, 3),
        "num_rollouts": arguments.rollouts,
        **found,
        **medians,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
