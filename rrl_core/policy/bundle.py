"""Several byte strings as one: a safetensors file with one tensor of bytes per name.

Equal parts give equal bytes.
"""

from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

_SUFFIX = ".bytes"  # tells a part from a tensor of another safetensors file


class BundleError(ValueError):
    """The bytes are no bundle."""


def bundle(parts: Mapping[str, bytes]) -> bytes:
    """Return the parts as one byte string."""
    return bytes(
        save({n + _SUFFIX: np.frombuffer(parts[n], dtype=np.uint8) for n in sorted(parts)})
    )


def is_bundle(data: bytes) -> bool:
    """Return whether the bytes are a whole bundle."""
    try:
        names = load(data).keys()
    except SafetensorError:
        return False
    return bool(names) and all(name.endswith(_SUFFIX) for name in names)


def unbundle(data: bytes) -> dict[str, bytes]:
    """Return the parts `bundle` was given.

    Raises:
        BundleError: the bytes are damaged, or something else.
    """
    if not is_bundle(data):
        raise BundleError(f"expected bytes that `bundle` made, got {len(data)} that are not")
    return {name.removesuffix(_SUFFIX): part.tobytes() for name, part in load(data).items()}
