"""The policy: a causal language model with one trainable LoRA adapter and its tokenizer."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rrl_core.policy import adapters
from rrl_core.policy.adapters import AdapterError, AdapterState, LoraSettings
from rrl_core.policy.chat import reply_text
from rrl_core.policy.digest import tensors_digest
from rrl_core.policy.fetch import find_model
from rrl_core.policy.tiny import tiny_model, tiny_tokenizer


class PolicyError(ValueError):
    """A model cannot be loaded as asked; the message says what to do."""


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """Which model is trained, in what precision, and where it starts.

    `name` is "tiny", "smollm2-135m", a folder, or a hub id that was fetched before.
    `start_adapter` is an adapter to go on from (a file or a PEFT folder): it is then the reference
    policy too, and its LoRA settings replace `lora`. None: a fresh adapter, which changes nothing.
    """

    name: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    lora: LoraSettings = field(default_factory=LoraSettings)
    start_adapter: Path | None = None


@dataclass(eq=False)
class Policy:
    """A model, its adapter and its tokenizer.

    `model` is in eval mode: whoever wants LoRA dropout calls `model.train()` and ends it again.
    `model_path` is the folder of the base model; None if it exists in memory only.
    `start_state` is the adapter of the reference policy; None: the base model is the reference.
    """

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    lora: LoraSettings
    base_digest: str
    model_path: Path | None
    context_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int
    start_state: AdapterState | None = None

    def encode(self, messages: Sequence[Mapping[str, str]], opening: str = "") -> list[int]:
        """Return the prompt's token ids: the chat template, ready for the assistant to answer.

        `opening` are first words of the answer that are given to the assistant.

        A tokenizer without a chat template gets the contents joined by empty lines. A lone
        surrogate, which has no UTF-8 form, is read as U+FFFD, as it is stored.
        """
        messages = _with_utf8(messages)
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            ids = list(self.tokenizer(text)["input_ids"])
        else:
            ids = list(
                self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
            )
        return ids + self.tokenizer.encode(opening, add_special_tokens=False) if opening else ids

    def encode_reply(
        self,
        conversation: Sequence[Mapping[str, str]],
        replies: Sequence[Mapping[str, str]],
    ) -> list[int]:
        """Return the token ids between a turn that was sampled to its end, and the next one.

        `conversation` is prompt and turns so far, the last the policy's; `replies` are what is said
        before its next turn (see `chat.py`).
        """
        conversation, replies = _with_utf8(conversation), _with_utf8(replies)
        text = reply_text(self.tokenizer, conversation, replies, self.eos_token_ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; for people, the ids are the truth."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def adapter_state(self) -> AdapterState:
        """Return a copy of the adapter: float32, on the CPU, sorted by name."""
        return adapters.adapter_state(self.model)

    def load_adapter_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the adapter in place; names and shapes must be its own (`AdapterError`)."""
        adapters.load_adapter_state(self.model, state)

    def adapter_bytes(self) -> bytes:
        """Return the adapter as one safetensors file; equal adapters give equal bytes."""
        return adapters.adapter_to_bytes(self.adapter_state(), self.lora)

    def load_adapter_bytes(self, data: bytes) -> None:
        """Overwrite the adapter with what `adapter_bytes` returned.

        Raises:
            AdapterError: damaged, or made with other LoRA settings or for another model.
        """
        state, lora = adapters.adapter_from_bytes(data)
        if lora != self.lora:
            raise AdapterError(
                f"expected an adapter with {self.lora}, got one with {lora}; "
                "use the LoRA settings it was trained with"
            )
        self.load_adapter_state(state)

    def adapter_digest(self) -> str:
        """Return the digest of the adapter's tensors."""
        return tensors_digest(self.adapter_state())

    def digest(self, adapter_digest: str | None = None) -> str:
        """Return the digest of the whole policy: base model, scale of the adapter, adapter.

        `adapter_digest` is the adapter's, where the caller has it already.
        """
        adapter_digest = adapter_digest or self.adapter_digest()
        parts = [self.base_digest, self.lora.alpha / self.lora.rank, adapter_digest]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def merged_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the base model with the adapter merged in.

        Merged in float32, then cast to `dtype` (None: the policy's own). Copy before writing.
        """
        return adapters.merged_tensors(self.model, dtype or self.dtype)

    def save_base(self, folder: Path) -> Path:
        """Write the base model without adapter, and the tokenizer, as a folder others can load."""
        folder.mkdir(parents=True, exist_ok=True)
        base = self.model.get_base_model()
        tensors = {name: t.cpu().contiguous() for name, t in adapters.base_tensors(base)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = base.config.to_dict() | {"architectures": [type(base).__name__]}
        (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
        base.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    def save_adapter(self, folder: Path) -> Path:
        """Write the adapter as a folder that PEFT and vLLM can load."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.peft_config[adapters.ADAPTER].save_pretrained(str(folder))
        (folder / "adapter_model.safetensors").write_bytes(self.adapter_bytes())
        return folder

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make forward passes inside the context those of the reference policy.

        The reference is the policy the run started from, whatever the adapter is now. Use it
        without gradients; gradients of passes made outside are not disturbed.
        """
        if self.start_state is None:
            with self.model.disable_adapter():
                yield
            return
        parameters = adapters.adapter_parameters(self.model)
        trained = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self.start_state[name].to(parameter)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = trained[name]


def _with_utf8(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return messages as text that has a UTF-8 form."""
    return [
        {key: _LONE_SURROGATE.sub("\ufffd", text) for key, text in message.items()}
        for message in messages
    ]


def load_policy_model(spec: ModelSpec, seed: int) -> Policy:
    """Load the base model of `spec` and attach its adapter.

    Args:
        spec: what to load. Nothing is downloaded: see `rrl_core.policy.fetch.fetch_model`.
        seed: of the adapter's random half; the random state of the process is left as it was.

    Raises:
        ModelNotFoundError: there is no such model on this machine.
        AdapterError: `spec.start_adapter` is missing, of another kind, or of another model.
    """
    dtype = DTYPES[spec.dtype]
    base, tokenizer, path = _load_base(spec.name, dtype)
    base_digest = tensors_digest(dict(adapters.base_tensors(base)))
    start_state, lora = None, spec.lora
    if spec.start_adapter is not None:
        start_state, lora = adapters.read_adapter(spec.start_adapter)
    model = adapters.attach_adapter(base, lora, seed)
    if start_state is not None:
        adapters.load_adapter_state(model, start_state)
    device = torch.device(_device_name(spec.device))
    eos_token_ids = _eos_token_ids(base, tokenizer, spec.name)
    pad = tokenizer.pad_token_id
    return Policy(
        model=model.to(device),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        lora=lora,
        base_digest=base_digest,
        model_path=path,
        context_tokens=int(base.config.max_position_embeddings),
        eos_token_ids=eos_token_ids,
        pad_token_id=min(eos_token_ids) if pad is None else int(pad),
        start_state=start_state,
    )


def _load_base(name: str, dtype: torch.dtype) -> tuple[Any, PreTrainedTokenizerBase, Path | None]:
    if name == "tiny":
        return tiny_model(dtype), tiny_tokenizer(), None
    path = find_model(name)
    disable_progress_bar()
    try:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"expected a causal language model and its tokenizer in {path}, could not load them: "
            f"{error}"
        ) from error
    return base, tokenizer, path


def _device_name(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise PolicyError("expected a GPU for device = 'cuda', found none; use 'auto' or 'cpu'")
    return device


def _eos_token_ids(base: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> frozenset[int]:
    """Return the ids that end a completion: the model's, one or several, and the tokenizer's."""
    configured = base.generation_config.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured])
    ids = {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not ids:
        raise PolicyError(
            f"expected model {name!r} to name an end-of-sequence token in generation_config.json "
            "or its tokenizer, found none; add eos_token_id there"
        )
    return frozenset(ids)
