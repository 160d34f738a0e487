"""AdamW's state as bytes: what a resumed run needs to go on as if it had never stopped.

One safetensors file: `<parameter>.exp_avg` and `<parameter>.exp_avg_sq` in float32, the number of
steps of each parameter in the metadata. Equal states give equal bytes.
"""

import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")
_METADATA_KEY = "adamw"  # one key: safetensors writes several in a random order


class OptimizerStateError(ValueError):
    """The bytes are no optimizer state, or one of other parameters; the optimizer is unchanged."""


def optimizer_to_bytes(optimizer: AdamW, parameters: Mapping[str, Parameter]) -> bytes:
    """Return the state of `parameters`; one that has not taken a step yet is left out."""
    tensors: dict[str, Tensor] = {}
    steps: dict[str, int] = {}
    for name, parameter in sorted(parameters.items()):
        if state := optimizer.state.get(parameter):
            steps[name] = int(state["step"])
            tensors |= {f"{name}.{m}": state[m].cpu().contiguous() for m in _MOMENTS}
    return bytes(save(tensors, {_METADATA_KEY: json.dumps(steps)}))


def optimizer_from_bytes(
    optimizer: AdamW, parameters: Mapping[str, Parameter], data: bytes
) -> None:
    """Give the optimizer the state `optimizer_to_bytes` returned; learning rates stay as they are.

    Raises:
        OptimizerStateError: damaged bytes, or names or shapes that are not the parameters'.
    """
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        steps = json.loads(header["__metadata__"][_METADATA_KEY])
    except (SafetensorError, KeyError, ValueError) as error:
        raise OptimizerStateError(
            f"expected an AdamW state as safetensors with {_METADATA_KEY!r} in its metadata, got "
            f"{len(data)} bytes that are not: {error!r}"
        ) from error
    shapes = {
        f"{name}.{m}": parameters[name].shape for name in steps if name in parameters
        for m in _MOMENTS
    }  # fmt: skip
    if wrong := sorted(steps.keys() - parameters.keys()) or sorted(shapes.keys() ^ tensors.keys()):
        raise OptimizerStateError(
            f"expected a state of this adapter's {len(parameters)} parameters, but {wrong[0]!r} is "
            "on one side only; it was saved with another model or other LoRA settings"
        )
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise OptimizerStateError(
                f"expected {name!r} of shape {tuple(shapes[name])}, got {tuple(tensor.shape)}; it "
                "was saved with other LoRA settings"
            )
    state = {
        index: {"step": torch.tensor(float(steps[name]))}
        | {m: tensors[f"{name}.{m}"] for m in _MOMENTS}
        for index, name in enumerate(parameters)
        if name in steps
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
