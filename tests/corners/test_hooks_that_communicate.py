"""Users' hooks that communicate: run at the same place among the engine's own collectives on every rank.

A communicator answers "is it done" differently on each rank, as the network does. Nothing that a user can put a hook
on may depend on the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from models import blocks_of
from ways import WRAPPERS, on_ranks, shard

WIDE = 8
POLLS: dict[str, Callable[[int, int], bool]] = {
    "rank 0 at once": lambda rank, asked: rank == 0,
    "rank 1 at once": lambda rank, asked: rank == 1,
    "alternating": lambda rank, asked: (rank + asked) % 2 == 0,
}


class Polled:
    """A pending collective that is waited for only when it is said to be done, or when the engine waits."""

    def __init__(self, inner: Any, comm: Differing) -> None:
        self.inner, self.comm, self.wait = inner, comm, inner.wait

    def is_completed(self) -> bool:
        self.comm.asked += 1
        if not POLLS[self.comm.polls](dist.get_rank(), self.comm.asked):
            return False
        self.wait()
        return True


class Differing(fullshard.RecordingComm):
    """Writes down what it was asked for, in `log`; its answers to polls differ between ranks."""

    def __init__(self, polls: str) -> None:
        super().__init__(fullshard.TorchComm())
        self.polls, self.asked = polls, 0
        self.log: list[str] = []

    def asks(self, verb: str, tensor: Tensor, *given: Any) -> Any:
        self.log.append(f"{verb} {tensor.numel()}")
        return Polled(getattr(self.inner, verb)(*given), self)

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Any:
        return self.asks("gather", out, axis, out, shard)

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        return self.asks("reduce", buffer, axis, out, buffer, mean)

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        return self.asks("all_reduce", tensor, axis, tensor, mean)


class Network(nn.Module):
    """Five blocks, each of another size. Of the last layer's bias one rank may hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 4 * (i + 1)), nn.Tanh(), nn.Linear(4 * (i + 1), WIDE)) for i in range(5)
        )
        self.head = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded(way: str, comm: Differing, mesh: str = "1d") -> nn.Module:
    given: dict[str, Any] = {"comm": comm}
    if mesh == "hybrid":
        given["mesh"] = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return shard(Network(), way, blocks_of, **given)


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()


def add_hooks(model: nn.Module, kind: str, hook: Callable[[str], object]) -> None:
    """`hook(name)` at each of the places of that kind."""
    if kind == "post-accumulate":
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: hook(name) and None)
    else:
        for name, module in model.named_modules():
            if isinstance(module, fullshard.FSDPModule):
                module.set_all_reduce_hook(lambda reduced, name=name: hook(name) and None)


def places(way: str, kind: str, mesh: str, polls: str) -> list[list[str]]:
    """What the engine asked for and which hooks ran, in order, in each of three steps.

    Hooks all-reduce which one they are: on every rank the same.
    """
    comm = Differing(polls)
    model = sharded(way, comm, mesh)
    numbers = {name: float(number) for number, (name, _) in enumerate(model.named_modules())}
    numbers |= {name: float(number) for number, (name, _) in enumerate(model.named_parameters())}

    def hook(name: str) -> None:
        comm.log.append(f"hook of {name}")
        dist.all_reduce(total := torch.tensor([numbers[name]]))
        assert total.item() == numbers[name] * dist.get_world_size(), f"{name}: another rank ran another hook"

    add_hooks(model, kind, hook)
    logs = []
    for step in range(3):
        comm.log = []
        backward(model, step)
        model.zero_grad()
        logs.append(list(comm.log))
    return logs


CASES = [
    *[(way, "post-accumulate", "1d") for way in ("rows", "flat", "wrapper", "originals")],
    ("rows", "all-reduce", "1d"),
    *[("flat", kind, "hybrid") for kind in ("post-accumulate", "all-reduce")],
]


@pytest.mark.parametrize(("way", "kind", "mesh"), CASES)
def test_hooks_run_at_the_same_place_on_every_rank(run_ranks, way, kind, mesh):
    """And may communicate; also of parameters of which a rank holds nothing."""
    for polls in POLLS:
        first, *others = run_ranks(places, way, kind, mesh, polls)
        hooks = {entry for entry in first[0] if "hook" in entry}
        assert hooks and (kind == "all-reduce" or len(hooks) == {"wrapper": 6}.get(way, 22)), hooks
        assert all(other == first for other in others), polls


@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_clipping_inside_backward(way: str) -> list[str]:
    """The usual way to step in backward; the norm is a collective."""
    results = []

    def step(parameter: Any) -> None:
        if parameter.grad is None:
            return
        total = parameter.grad.norm()
        if way in WRAPPERS:
            dist.all_reduce(total.square_())
            total = total.sqrt()
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        with torch.no_grad():
            parameter.add_(parameter.grad * (0.1 / (total + 1e-3)), alpha=-1.0)
        parameter.grad = None

    for hooked in (True, False):
        model = sharded(way, Differing("alternating"))
        for parameter in model.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(2):
            backward(model, index)
            for parameter in model.parameters() if not hooked else ():
                step(parameter)
        results.append([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    return [n for n, a, b in zip(names, *results, strict=True) if not torch.allclose(a, b, atol=1e-6)]
