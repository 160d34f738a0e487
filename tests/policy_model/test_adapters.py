"""Adapters: their bytes, what is refused, and the merged weights."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from rrl_core.policy.adapters import AdapterError, LoraSettings, adapter_from_bytes, read_adapter
from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.policy.tiny import tiny_model
from tests.policy_model.models import gpt2_folder
from tests.policy_model.test_policy import logits, tiny, with_random_b

MERGE_TOLERANCE = 1e-5


def test_equal_adapters_give_equal_bytes() -> None:
    policy, again = tiny(), tiny()
    assert policy.adapter_bytes() == again.adapter_bytes() == policy.adapter_bytes()


def test_adapter_bytes_come_back_exactly() -> None:
    policy, other = tiny(1), tiny(2)
    with_random_b(policy)
    other.load_adapter_bytes(policy.adapter_bytes())
    assert other.digest() == policy.digest()
    assert torch.equal(logits(other), logits(policy))
    assert adapter_from_bytes(policy.adapter_bytes())[1] == LoraSettings()


def test_chosen_target_modules_come_back_as_they_were() -> None:
    lora = LoraSettings(rank=4, target_modules=("q_proj", "v_proj"))
    policy = tiny(lora=lora)
    assert {name.split(".")[-3] for name in policy.adapter_state()} == {"q_proj", "v_proj"}
    policy.load_adapter_bytes(policy.adapter_bytes())


def test_state_is_a_copy_sorted_by_name() -> None:
    policy = tiny()
    state = policy.adapter_state()
    assert list(state) == sorted(state)
    before = policy.adapter_digest()
    for tensor in state.values():
        tensor.fill_(1)
    assert policy.adapter_digest() == before


def test_an_adapter_of_other_settings_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"rank=16.*rank=4"):
        tiny().load_adapter_bytes(tiny(lora=LoraSettings(rank=4)).adapter_bytes())


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_damaged_bytes_are_refused(cut: int) -> None:
    with pytest.raises(AdapterError, match="expected an adapter"):
        tiny().load_adapter_bytes(tiny().adapter_bytes()[:cut])


def test_tensors_without_lora_settings_are_refused() -> None:
    with pytest.raises(AdapterError, match="'lora' in its metadata"):
        tiny().load_adapter_bytes(save(tiny().adapter_state()))


def test_an_incomplete_or_misshapen_state_is_refused_and_changes_nothing() -> None:
    policy = tiny()
    before = policy.adapter_digest()
    state = {name: tensor + 1 for name, tensor in policy.adapter_state().items()}
    *_, last = state
    with pytest.raises(AdapterError, match="on one side only"):
        policy.load_adapter_state({n: t for n, t in state.items() if n != last})
    with pytest.raises(AdapterError, match="of shape"):
        policy.load_adapter_state(state | {last: state[last][:1]})
    assert policy.adapter_digest() == before


def test_loading_keeps_the_parameters_an_optimizer_holds() -> None:
    policy = tiny()
    before = [p.data_ptr() for p in policy.model.parameters()]
    with_random_b(policy)
    with policy.reference():
        pass
    assert [p.data_ptr() for p in policy.model.parameters()] == before


def plain_model_with(policy: Policy, weights: dict[str, torch.Tensor], folder: Path) -> object:
    model = AutoModelForCausalLM.from_pretrained(policy.save_base(folder))
    answer = model.load_state_dict(weights, strict=False)
    assert set(answer.missing_keys) <= {"lm_head.weight"}
    assert not answer.unexpected_keys
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_compute_what_the_adapter_computes(tmp_path: Path, family: str) -> None:
    name = "tiny" if family == "llama" else str(gpt2_folder(tmp_path / "gpt2"))
    policy = load_policy_model(ModelSpec(name, device="cpu"), seed=1)
    with_random_b(policy)
    model = plain_model_with(policy, dict(policy.merged_weights()), tmp_path / "base")
    with torch.no_grad():
        merged = model(torch.tensor([[1, 2, 3, 4, 5]])).logits
    assert (merged - logits(policy)).abs().max() <= MERGE_TOLERANCE
    with policy.reference():
        assert (merged - logits(policy)).abs().max() > 100 * MERGE_TOLERANCE


def test_merged_weights_are_base_plus_scaled_product() -> None:
    policy = tiny(lora=LoraSettings(rank=4, alpha=12))  # scale 12 / 4 = 3
    with_random_b(policy)
    state, base = policy.adapter_state(), tiny_model(torch.float32)
    name = "model.layers.1.mlp.up_proj"
    a = state[f"base_model.model.{name}.lora_A.weight"].double()
    b = state[f"base_model.model.{name}.lora_B.weight"].double()
    expected = base.get_submodule(name).weight.double() + 3 * (b @ a)
    merged = dict(policy.merged_weights())[f"{name}.weight"]
    assert (merged.double() - expected).abs().max() <= 1e-6


def test_tied_embeddings_come_once_and_dtype_is_the_one_asked_for() -> None:
    policy = tiny()
    names = [name for name, _ in policy.merged_weights()]
    assert names.count("model.embed_tokens.weight") == len(set(names)) - len(names) + 1 == 1
    assert "lm_head.weight" not in names
    cast = {tensor.dtype for _, tensor in policy.merged_weights(torch.bfloat16)}
    assert cast == {torch.bfloat16}


def test_merging_a_bfloat16_model_rounds_once() -> None:
    policy = tiny(dtype="bfloat16")
    with_random_b(policy)
    exact = dict(policy.merged_weights(torch.float32))
    assert all(torch.equal(exact[n].bfloat16(), t) for n, t in policy.merged_weights())
    assert any(not torch.equal(exact[n], exact[n].bfloat16().float()) for n in exact)


def test_peft_loads_what_we_save_and_we_load_what_peft_saves(tmp_path: Path) -> None:
    policy = tiny(3)
    with_random_b(policy)
    ours = policy.save_adapter(tmp_path / "ours")
    peft_model = PeftModel.from_pretrained(tiny_model(torch.float32), ours)
    with torch.no_grad():
        assert torch.equal(peft_model(torch.tensor([[1, 2, 3, 4, 5]])).logits, logits(policy))
    peft_model.save_pretrained(tmp_path / "theirs")
    loaded = tiny(start_adapter=tmp_path / "theirs")
    assert torch.equal(logits(loaded), logits(policy))
    assert all(p.requires_grad for n, p in loaded.model.named_parameters() if ".lora_" in n)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_rslora", True), ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 2})],
)
def test_adapters_that_are_more_than_plain_lora_are_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **{field: value})
    get_peft_model(tiny_model(torch.float32), config).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=field):
        read_adapter(tmp_path)


def test_a_missing_start_adapter_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="expected an adapter at"):
        tiny(start_adapter=tmp_path / "nothing")


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_layers_that_share_the_embedding_are_no_targets(target: str) -> None:
    with pytest.raises(AdapterError, match="linear layers of their own"):
        tiny(lora=LoraSettings(target_modules=(target,)))
