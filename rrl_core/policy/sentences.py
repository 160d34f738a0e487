"""Vectors of texts by a sentence model that lies on this machine, in place of hashed n-grams.

    vector = m / |m|,  m = mean over the text's tokens of the last hidden state

The mean, special tokens included, is what most sentence models are trained with; a folder that says
it pools otherwise (`1_Pooling/config.json`) is refused. Each text is run alone, in float32 on the
CPU, so that no bit of a vector depends on what else is asked: a resumed run finds the same reviews.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rrl_core.policy.digest import tensors_digest
from rrl_core.policy.fetch import find_model
from rrl_core.policy.model import PolicyError
from rrl_core.review.similarity import Embedder, Vectors


def load_sentence_model(name: str) -> Embedder:
    """Return what embeds texts by a sentence model; nothing is downloaded.

    Args:
        name: a folder, or a hub id that was fetched before (see `find_model`). Texts are cut at the
            model's own length.

    Raises:
        ModelNotFoundError: there is no such model on this machine.
        PolicyError: it cannot be loaded, or pools otherwise than by the mean.
    """
    folder = find_model(name)
    disable_progress_bar()
    _check_pooling(folder)
    try:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"expected a sentence model and its tokenizer in {folder}, could not load them: {error}"
        ) from error
    model.eval()
    num_places = int(model.config.hidden_size)
    longest = min(
        tokenizer.model_max_length,
        getattr(model.config, "max_position_embeddings", tokenizer.model_max_length),
    )

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), num_places), dtype=np.float32)
        for place, text in enumerate(texts):
            # A lone surrogate has no UTF-8 form to be cut into tokens.
            ids = tokenizer(
                text.encode("utf-8", "replace").decode(), truncation=True, max_length=longest
            )["input_ids"]
            if ids:
                mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
                vectors[place] = torch.nn.functional.normalize(mean, dim=0).numpy()
        return vectors

    digest = tensors_digest(model.state_dict())
    return Embedder(f"mean-{digest[:16]}/1", num_places, embed)


def _check_pooling(folder: Path) -> None:
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return
    told = json.loads(path.read_text())
    modes = {key.removeprefix("pooling_mode_"): value for key, value in told.items()}
    chosen = {modes.get("pooling_mode")} - {None} or {
        key for key, value in modes.items() if value is True and key.endswith(("_token", "_tokens"))
    }
    if chosen not in ({"mean"}, {"mean_tokens"}):
        raise PolicyError(
            f"expected a sentence model that pools by the mean of its tokens; {path} says "
            f"{sorted(map(str, chosen))}; choose another, or leave `review.embedding_model` off"
        )
