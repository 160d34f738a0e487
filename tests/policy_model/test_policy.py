"""The policy: what it loads, how it speaks, what its digests cover, and its reference."""

import contextlib
import hashlib
from pathlib import Path

import pytest
import torch

from rrl_core.policy.digest import tensors_digest
from rrl_core.policy.fetch import ModelNotFoundError
from rrl_core.policy.model import LoraSettings, ModelSpec, Policy, load_policy_model
from tests.policy_model.models import gpt2_folder

TINY_DIGEST = "ced47ac3672b1bf51cceb62ce6f42cae201328612c55b52d8b0da6a005e1db1f"


def tiny(seed: int = 1, **fields: object) -> Policy:
    return load_policy_model(ModelSpec("tiny", device="cpu", **fields), seed)


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(torch.tensor([[1, 2, 3, 4, 5]])).logits


def with_random_b(policy: Policy, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(7)
    state = policy.adapter_state()
    for name, tensor in state.items():
        if "lora_B" in name:
            state[name] = torch.randn(tensor.shape, generator=generator) * scale
    policy.load_adapter_state(state)


def test_digest_is_the_hash_of_name_dtype_shape_and_bytes_sorted_by_name() -> None:
    tensors = {"b": torch.tensor([1.0]), "a": torch.tensor([[2], [3]], dtype=torch.int32)}
    # float32 1.0 is 0000803f in little-endian order.
    text = (
        b'["a", "int32", [2, 1]]\n' + bytes([2, 0, 0, 0, 3, 0, 0, 0])
        + b'["b", "float32", [1]]\n' + bytes.fromhex("0000803f")
    )  # fmt: skip
    assert tensors_digest(tensors) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([1.0, 2.5])},
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)},
        {},
    ],
    ids=["name", "value", "shape", "dtype", "absent"],
)
def test_digest_covers_name_value_shape_and_dtype(other: dict[str, torch.Tensor]) -> None:
    assert tensors_digest(other) != tensors_digest({"a": torch.tensor([1.0, 2.0])})


def test_digest_ignores_memory_layout() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert tensors_digest({"a": matrix.T}) == tensors_digest({"a": matrix.T.contiguous()})


def test_tiny_is_the_same_model_for_ever() -> None:
    assert tiny().base_digest == TINY_DIGEST


def test_loading_leaves_the_random_state_alone_and_does_not_depend_on_it(tmp_path: Path) -> None:
    folder = tiny().save_base(tmp_path / "base")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    policy = tiny()
    load_policy_model(ModelSpec(str(folder), device="cpu"), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert tiny().digest() == policy.digest()


def test_a_fresh_adapter_changes_nothing_and_its_a_comes_from_the_seed() -> None:
    first, second = tiny(1), tiny(2)
    assert torch.equal(logits(first), logits(second))
    assert first.base_digest == second.base_digest
    assert first.digest() != second.digest()
    state = first.adapter_state()
    assert all(not state[name].any() for name in state if "lora_B" in name)
    assert all(state[name].any() for name in state if "lora_A" in name)


def test_policy_digest_covers_base_adapter_and_its_scale() -> None:
    policy = tiny()
    digests = {policy.digest(), tiny(lora=LoraSettings(alpha=16)).digest()}
    digests.add(tiny(dtype="bfloat16").digest())
    with_random_b(policy)
    digests.add(policy.digest())
    assert len(digests) == 4


def test_only_the_adapter_is_trainable_and_dropout_is_off() -> None:
    policy = tiny(lora=LoraSettings(dropout=0.5))
    trainable = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trainable
    assert all(".lora_" in name for name in trainable)
    with_random_b(policy)
    assert torch.equal(logits(policy), logits(policy))


def test_a_bfloat16_model_trains_a_float32_adapter() -> None:
    policy = tiny(dtype="bfloat16")
    dtypes = {p.dtype for p in policy.model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32}
    assert {t.dtype for t in policy.adapter_state().values()} == {torch.float32}
    assert logits(policy).dtype == torch.bfloat16


def test_bytes_are_tokens_and_come_back() -> None:
    policy = tiny()
    text = "2 + 3 = 5, é😀\n" + "".join(map(chr, range(256)))
    ids = policy.tokenizer.encode(text)
    assert ids == list(text.encode())
    assert policy.decode([*ids, 258, 256]) == text


def test_a_byte_that_is_no_text_spoils_only_itself() -> None:
    assert tiny().decode([104, 0xC3, 52, 50]) == "h\N{REPLACEMENT CHARACTER}42"


def test_messages_become_a_prompt_for_the_assistant() -> None:
    policy = tiny()
    ids = policy.encode([{"role": "system", "content": "S"}, {"role": "user", "content": "2+3"}])
    assert policy.decode(ids) == "system: S\nuser: 2+3\nassistant: "


def test_without_a_chat_template_the_contents_are_joined() -> None:
    policy = tiny()
    policy.tokenizer.chat_template = None
    ids = policy.encode([{"role": "system", "content": "S"}, {"role": "user", "content": "2+3"}])
    assert policy.decode(ids) == "S\n\n2+3"


def test_a_saved_base_model_loads_as_the_same_policy(tmp_path: Path) -> None:
    policy = tiny()
    with_random_b(policy)
    loaded = load_policy_model(
        ModelSpec(str(policy.save_base(tmp_path / "base")), device="cpu"), seed=1
    )
    assert loaded.base_digest == policy.base_digest
    assert loaded.model_path == tmp_path / "base"
    assert loaded.encode([{"role": "user", "content": "2+3"}]) == policy.encode(
        [{"role": "user", "content": "2+3"}]
    )
    assert (loaded.eos_token_ids, loaded.pad_token_id) == (frozenset({258}), 256)
    assert (loaded.context_tokens, tiny().model_path) == (2048, None)


def test_every_configured_eos_ends_a_completion_and_pad_may_be_one(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "gpt2", eos_token_id=[10, 46])
    policy = load_policy_model(ModelSpec(str(folder), device="cpu"), seed=1)
    assert policy.eos_token_ids == {10, 46, 258}
    tokenizer = policy.tokenizer
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert load_policy_model(ModelSpec(str(folder), device="cpu"), seed=1).pad_token_id == 10


@pytest.mark.parametrize("name", ["./no-such-folder", "no-such-model", "no-such/model"])
def test_a_missing_model_is_named_with_advice(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"{name}.*(rrl model fetch|check the path)"):
        load_policy_model(ModelSpec(name), seed=1)


def test_a_folder_that_is_no_language_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="could not load"):
        load_policy_model(ModelSpec(str(tmp_path)), seed=1)


