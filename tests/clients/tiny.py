"""A Llama of random weights, small enough for two ranks on a laptop, and what it is trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 40, 12


def llama(**more: Any) -> Any:
    """The same on every rank: two layers, float32 unless said otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = more.pop("dtype", torch.float32)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **{
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "intermediate_size": 24,
            **more,
        },
    )
    torch.manual_seed(5)
    return LlamaForCausalLM(config).to(dtype)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """`count` rows of tokens [LENGTH], which are their own labels."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(11))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def batch() -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in Sentences(1)[0].items()}


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
