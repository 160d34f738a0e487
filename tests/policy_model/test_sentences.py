"""A sentence model from a folder: its vectors, its name, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from rrl_core.policy.fetch import ModelNotFoundError
from rrl_core.policy.model import PolicyError
from rrl_core.policy.sentences import load_sentence_model
from rrl_core.policy.tiny import tiny_tokenizer
from tests.policy_model.models import bert_folder

ROUNDING = 1e-6
TEXTS = ["How many ducks swim?", "What is 3 + 4?", "é \ud800", "duck " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("sentences"))


def test_a_vector_is_the_mean_of_the_last_hidden_states_of_length_one(folder: Path):
    embedder = load_sentence_model(str(folder))
    model = AutoModel.from_pretrained(folder).eval()
    vectors = embedder.embed(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((4, embedder.num_places), np.float32)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = tiny_tokenizer()(text.encode("utf-8", "replace").decode())["input_ids"]
        with torch.no_grad():  # of the last text 64 tokens fit
            mean = model(torch.tensor([ids[:64]])).last_hidden_state[0].double().mean(0)
        assert vector == pytest.approx((mean / mean.norm()).numpy(), abs=ROUNDING)


def test_no_bit_of_a_vector_depends_on_the_other_texts(folder: Path):
    embedder = load_sentence_model(str(folder))
    together = embedder.embed(TEXTS)
    assert all(
        vector.tolist() == embedder.embed([text])[0].tolist()
        for text, vector in zip(TEXTS, together, strict=True)
    )
    assert embedder.embed([]).shape == (0, embedder.num_places)
    assert not embedder.embed([""]).any()


def test_other_weights_have_another_name(folder: Path, tmp_path: Path):
    name = load_sentence_model(str(folder)).name
    assert load_sentence_model(str(folder)).name == name
    assert load_sentence_model(str(bert_folder(tmp_path, seed=2))).name != name


def test_what_is_no_sentence_model_is_refused(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_sentence_model(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match="expected a sentence model"):
        load_sentence_model(str(tmp_path))


@pytest.mark.parametrize(
    ("pooling", "is_mean"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True),
        ({"pooling_mode": "mean"}, True),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, False),
        ({"pooling_mode": "cls"}, False),
    ],
)
def test_a_model_that_says_it_pools_otherwise_is_refused(pooling: dict, is_mean: bool, tmp_path):
    folder = bert_folder(tmp_path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if is_mean:
        assert load_sentence_model(str(folder)).num_places == 32
    else:
        with pytest.raises(PolicyError, match="mean"):
            load_sentence_model(str(folder))
