"""The model "tiny": random weights and a byte tokenizer, made in memory, for tests and smoke runs.

Two Llama layers of width 64 with tied embeddings and shared key-value heads, so that what goes
wrong with larger models of that family goes wrong here too. The weights never change.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SEED = 20240229
_STD = 0.15  # larger than usual: the next-token distribution must be far from uniform
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0-255 are bytes, followed by pad, bos and eos."""
    # Byte-level tokenizers write a byte as the letter of that number, or, if it is not printable,
    # as one of the letters from number 256 on.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = iter(letters[len(printable) :])
    vocabulary = {printable.get(byte) or next(others): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def tiny_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the model, with the same weights at every call; the random state is left as it was."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _STD)
    return model.to(dtype)
