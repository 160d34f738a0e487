"""Samplers: they turn prompts into completions under a given version of the policy.

`protocol` says what each of them does; `make_sampler` makes one. `transformers_engine` needs
nothing but the model, `vllm_engine` is the fast one, `fake` needs no model at all.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from rrl_core.sampling.protocol import (
    Completion,
    FinishReason,
    Sampler,
    SampleRequest,
    SamplerError,
    SamplingParams,
    SyncMode,
)
from rrl_core.sampling.settings import SamplerSettings

if TYPE_CHECKING:
    from rrl_core.policy.model import Policy

SamplerName = Literal["auto", "vllm", "transformers", "fake"]

__all__ = [
    "Completion",
    "FinishReason",
    "SampleRequest",
    "Sampler",
    "SamplerError",
    "SamplerName",
    "SamplerSettings",
    "SamplingParams",
    "SyncMode",
    "make_sampler",
    "resolve_sampler_name",
]


def resolve_sampler_name(name: SamplerName) -> SamplerName:
    """Return what "auto" stands for here: vLLM where it is installed, else transformers.

    Raises:
        ValueError: an unknown name, or "vllm" where it is not installed.
    """
    if name not in ("auto", "vllm", "transformers", "fake"):
        raise ValueError(f"expected sampler auto, vllm, transformers or fake, got {name!r}")
    is_installed = find_spec("vllm") is not None
    if name == "auto":
        return "vllm" if is_installed else "transformers"
    if name == "vllm" and not is_installed:
        raise ValueError(
            "sampler 'vllm' was asked for, but vLLM is not installed; "
            "install rrl[cpu] or rrl[gpu], or use sampler 'transformers'"
        )
    return name


def make_sampler(
    name: SamplerName, policy: "Policy", settings: SamplerSettings | None = None
) -> Sampler:
    """Start the sampler `name` for `policy`'s base model. Call `load_policy` before `generate`.

    Raises:
        ValueError: an unknown name, or "vllm" where it is not installed.
        SamplerError: the engine did not start.
    """
    name = resolve_sampler_name(name)
    settings = settings or SamplerSettings()
    if name == "vllm":
        from rrl_core.sampling.vllm_engine import VllmSampler

        return VllmSampler(policy, settings)
    if name == "transformers":
        from rrl_core.sampling.transformers_engine import TransformersSampler

        return TransformersSampler(policy, settings.context_tokens, settings.max_num_seqs)
    from rrl_core.sampling.fake import FakeSampler

    return FakeSampler(policy, settings.context_tokens)
