"""Optimizers on owners: ranks exchange the same matrices, in whatever order each rank lists its parameters."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard

WIDE = 6
KINDS = {
    "muon": lambda params: fullshard.Muon(params, lr=0.05),
    "owners": lambda params: fullshard.OwnerOptimizer(params, torch.optim.Adafactor, lr=0.05),
}


def build() -> nn.Sequential:
    """Matrices of one shape: exchanged for each other, they raise no error of the backend's."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)])


def sharded(layout: str) -> nn.Sequential:
    model = build()
    for block in model:
        fullshard.fully_shard(block, layout=layout)
    return fullshard.fully_shard(model, layout=layout)


def backward(model: nn.Module) -> None:
    """With the same gradients on every rank."""
    model(torch.randn(3, WIDE, generator=torch.Generator().manual_seed(1))).square().mean().backward()


def differing(kind: str, layout: str) -> list[str]:
    """Parameters that differ from those of one process; ranks other than the first list them in reverse."""
    model, plain = sharded(layout), build()
    listed = list(model.parameters())
    ours = KINDS[kind](listed if dist.get_rank() == 0 else listed[::-1])
    one_process: dict[str, Any] = {"muon": torch.optim.Muon, "owners": torch.optim.Adafactor}
    theirs = one_process[kind](plain.parameters(), lr=0.05)
    for _ in range(3):
        backward(model)
        backward(plain)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return [name for (name, p), other in pairs if not torch.allclose(p.full_tensor(), other, rtol=1e-2, atol=1e-3)]


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_each_rank_may_list_parameters_in_an_order_of_its_own(run_ranks, kind, layout):
    assert run_ranks(differing, kind, layout, world=3) == [[]] * 3


def error_of(case: str, kind: str, layout: str) -> str:
    """The error of a step before which the last rank does something else than the others."""
    model, last = sharded(layout), dist.get_rank() == dist.get_world_size() - 1
    listed = list(model.parameters())
    optimizer = KINDS[kind](listed[:-1] if last and case == "fewer parameters" else listed)
    if case == "no gradient later":  # after all have stepped without this one, and with it
        for lacking in (2, 1, None):
            backward(model)
            if lacking is not None:
                model[lacking].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    backward(model)
    if case == "no gradient later":
        model[1 if last else 2].weight.grad = None
    elif last and case == "no gradients":
        optimizer.zero_grad()
    elif last and case == "no gradient":
        model[1].weight.grad = None
    elif case == "whole gradient":
        model[1].weight.grad = torch.zeros(WIDE, WIDE)
    try:
        optimizer.step()
    except fullshard.FullshardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "name"), [("fewer parameters", "3.weight"), ("no gradient", "1.weight"), ("no gradients", "0.weight")]
)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_ranks_that_step_different_parameters_are_told(run_ranks, case, name, kind, layout):
    for words in run_ranks(error_of, case, kind, layout, world=3):
        assert words.startswith("DivergenceError") and "step different parameters" in words, words
        assert name in words and re.search(r"rank: +2\n", words), words


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cpu("an accelerator's host does not wait to compare them")
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_ranks_that_step_different_known_parameters_are_told(run_ranks, kind, layout):
    """Of the same sizes: exchanged for each other, the matrices would be wrong, silently."""
    for words in run_ranks(error_of, "no gradient later", kind, layout, world=3):
        assert words.startswith("DivergenceError") and "step different parameters" in words, words
        assert "1.weight" in words and re.search(r"rank: +2\n", words), words


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_a_gradient_that_is_not_split_as_its_parameter_is_refused(run_ranks, kind, layout):
    for words in run_ranks(error_of, "whole gradient", kind, layout, world=3):
        assert words.startswith("ConfigError") and "1.weight" in words and f"({WIDE}, {WIDE})" in words, words
