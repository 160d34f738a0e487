"""How a sampler is set up; one record for all engines."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SamplerSettings:
    """Size, precision and weight sync of a sampler. Fields an engine has no use for are ignored."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of vLLM's weights and cache; None: the policy's. Log-probs of a bfloat16 engine
    differ from a float32 learner's by 0.03 on average."""

    context_tokens: int = 2048
    """Longest prompt + completion; at most the model's own context."""

    max_num_seqs: int = 128
    """Sequences generated side by side; on CPU too, vLLM is fastest with many."""

    sync: Literal["auto", "merged", "lora"] = "auto"
    """How vLLM gets new weights: the adapter merged into the base weights, or as LoRA.
    auto: merged on CPU, where LoRA is many times slower; lora on GPU."""

    seed_mode: Literal["sample", "batch"] = "sample"
    """sample: each request's seed decides its draw. batch: the seeds of a call decide its draws
    together, which costs less time on GPU and depends on the composition of the batch."""

    enforce_eager: bool | Literal["auto"] = "auto"
    """Run vLLM without compiling the model. auto: compile on GPU only; on CPU the compiled model
    needs a C++ compiler and minutes to start, and is hardly faster."""

    kv_cache_gib: float | None = None
    """Memory of vLLM's cache. None: 1 GiB on CPU, `gpu_memory_utilization` on GPU."""

    gpu_memory_utilization: float = 0.4
    """Share of the GPU's memory for weights and cache; the learner needs the rest."""
