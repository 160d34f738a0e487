"""Digests that name model parts by their content."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 (hex) over name, dtype, shape and bytes of every tensor, sorted by name.

    The order of the mapping and the device of the tensors don't matter; their dtype does.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
