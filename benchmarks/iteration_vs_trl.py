"""Time one training iteration of RRL against one of TRL's GRPOTrainer, on the CPU.

An iteration goes from the prompts to weights that are ready for the next generation: generate,
score, learn, sync. Both sides train the same model with the same LoRA (rank 16, all linear layers),
in float32, on the same prompts: 4 prompts x 8 completions of up to 64 tokens at temperature 1, one
AdamW step, no KL, the same threads. The reward is a hash of the completion, so that every
completion has an advantage and neither side has less to learn from.

- RRL runs `rrl train`'s own loop with the vLLM engine, without orchestrator and MLflow. Its
  iteration is everything between two pins: log, artifacts and weight sync are inside. It gets
  what is faster here: a compiled engine.
- TRL runs as installed and generates with transformers (`use_vllm=False`, its default). It gets
  what is faster here: no gradient checkpointing, no logging, no saving, and forward passes of one
  group of 8, its default batch size, which beat one pass over all 32. Its iteration is what lies
  between `on_step_begin` and `on_step_end`.

The sides run in child processes in the order A B A B. Starting a model or an engine is timed apart;
the first iteration of each child is a warm-up. The figure is the median, over iterations with the
same prompts, of RRL's seconds divided by TRL's: at most 0.33 passes (exit code 0), the goal is 0.2.
Beside it stand the ratios of sampling alone and of learning alone, and all of them per sampled
token, because the two sides draw completions of different lengths.

    python benchmarks/iteration_vs_trl.py [--json]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    LEARNING,
    SAMPLING,
    SCORING,
    Seconds,
    Stopwatch,
    base_parser,
    inner_seconds,
    machine_facts,
    print_machine,
    print_table,
    run_child,
    time_rrl,
)
from rich.console import Console

PASS_RATIO = 0.33
GOAL_RATIO = 0.2
NUM_WARMUPS = 1
CHILD_TIMEOUT_S = 900
NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 4, 8, 64
LEARNING_RATE = 2e-4


def make_config(model: str, num_iterations: int, seed: int) -> Any:
    """Return RRL's configuration; the TRL side takes its model, prompts and sizes from it."""
    from flows.config import parse_config

    return parse_config(
        {
            "run": {"seed": seed, "iterations": num_iterations},
            "model": {"name": model, "dtype": "float32", "device": "cpu"},
            "task": {"name": "arithmetic", "seed": seed, "reward": "common:arbitrary_reward"},
            "sampler": {
                "engine": "vllm",
                "dtype": "float32",
                "prompts": NUM_PROMPTS,
                "group_size": GROUP_SIZE,
                "max_tokens": MAX_TOKENS,
                "enforce_eager": False,
            },
            "learner": {"algorithm": "grpo", "learning_rate": LEARNING_RATE},
            "evaluation": {"every": None},
            "tracking": {"mlflow": False},
        },
        "benchmark",
    )


def time_trl(config: Any, folder: Path) -> dict[str, Any]:
    """Train with TRL and return its seconds by iteration, in the form of `time_rrl`."""
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rrl_core.policy.fetch import find_model

    started = time.perf_counter()
    path = str(find_model(config.model.name))
    # Between the two callbacks lies nothing but learning, apart from what is wrapped below.
    watch = Stopwatch(idle=LEARNING)
    laps: list[Seconds] = []
    tokens: list[int] = []

    class Laps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.lap()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            laps.append(watch.lap())

    dataset, reward = _trl_data(config)
    lora, s = config.model.lora, config.sampler
    trainer = GRPOTrainer(
        model=path,
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        reward_funcs=reward,
        train_dataset=dataset,
        peft_config=LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        ),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=config.run.iterations,
            per_device_train_batch_size=s.group_size,
            gradient_accumulation_steps=s.prompts,
            num_generations=s.group_size,
            max_completion_length=s.max_tokens,
            temperature=s.temperature,
            learning_rate=config.learner.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=config.learner.max_grad_norm,
            loss_type="grpo",
            beta=0.0,
            use_vllm=False,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            shuffle_dataset=False,
            seed=config.run.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        callbacks=[Laps()],
    )
    _wrap_trainer(watch, trainer, tokens)
    start_s = time.perf_counter() - started
    trainer.train()
    return {"start_s": start_s, "laps": laps, "sampled_tokens": tokens}


