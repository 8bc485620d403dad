"""`_apply_optimizer_in_backward`: optimizers that are attached to parameters and stepped by who reduces gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fullshard
from ways import (
    LAYOUTS,
    backward,
    differences,
    error_of,
    named_error,
    on_ranks,
    one_process,
    shard,
    two_layers,
    whole_state,
    wide_batch,
    wrap,
)


def attach(model: nn.Module, hook: bool) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1}, register_hook=hook)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def stepped(model: nn.Module, where: str) -> list[str]:
    """Two backwards train the model as steps after them would, and leave no gradient."""
    for step in range(2):
        backward(model, step)
    problems = differences(where, whole_state(model), whole_state(one_process(2, optimizer=sgd)[0]))
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    return problems + ([f"{where}: {left} keep gradients"] if left else [])


@pytest.mark.parametrize(
    ("way", "when", "hook"),
    [("originals", "before", True), ("originals", "after", False), ("rows", "after", True), ("flat", "after", False)],
)
@on_ranks
def test_parameters_step_in_backward(way: str, when: str, hook: bool) -> list[str]:
    """As those of PyTorch's wrapper do (its `fully_shard` ignores them): attached before or after, hook or not."""
    problems = []
    for library in (torch_fsdp, fullshard) if way == "originals" else (fullshard,):
        model = two_layers()
        if when == "before":
            attach(model, hook)
        model = shard(model, way, library=library)
        if when == "after":
            attach(model, hook)
        problems += stepped(model, library.__name__)
    return problems


@on_ranks
def test_flat_parameters_refuse_it() -> list[str]:
    """PyTorch's raises a RuntimeError at the first forward; so do we, and the model stays as it was."""
    problems = []
    for library in (torch_fsdp, fullshard):
        model = shard(two_layers(), "wrapper", library=library)
        attach(model, True)
        error = error_of(lambda m=model: backward(m, 0))
        if library is fullshard:
            problems += named_error(error, "use_orig_params=True", kinds=RuntimeError, where="ours")
        elif not isinstance(error, RuntimeError):
            problems.append(f"PyTorch's: {error!r}")
    return problems + differences("values", whole_state(model), dict(two_layers().state_dict()))


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_optimizers_of_parameters_that_were_replaced(way: str) -> list[str]:
    """Attached to parameters that sharding replaces: named at the latest by the first backward, or followed."""
    model = two_layers()
    attach(model, True)
    try:
        model = shard(model, way)
        backward(model, 0)
    except fullshard.FullshardError as error:
        return [] if "optimizer" in str(error).lower() else [f"{way}: {error}"]
    return differences(way, whole_state(model), whole_state(one_process(1, optimizer=sgd)[0]))


class Heads(nn.Module):
    """A trunk, and a head for each rank and one that none uses; the heads are in one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(x).tanh())


def sharded_heads(way: str) -> Any:
    model = Heads()
    if way in LAYOUTS:
        fullshard.fully_shard(model.trunk, layout=LAYOUTS[way])
        return fullshard.fully_shard(model, layout=LAYOUTS[way])
    return wrap(model, use_orig_params=True)


@pytest.mark.parametrize("way", ["rows", "originals"])
@on_ranks
def test_parameters_used_on_some_ranks_are_stepped_on_all(way: str) -> list[str]:
    """A parameter that only the other rank used is stepped on this one as well, once; one that none used is not."""
    model, reference = sharded_heads(way), Heads()
    _apply_optimizer_in_backward(torch.optim.Adam, list(model.parameters()), {"lr": 0.1}, register_hook=False)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(3):
        rank = dist.get_rank()
        model(wide_batch(step, rank), rank).square().mean().backward()
        optimizer.zero_grad()
        (sum(reference(wide_batch(step, r), r).square().mean() for r in range(2)) / 2).backward()
        optimizer.step()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    problems = [f"{left} keep gradients"] if left else []
    return problems + differences(way, whole_state(model), dict(reference.state_dict()))


@pytest.mark.parametrize("when", ["before a step", "after a step"])
@on_ranks
def test_optimizer_views_refuse_it(when: str) -> list[str]:
    """An `optimizer_view` covers several parameters, whose gradients need not be complete at once: refused by name."""
    model = shard(two_layers(), "rows")
    if when == "after a step":
        backward(model, 0)
    for view in fullshard.optimizer_view(model):
        view._in_backward_optimizers = [sgd([view])]  # as `_apply_optimizer_in_backward` does
    error = error_of(lambda: backward(model, 1))
    return named_error(error, "optimizer_view", kinds=fullshard.PhaseError, where="views")
