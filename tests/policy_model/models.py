"""Models made for tests."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from rrl_core.policy.tiny import tiny_tokenizer


def gpt2_folder(folder: Path, eos_token_id: int | list[int] = 258) -> Path:
    """Write a random GPT-2 (learned positions, Conv1D layers) with tiny's tokenizer."""
    config = GPT2Config(
        vocab_size=259, n_embd=64, n_layer=2, n_head=2, n_positions=256, eos_token_id=eos_token_id
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(8)  # std 0.16: positions and context must matter
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def bert_folder(folder: Path, seed: int = 1) -> Path:
    """Write a random encoder with tiny's tokenizer."""
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
