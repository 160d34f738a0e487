"""Texts of token ids, where the tokenizer lies on this machine; no model is loaded."""

from collections.abc import Collection

from rrl_core.policy.fetch import ModelNotFoundError, find_model

NUM_BYTES = 256


def token_pieces(model: str, ids: Collection[int]) -> dict[int, str] | None:
    """Return the text of each id by the tokenizer of `model`; None where there is none here.

    Args:
        model: as `model.name` of a configuration; "tiny" has bytes for tokens.
        ids: of tokens.
    """
    if model == "tiny":
        return {i: bytes([i]).decode("latin-1") for i in ids if i < NUM_BYTES}
    try:
        file = find_model(model) / "tokenizer.json"
    except (ModelNotFoundError, OSError):
        return None
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return {i: tokenizer.decode([i], skip_special_tokens=False) for i in ids}
