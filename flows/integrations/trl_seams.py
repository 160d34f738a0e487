"""Where TRL's GRPOTrainer is looked into: the methods that are wrapped, on the instance alone.

A callback of transformers is told of steps, not of samples, and is never given the trainer. So the
trainer itself is wrapped, method by method. These were chosen because each is the one place where
something is known:

    _generate_and_score_completions  examples in, the batch with advantages out
    _generate_single_turn            token ids before TRL decodes, scores and compares them
    _calculate_rewards               the value of each reward function
    compute_loss                     what a micro-batch is trained on, whatever was shuffled before
    _get_per_token_logps_and_entropies  the log-probs TRL's loss rests on
    _get_grad_norm                   the norm before clipping

All but `compute_loss` are private, so they are checked by name and by the arguments they take.
"""

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

KNOWN_TRL = "1.16"
MARK = "_is_recorded_by_rrl"
SEAMS: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask"),
    "_get_grad_norm": ("model", "grad_norm"),
}
ATTRIBUTES = (
    "accelerator", "args", "beta", "environment_factories", "eos_token_ids", "loss_type",
    "max_completion_length", "min_p", "model", "num_generations", "processing_class",
    "repetition_penalty", "reward_func_names", "reward_funcs", "reward_weights", "rollout_func",
    "temperature", "tools", "top_k", "top_p", "use_vllm", "vllm_importance_sampling_correction",
)  # fmt: skip


class RecordingError(ValueError):
    """A trainer cannot be recorded, or its log came to an end; the message says what to do."""


def check_seams(trainer: Any) -> None:
    """Refuse a trainer that cannot be looked into.

    Raises:
        RecordingError: names what is missing and the version of TRL this was written for.
    """
    if MARK in vars(trainer):
        raise RecordingError("this trainer is recorded already: call `record` once a trainer")
    missing = [f"attribute {name}" for name in ATTRIBUTES if not hasattr(trainer, name)]
    for name, wanted in SEAMS.items():
        method = getattr(trainer, name, None)
        if not callable(method):
            missing.append(f"method {name}")
        elif tuple(inspect.signature(method).parameters)[: len(wanted)] != wanted:
            missing.append(f"method {name}({', '.join(wanted)})")
    if missing:
        raise unknown_trl(f"{type(trainer).__name__} has no {'; no '.join(missing)}")


def unknown_trl(what: str) -> RecordingError:
    """Return the error for a trainer that is not as expected."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return RecordingError(
        f"expected the GRPOTrainer of trl {KNOWN_TRL}; came trl {version}, where {what}; "
        f"install `trl=={KNOWN_TRL}.*`"
    )


def wrap(trainer: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of this trainer by `wrapper`, which gets the method it replaces first."""
    original = getattr(trainer, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(trainer, name, wrapped)
    setattr(trainer, MARK, True)


def check_kind(trainer: Any, has_replay: bool) -> None:
    """Refuse a trainer whose batches are not whole groups, or which cannot be replayed into.

    Raises:
        RecordingError: says what it would have to be.
    """
    if trainer.accelerator.num_processes > 1:
        raise RecordingError(
            f"expected a trainer of one process; came {trainer.accelerator.num_processes}: each "
            "would see its own part of a group"
        )
    if trainer.environment_factories is not None:
        raise RecordingError("expected prompts from a data set; came environments")
    if not has_replay:
        return
    if trainer.tools or trainer.rollout_func is not None:
        raise RecordingError(
            "replay: expected completions that TRL samples by itself; came tools or a "
            "`rollout_func`: record without `replay`"
        )
    cut = cut_distribution(trainer)
    if cut is not None:
        raise RecordingError(f"replay needs the log-probs of whole distributions: {cut}")


def cut_distribution(trainer: Any) -> str | None:
    """Return why the trainer's log-probs are not the sampler's; None where they are."""
    neutral = {"top_p": (1.0,), "top_k": (0, None), "min_p": (0.0, None),
               "repetition_penalty": (1.0,)}  # fmt: skip
    cut = [name for name, values in neutral.items() if getattr(trainer, name) not in values]
    if trainer.args.generation_kwargs:
        cut.append("generation_kwargs")
    return f"{', '.join(cut)} change the distribution that was sampled from" if cut else None