def _trl_data(config: Any) -> tuple[Any, Any]:
    """Return the prompts RRL picks, in its order, and the reward function with RRL's scorer."""
    from datasets import Dataset  # type: ignore[import-untyped]

    from rrl_core.tasks.registry import build_task
    from rrl_core.tasks.selection import select_prompts

    task = build_task(config.task.name, config.task.params)
    prompts = list(task.prompts("train"))
    picked = [
        prompts[i]
        for iteration in range(1, config.run.iterations + 1)
        for i in select_prompts(len(prompts), iteration, config.sampler.prompts, config.run.seed)
    ]
    by_id = {prompt.prompt_id: prompt for prompt in prompts}

    def reward(completions: Any, prompt_id: Sequence[str], **_: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        scorer = task.scorers[0]
        pairs = zip(prompt_id, texts, strict=True)
        return [scorer(by_id[i], text).value for i, text in pairs]

    rows = [{"prompt": [dict(m) for m in p.messages], "prompt_id": p.prompt_id} for p in picked]
    return Dataset.from_list(rows), reward


def _wrap_trainer(watch: Stopwatch, trainer: Any, tokens: list[int]) -> None:
    """Measure generation, rewards and the making of the batch; count the sampled tokens."""
    generate = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        tokens.append(sum(map(len, answer[0])))
        return answer

    trainer._generate_single_turn = watch.timed(counted, SAMPLING)
    watch.wrap(trainer, "_calculate_rewards", SCORING)
    watch.wrap(trainer, "_generate_and_score_completions", "batch")


def run_as_child(arguments: argparse.Namespace) -> None:
    """Be one side: `--child rrl:SEED` or `--child trl:SEED`."""
    import torch

    torch.set_num_threads(arguments.threads)
    side, seed = arguments.child.split(":")
    config = make_config(arguments.model, NUM_WARMUPS + arguments.iterations, int(seed))
    folder = Path(arguments.folder)
    timed = (
        time_rrl(config, folder / "store", "none") if side == "rrl" else time_trl(config, folder)
    )
    Path(arguments.out).write_text(json.dumps(timed))


def compare(rrl: Sequence[Any], trl: Sequence[Any]) -> dict[str, Any]:
    """Return medians of both sides, and of the ratios of iterations with equal prompts."""
    ours, theirs = _timed(rrl), _timed(trl)
    pairs = list(zip(ours, theirs, strict=True))
    figures = {
        name: {
            "rrl": statistics.median(a[name] for a in ours),
            "trl": statistics.median(b[name] for b in theirs),
            "ratio": statistics.median(a[name] / b[name] for a, b in pairs),
        }
        for name in ours[0]
    }
    start = {"rrl": [c["start_s"] for c in rrl], "trl": [c["start_s"] for c in trl]}
    ratio = figures["iteration_s"]["ratio"]
    return {
        "pass": ratio <= PASS_RATIO,
        "ratio": ratio,
        "pass_ratio": PASS_RATIO,
        "goal_ratio": GOAL_RATIO,
        "ratios": [a["iteration_s"] / b["iteration_s"] for a, b in pairs],
        "figures": figures,
        "start_s": start,
    }


def _timed(children: Sequence[Any]) -> list[dict[str, float]]:
    """Return the figures of every iteration of one side, without the warm-ups."""
    figures = []
    for child in children:
        iterations = list(zip(child["laps"], child["sampled_tokens"], strict=True))
        for lap, tokens in iterations[NUM_WARMUPS:]:
            seconds = sum(lap.values())
            sampling_s, learning_s = inner_seconds(lap, SAMPLING), inner_seconds(lap, LEARNING)
            figures.append(
                {
                    "iteration_s": seconds,
                    "sampling_s": sampling_s,
                    "learning_s": learning_s,
                    "other_s": seconds - sampling_s - learning_s,
                    "sampled_tokens": tokens,
                    "iteration_ms_per_token": 1e3 * seconds / tokens,
                    "sampling_ms_per_token": 1e3 * sampling_s / tokens,
                    "learning_ms_per_token": 1e3 * learning_s / tokens,
                }
            )
    return figures


def show(result: dict[str, Any]) -> None:
    """Print the tables and the verdict."""
    console = Console()
    print_machine(console, result["machine"])
    rows = [
        (n.replace("_", " "), f["rrl"], f["trl"], f["ratio"]) for n, f in result["figures"].items()
    ]
    print_table(console, "one iteration, medians", ["", "RRL", "TRL", "RRL / TRL"], rows)
    for side in ("rrl", "trl"):
        starts = ", ".join(f"{seconds:.1f}" for seconds in result["start_s"][side])
        console.print(f"start of {side.upper()}, s: {starts}", highlight=False)
    ratios = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
    verdict = "pass" if result["pass"] else "MISSED"
    console.print(f"ratios of the iterations: {ratios}", highlight=False)
    console.print(
        f"{verdict}: median ratio {result['ratio']:.3f}; "
        f"at most {PASS_RATIO} passes, the goal is {GOAL_RATIO}",
        highlight=False,
    )


def main() -> int:
    """Run both sides A B A B, print the comparison, and return the exit code."""
    parser = base_parser(__doc__ or "", num_iterations=3)
    parser.add_argument("--pairs", type=int, default=2, help="children of each side")
    arguments = parser.parse_args()
    if arguments.child:
        run_as_child(arguments)
        return 0
    machine = machine_facts(arguments.threads)
    sides: dict[str, list[Any]] = {"rrl": [], "trl": []}
    options = ["--iterations", arguments.iterations, "--threads", arguments.threads]
    options += ["--model", arguments.model]
    for seed in range(arguments.pairs):
        for side, children in sides.items():
            child = ["--child", f"{side}:{seed}", *map(str, options)]
            children.append(run_child(__file__, child, arguments.threads, CHILD_TIMEOUT_S))
    result = {"machine": machine} | compare(sides["rrl"], sides["trl"])
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
