"""LoRA adapters: attach, read, write, and merge into the weights of the base model.

An adapter is a mapping of PEFT's own tensor names (without the adapter's name) to float32 tensors.
As bytes it is one safetensors file whose metadata hold the LoRA settings; equal adapters give
equal bytes. Only plain LoRA on linear layers is supported: whatever else PEFT offers is refused,
since merged weights, digests and the reference policy would silently ignore it.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

ADAPTER = "default"  # PEFT's name of the trainable adapter
_METADATA_KEY = "lora"


class AdapterError(ValueError):
    """An adapter cannot be used with this policy; the message says what differs."""


@dataclass(frozen=True)
class LoraSettings:
    """Size and place of the trained low-rank matrices: W + alpha/rank · B·A."""

    rank: int = 16
    alpha: float = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.0


AdapterState = dict[str, Tensor]


def attach_adapter(base: nn.Module, settings: LoraSettings, seed: int) -> PeftModel:
    """Wrap `base` with a fresh trainable adapter: A drawn from `seed`, B zero.

    The caller's random state is left as it was. Dropout is off until `.train()` is called.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = get_peft_model(base, _peft_config(settings))
        except ValueError as error:
            raise AdapterError(
                f"expected target_modules that name linear layers of the model, came "
                f"{settings.target_modules!r}: {error}"
            ) from error
    embedding = base.get_input_embeddings().weight  # type: ignore[operator]
    for name, layer in _lora_layers(model).items():
        inner = layer.get_base_layer()
        if not isinstance(inner, nn.Linear | Conv1D) or inner.weight is embedding:
            raise AdapterError(
                f"expected linear layers of their own as LoRA targets, but {name!r} is a "
                f"{type(inner).__name__} (or shares its weight with the embedding); "
                "use target_modules = 'all-linear' or leave it out"
            )
    return model.eval()


def add_adapter(model: PeftModel, adapter: str, seed: int) -> None:
    """Give the model one more adapter, as large and as fresh as the first once was; it stays idle.

    The caller's random state is left as it was.

    Raises:
        AdapterError: the model has an adapter of this name.
    """
    if adapter in model.peft_config:
        raise AdapterError(
            f"expected a model without an adapter {adapter!r}, got one that has it; load the "
            "model anew"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(adapter, copy.deepcopy(model.peft_config[ADAPTER]))
    model.eval()  # a new layer's dropout is on


@contextmanager
def active_adapter(model: PeftModel, adapter: str) -> Iterator[None]:
    """Make forward passes inside the context those of another adapter.

    Whatever is differentiated inside must also be run inside: PEFT freezes the adapter that is not
    active, and a frozen tensor silently drops the gradient of a pass made before.
    """
    model.set_adapter(adapter)
    try:
        yield
    finally:
        model.set_adapter(ADAPTER)


def adapter_parameters(model: PeftModel, adapter: str = ADAPTER) -> dict[str, Parameter]:
    """Return an adapter's parameters by name, sorted by name; that of the policy by default."""
    suffix = f".{adapter}.weight"
    named = (
        (name.removesuffix(suffix) + ".weight", parameter)
        for name, parameter in model.named_parameters()
        if ".lora_" in name and name.endswith(suffix)
    )
    return dict(sorted(named))


def adapter_state(model: PeftModel) -> AdapterState:
    """Return a copy of the adapter: float32, on the CPU, sorted by name."""
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in adapter_parameters(model).items()
    }


