"""Every snippet of docs/migration.md, docs/gradients.md and docs/inside.md, run on two ranks as it stands."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("migration.md", "gradients.md", "inside.md")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sections() -> dict[str, str]:
    """The snippets of every section that has any, one after the other."""
    found = {}
    for part in [part for page in PAGES for part in (DOCS / page).read_text().split("\n## ")[1:]]:
        title, _, body = part.partition("\n")
        snippets = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
        if snippets:
            found[title] = "\n".join(snippets)
    return found


def run_section(title: str, folder: str) -> list[str]:
    """Run a section's snippets; the names they define."""
    namespace = {
        "Block": Block,
        "Model": Model,
        "batch": torch.randn(4, 8),
        "loss_of": lambda output: output.float().square().mean(),
        "folder": folder,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(sections()[title], title, "exec"), namespace)
    return sorted(namespace)


@pytest.mark.parametrize("title", list(sections()))
def test_snippets_run(run_ranks, tmp_path, title):
    for names in run_ranks(run_section, title, str(tmp_path)):
        assert {"model", "optimizer"} <= set(names)


def test_all_sections_are_found():
    expected = {
        "FSDP1, kept",
        "From FSDP1 to fully_shard",
        "From FSDP2",
        "From DeepSpeed",
        "From DDP",
        "Tokens",
        "Gradients that are not finite",
        "Which unit owns it",
        "Keep units gathered",
        "Free what is gathered",
        "Park a model in host memory",
        "After an exception",
        "Masters in fp32 for a model loaded in bf16",
        "Mixed dtypes, numbers that are not floating, and metaclasses",
        "Quantised weights, shard by shard",
    }
    assert expected <= set(sections())
