"""What makes the vectors that memory compares: hashed n-grams, or a sentence model."""

from functools import cache

import pyarrow.compute as pc

from flows.config import ReviewSection
from rrl_core.policy.sentences import load_sentence_model
from rrl_core.review.similarity import HASHED, Embedder
from storage import Store


def embedder_of(config: ReviewSection) -> Embedder:
    """Return what makes the vectors of problems; a sentence model is loaded once a process.

    Raises:
        ModelNotFoundError, PolicyError: there is no such sentence model on this machine.
    """
    return HASHED if config.embedding_model is None else _sentence_model(config.embedding_model)


_sentence_model = cache(load_sentence_model)


def stored_names(store: Store, run_id: str) -> list[str]:
    """Return the names of what made the vectors of a run so far."""
    names: set[str] = set()
    for batch in store.batches("embeddings"):
        own = batch.filter(pc.equal(batch["run_id"], run_id))
        names.update(own["model"].unique().to_pylist())
    return sorted(names)