def load_adapter_state(model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Overwrite the policy's adapter with `state`, in place.

    Raises:
        AdapterError: names or shapes differ from the adapter's; nothing was changed.
    """
    overwrite(adapter_parameters(model), state)


def overwrite(parameters: Mapping[str, Parameter], state: Mapping[str, Tensor]) -> None:
    """Overwrite `parameters` with `state`, in place.

    Raises:
        AdapterError: names or shapes differ; nothing was changed.
    """
    if unmatched := sorted(parameters.keys() ^ state.keys()):
        raise AdapterError(
            f"expected an adapter of {len(parameters)} tensors, got {len(state)}; {unmatched[0]!r} "
            "is on one side only; it was made for another base model or other target_modules"
        )
    for name, parameter in parameters.items():
        if parameter.shape != state[name].shape:
            raise AdapterError(
                f"expected {name!r} of shape {tuple(parameter.shape)}, got "
                f"{tuple(state[name].shape)}; it was made for another base model or rank"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def adapter_to_bytes(state: Mapping[str, Tensor], settings: LoraSettings) -> bytes:
    """Return one safetensors file with `state`, and `settings` in its metadata."""
    # One metadata key: safetensors writes several in a random order.
    metadata = {_METADATA_KEY: json.dumps(asdict(settings), sort_keys=True)}
    return bytes(save_safetensors(dict(sorted(state.items())), metadata))


def adapter_from_bytes(data: bytes) -> tuple[AdapterState, LoraSettings]:
    """Read what `adapter_to_bytes` wrote.

    Raises:
        AdapterError: the bytes are damaged or lack the LoRA settings.
    """
    try:
        state = load_safetensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        fields = json.loads(header["__metadata__"][_METADATA_KEY])
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterError(
            f"expected an adapter as safetensors with {_METADATA_KEY!r} in its metadata, "
            f"got {len(data)} bytes that are not: {error!r}"
        ) from error
    if isinstance(fields["target_modules"], list):
        fields["target_modules"] = tuple(fields["target_modules"])
    return state, LoraSettings(**fields)


def read_adapter(path: Path) -> tuple[AdapterState, LoraSettings]:
    """Read an adapter from a file of `adapter_to_bytes`, or from a folder that PEFT saved.

    Raises:
        AdapterError: nothing there, or an adapter of a kind that is not supported.
    """
    if path.is_file():
        return adapter_from_bytes(path.read_bytes())
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    if not (weights.is_file() and config.is_file()):
        raise AdapterError(
            f"expected an adapter at {path}: a .safetensors file, or a folder with "
            f"{config.name} and {weights.name}; give the path of one"
        )
    settings = _settings_of(LoraConfig.from_pretrained(str(path)))
    state = load_safetensors(weights.read_bytes())
    return {name: state[name].float() for name in sorted(state)}, settings


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `model` that a checkpoint holds, without any adapter, under its names.

    Tied tensors come once, under their first name (the embedding's).
    """
    for name, tensor, _ in _base_tensors_and_layers(model):
        yield name, tensor


def merged_tensors(model: PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's tensors with the adapter merged in: W + scale · B·A.

    The sum is taken in float32 and then cast to `dtype`. Tensors without an adapter may share
    memory with the model: copy before writing to them.
    """
    for name, tensor, layer in _base_tensors_and_layers(model.get_base_model()):
        yield name, (tensor if layer is None else _merge(tensor, layer)).to(dtype)


def _merge(weight: Tensor, layer: Any) -> Tensor:
    """Return W + scale · B·A in float32; GPT-2's Conv1D holds W transposed."""
    a, b = (pair[ADAPTER].weight.detach().float() for pair in (layer.lora_A, layer.lora_B))
    left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
    return torch.addmm(weight.float(), left, right, alpha=layer.scaling[ADAPTER])


def _base_tensors_and_layers(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    layers = {f"{name}.base_layer.weight": layer for name, layer in _lora_layers(model).items()}
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, tensor in [*model.named_parameters(), *buffers]:
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor.detach(), layers.get(name)


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def _peft_config(settings: LoraSettings) -> LoraConfig:
    targets = settings.target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


# Fields of a PEFT config that don't change what a trained adapter computes, or that we read.
_NEUTRAL_FIELDS = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "base_model_name_or_path",
    "revision", "inference_mode", "peft_version", "auto_mapping", "init_lora_weights",
    "fan_in_fan_out", "runtime_config",
}  # fmt: skip


def _settings_of(config: LoraConfig) -> LoraSettings:
    targets = config.target_modules
    settings = LoraSettings(
        rank=config.r,
        alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else tuple(sorted(targets)),
        dropout=config.lora_dropout,
    )
    plain = _peft_config(settings).to_dict()
    for field, value in config.to_dict().items():
        if field not in _NEUTRAL_FIELDS and value != plain.get(field):
            raise AdapterError(
                f"expected a plain LoRA adapter, but its {field} = {value!r} "
                f"(plain: {plain.get(field)!r}); merge it into the base model first"
            )
    return settings