def test_the_reference_is_the_base_model_whatever_the_adapter_is() -> None:
    policy = tiny()
    start = logits(policy)
    with_random_b(policy)
    with policy.reference():
        assert torch.equal(logits(policy), start)
    assert not torch.allclose(logits(policy), start)


def start_adapter_file(folder: Path) -> Path:
    policy = tiny(3)
    with_random_b(policy)
    path = folder / "start.safetensors"
    path.write_bytes(policy.adapter_bytes())
    return path


def test_a_run_from_a_trained_adapter_has_that_adapter_as_its_reference(tmp_path: Path) -> None:
    policy = tiny(start_adapter=start_adapter_file(tmp_path))
    start = logits(policy)
    assert not torch.allclose(start, logits(tiny()))
    with policy.reference():
        assert torch.equal(logits(policy), start)  # KL at step 0 is 0
    with_random_b(policy, scale=1.0)
    trained = logits(policy)
    with contextlib.suppress(RuntimeError), policy.reference():
        assert torch.equal(logits(policy), start)
        raise RuntimeError("the learner failed")
    assert torch.equal(logits(policy), trained)


@pytest.mark.parametrize("has_start_adapter", [False, True])
def test_a_look_at_the_reference_does_not_disturb_gradients(
    tmp_path: Path, has_start_adapter: bool
) -> None:
    start_adapter = start_adapter_file(tmp_path) if has_start_adapter else None
    gradients = []
    for does_look in (False, True):
        policy = tiny(start_adapter=start_adapter)
        with_random_b(policy)
        loss = policy.model(torch.tensor([[1, 2, 3]])).logits.square().mean()
        if does_look:
            with policy.reference():
                logits(policy)
        loss.backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(g.any() for g in gradients[0])


def test_a_lone_surrogate_is_encoded_as_it_is_stored():
    policy = load_policy_model(ModelSpec("tiny"), seed=1)
    ids = [policy.encode([{"role": "user", "content": text}]) for text in ("a\ud800b", "a\ufffdb")]
    assert ids[0] == ids[1]


def test_an_opening_stands_behind_the_prompt_and_is_no_special_token():
    policy = load_policy_model(ModelSpec("tiny", device="cpu"), 0)
    asked = [{"role": "user", "content": "2 + 2?"}]
    assert policy.encode(asked, "Wrong:") == policy.encode(asked) + list(b"Wrong:")
    assert policy.encode(asked, "") == policy.encode(asked)
