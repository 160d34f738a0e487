"""Real GRPO runs of TRL, small and offline: a random model, a few steps, a hash as reward."""

import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from rrl_core.policy.tiny import tiny_model, tiny_tokenizer

with pytest.MonkeyPatch.context() as patch:  # TRL loads vLLM where it is: seconds, for nothing here
    patch.setattr(
        sys.modules[f"{trl.__name__}.import_utils"], "is_vllm_available", lambda *_, **__: False
    )
    from trl import GRPOConfig, GRPOTrainer

GROUP = 4
PROMPTS = ("1 + 1 =", "2 + 2 =")
ENDS = [*range(0, 256, 8), 258]  # many ids end a completion, so that some of 12 tokens do


def chance(completions: Any, **_: Any) -> list[float]:
    """About one completion in three is right."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(zlib.crc32(text.encode("utf-8", "replace")) % 3 == 0) for text in texts]


def length(completions: Any, **_: Any) -> list[float | None]:
    """None for an odd number of characters."""
    return [None if len(text) % 2 else len(text) / 10 for text in completions]


def make_trainer(
    folder: Path,
    reward: Any = chance,
    kind: type[GRPOTrainer] = GRPOTrainer,
    prompts: Any = PROMPTS,
    model: Path | None = None,
    **args: Any,
) -> GRPOTrainer:
    """Return a trainer of two prompts a step, four completions each."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    policy = tiny_model(torch.float32)
    if model is not None:
        policy.config._name_or_path = str(model)
    policy.generation_config.eos_token_id = ENDS
    examples = Dataset.from_list([{"prompt": p, "answer": str(p)} for p in prompts])
    settings = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "num_generations": GROUP, "max_completion_length": 12,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "beta": 0.0,
    }  # fmt: skip
    return kind(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=examples,
        eval_dataset=examples,
        args=GRPOConfig(**settings | args),
    )


class Watching(GRPOTrainer):  # type: ignore[misc]
    """Keeps what its loss is given and what its reward functions return, below any wrapper."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained: list[dict[str, Any]] = []
        self.judged: list[tuple[list[list[int]], torch.Tensor]] = []

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        step = self.state.global_step + 1
        self.trained.append({k: v.clone() for k, v in inputs.items()} | {"step": step})
        return loss

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        values = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.judged.append(([list(ids) for ids in completion_ids_list], values.clone()))
        return values

    def sequences(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...], float]]:
        """Return step, prompt ids, completion ids and advantage of all that was trained on."""
        found = []
        for batch in self.trained:
            rows = zip(
                batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"],
                batch["completion_mask"], batch["advantages"], strict=True,
            )  # fmt: skip
            for prompt, prompt_mask, ids, mask, advantage in rows:
                kept = (
                    tuple(prompt[prompt_mask.bool()].tolist()),
                    tuple(ids[mask.bool()].tolist()),
                )
                found.append((batch["step"], *kept, float(advantage)))
        return sorted(found)
