"""Measure whether features of states cost more than the bare forward passes they need.

A list of responses, each cut into states, goes through `rrl_core.value.features.state_features`
(checks, packing, reference policy, forward passes, gathering, copy to numpy). The rival is the base
model as transformers loads it, without an adapter, over the very same token ids: the same batches,
padded to the right, backbone only, hidden states thrown away. Both run a response up to its last
state and no further.

- `alone`: every response has a prompt of its own, so there is nothing to share. This is the figure.
- `groups`: as training produces them, several responses a prompt; here packing runs it once.

The sides take turns in one process after a warm-up of each. The figure is the bare pass's median
seconds divided by ours: at least 0.9 passes (exit code 0).

    python benchmarks/value_features.py [--json]
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from common import base_parser, machine_facts, print_machine, print_table
from rich.console import Console

PASS_RATIO = 0.9
GROUP_SIZE = 4
PROMPT_TOKENS = (30, 60)
COMPLETION_TOKENS = (16, 96)
NUM_CUTS = 4
MAX_FRAC = 0.8
MAX_TOKENS = 1024
MIN_FILL, ENOUGH_TOKENS = 0.95, 256  # as `rrl_core/policy/packing.py` splits
MAX_ID = 40_000


def make_sequences(num_prompts: int, group_size: int) -> list[Any]:
    """Return responses of random ids, each with its prompt's state and `NUM_CUTS` more."""
    from rrl_core.value.features import StateSequence

    draw = random.Random(0)

    def ids(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(draw.randrange(MAX_ID) for _ in range(draw.randint(*bounds)))

    sequences = []
    for _ in range(num_prompts):
        prompt_ids = ids(PROMPT_TOKENS)
        for _ in range(group_size):
            completion_ids = ids(COMPLETION_TOKENS)
            last = int(MAX_FRAC * len(completion_ids))
            cuts = (0, *sorted(draw.sample(range(1, last), NUM_CUTS - 1)), last)
            sequences.append(StateSequence(prompt_ids, completion_ids, cuts))
    return sequences


def bare_batches(sequences: list[Any], pad_token_id: int) -> Iterator[tuple[Any, Any]]:
    """Yield (input ids, attention mask), batched as ours: longest first, and hardly any pads."""
    import torch

    rows = [[*s.prompt_ids, *s.completion_ids[: s.prefix_tokens[-1]]] for s in sequences]
    rows.sort(key=len, reverse=True)
    while rows:
        width, num_rows = len(rows[0]), 1
        while num_rows < len(rows) and (num_rows + 1) * width <= MAX_TOKENS:
            if len(rows[num_rows]) < MIN_FILL * width and num_rows * width >= ENOUGH_TOKENS:
                break
            num_rows += 1
        batch, rows = rows[:num_rows], rows[num_rows:]
        padded = [row + [pad_token_id] * (width - len(row)) for row in batch]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in batch]
        yield torch.tensor(padded), torch.tensor(mask)


def median_seconds(sides: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Return each side's median seconds; the sides take turns, the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + num_rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(laps[1:]) for name, laps in seconds.items()}


def measure(model: str, num_responses: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds, tokens and the ratio of both kinds of list."""
    import torch
    from transformers import AutoModelForCausalLM

    from rrl_core.policy.fetch import find_model
    from rrl_core.policy.model import ModelSpec, load_policy_model
    from rrl_core.value.features import state_features

    policy = load_policy_model(ModelSpec(model, device="cpu"), seed=0)
    bare = AutoModelForCausalLM.from_pretrained(find_model(model), dtype=torch.float32)
    backbone = bare.eval().get_decoder()

    @torch.no_grad()
    def run_bare(sequences: list[Any]) -> None:
        for input_ids, mask in bare_batches(sequences, policy.pad_token_id):
            backbone(input_ids=input_ids, attention_mask=mask, use_cache=False)

    results = {}
    for name, group_size in (("alone", 1), ("groups", GROUP_SIZE)):
        sequences = make_sequences(num_responses // group_size, group_size)
        sides = {
            "bare": partial(run_bare, sequences),
            "ours": partial(state_features, policy, sequences, MAX_TOKENS),
        }
        seconds = median_seconds(sides, num_rounds)
        results[name] = {
            "num_tokens": sum(len(s.prompt_ids) + s.prefix_tokens[-1] for s in sequences),
            "num_states": sum(len(s.prefix_tokens) for s in sequences),
            "bare_s": seconds["bare"],
            "ours_s": seconds["ours"],
            "ratio": seconds["bare"] / seconds["ours"],
        }
    return results


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    console = Console()
    print_machine(console, result["machine"])
    columns = ("num_tokens", "num_states", "bare_s", "ours_s", "ratio")
    rows = [(name, *(found[c] for c in columns)) for name, found in result["lists"].items()]
    print_table(console, "medians", ["", *columns], rows)
    verdict = "pass" if result["pass"] else "MISSED"
    console.print(
        f"{verdict}: {result['ratio']:.2f} of the bare pass's speed where nothing is shared; "
        f"at least {PASS_RATIO:g} passes",
        highlight=False,
    )


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = base_parser(__doc__ or "", num_iterations=3)
    parser.add_argument("--responses", type=int, default=12, help="in each list")
    arguments = parser.parse_args()
    machine = machine_facts(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    lists = measure(arguments.model, arguments.responses, arguments.iterations)
    ratio = lists["alone"]["ratio"]
    result = {"machine": machine, "pass": ratio >= PASS_RATIO, "ratio": ratio, "lists": lists}
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
