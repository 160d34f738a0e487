"""How large an adapter will be, found without loading any weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rrl_core.policy.adapters import adapter_parameters, attach_adapter
from rrl_core.policy.fetch import find_model
from rrl_core.policy.model import ModelSpec
from rrl_core.policy.tiny import tiny_model


def adapter_num_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the float32 adapter that `spec` asks for.

    Raises:
        ModelNotFoundError: there is no such model on this machine.
    """
    if spec.name == "tiny":
        base = tiny_model(torch.float32)
    else:
        config = AutoConfig.from_pretrained(find_model(spec.name), local_files_only=True)
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        model = attach_adapter(base, spec.lora, seed=0)
    return sum(4 * p.numel() for p in adapter_parameters(model).values())
