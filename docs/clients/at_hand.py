"""What the programs of the pages beside this file use: small models and data. Put it beside your `train.py`.

`python at_hand.py` writes `runs/client/base`, the folder of a pretrained model that some of them read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

folder = "runs/client"
VOCABULARY = 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 18), nn.Linear(18, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks and a head: of 12 numbers, one of 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


_source = torch.Generator().manual_seed(3)
data: Any = [(torch.randn(12, generator=_source), torch.randint(5, (), generator=_source)) for _ in range(32)]


def language_model() -> Any:
    """A Llama of random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """32 rows of 12 tokens, which are their own labels."""

    tokens = torch.randint(3, VOCABULARY, (32, 12), generator=torch.Generator().manual_seed(11))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


sentences = Sentences()


def tokenizer() -> Any:
    """A word a token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", bos_token="w1")


if __name__ == "__main__":
    language_model().save_pretrained(f"{folder}/base")
