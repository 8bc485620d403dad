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
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same

WIDE = 8
FRONT_ENDS = ("rows", "flat", "owner", "flat parameter", "original parameters")
POLLS: dict[str, Callable[[int, int], bool]] = {
    "rank 0 at once": lambda rank, asked: rank == 0,
    "rank 1 at once": lambda rank, asked: rank == 1,
    "alternating": lambda rank, asked: (rank + asked) % 2 == 0,
}


class Polled:
    """A pending collective that is waited for only when it is said to be done, or when the engine waits."""

    def __init__(self, inner: Any, comm: Differing) -> None:
        self.inner, self.comm = inner, comm

    def wait(self) -> object:
        return self.inner.wait()

    def is_completed(self) -> bool:
        self.comm.asked += 1
        if not POLLS[self.comm.polls](dist.get_rank(), self.comm.asked):
            return False
        self.inner.wait()
        return True


class Differing(fullshard.RecordingComm):
    """Writes down what it was asked for, in `log`; its answers to polls differ between ranks."""

    def __init__(self, polls: str) -> None:
        super().__init__(fullshard.TorchComm())
        self.polls, self.asked = polls, 0
        self.log: list[str] = []

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Any:
        self.log.append(f"gather {out.numel()}")
        return Polled(self.inner.gather(axis, out, shard), self)

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        self.log.append(f"reduce {buffer.numel()}")
        return Polled(self.inner.reduce(axis, out, buffer, mean), self)

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        self.log.append(f"all_reduce {tensor.numel()}")
        return Polled(self.inner.all_reduce(axis, tensor, mean), self)


class Network(nn.Module):
    """Five blocks, each of another size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 4 * (i + 1)), nn.Tanh(), nn.Linear(4 * (i + 1), WIDE)) for i in range(5)
        )
        self.head = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded(front: str, comm: Differing, mesh: str = "1d") -> nn.Module:
    model = Network()
    if front in ("flat parameter", "original parameters"):
        given: dict[str, Any] = {"use_orig_params": front == "original parameters", "comm": comm}
        for index in range(5):
            model.blocks[index] = FSDP(model.blocks[index], **given)
        return FSDP(model, **given)
    given = {"comm": comm, "layout": front}
    if mesh == "hybrid":
        given["mesh"] = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fullshard.fully_shard(block, **given)
    return fullshard.fully_shard(model, **given)


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def add_hooks(model: nn.Module, kind: str, hook: Callable[[str], None]) -> None:
    """`hook(name)` at each of the places of that kind."""
    if kind == "post-accumulate":
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: hook(name))
    else:
        for name, module in model.named_modules():
            if isinstance(module, fullshard.FSDPModule):
                module.set_all_reduce_hook(lambda reduced, name=name: hook(name))


def places(front: str, kind: str, mesh: str, polls: str) -> list[list[str]]:
    """What the engine asked for and which hooks ran, in order, in each of three steps. Hooks only write down."""
    comm = Differing(polls)
    model = sharded(front, comm, mesh)
    add_hooks(model, kind, lambda name: comm.log.append(f"hook of {name}"))
    logs = []
    for step in range(3):
        comm.log = []
        model(batch(step)).square().mean().backward()
        model.zero_grad()
        logs.append(list(comm.log))
    return logs


CASES = [
    *[(front, "post-accumulate", "1d") for front in FRONT_ENDS],
    *[(front, "all-reduce", "1d") for front in ("rows", "flat", "owner")],
    *[(front, kind, "hybrid") for front in ("rows", "flat") for kind in ("post-accumulate", "all-reduce")],
]


@pytest.mark.parametrize(("front", "kind", "mesh"), CASES)
def test_hooks_run_at_the_same_place_on_every_rank(run_ranks, front, kind, mesh):
    for polls in POLLS:
        first, *others = run_ranks(places, front, kind, mesh, polls)
        assert any("hook" in entry for entry in first[0])
        for other in others:
            assert other == first, polls


def communicating(front: str, kind: str, mesh: str, polls: str) -> list[str]:
    """Hooks that all-reduce which one they are: on every rank the same. Gradients as without hooks."""
    comm, problems = Differing(polls), []
    model, plain = sharded(front, comm, mesh), sharded(front, Differing(polls), mesh)
    numbers: dict[str, int] = {}
    calls = []

    def compare(name: str) -> None:
        mine = torch.tensor([float(numbers.setdefault(name, len(numbers)))])
        calls.append(name)
        total = mine.clone()
        dist.all_reduce(total)
        if total.item() != mine.item() * dist.get_world_size():
            problems.append(f"{name}: another rank ran the hook of another parameter")

    for name, _ in model.named_parameters():
        numbers[name] = len(numbers)
    add_hooks(model, kind, compare)
    for step in range(3):
        for each in (model, plain):
            each(batch(step)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if (p.grad is None) != (q.grad is None) or (p.grad is not None and not equal(p.grad, q.grad)):
                problems.append(f"gradient of {name}")
        model.zero_grad()
        plain.zero_grad()
    return problems if calls else ["no hook ran"]


def equal(left: Any, right: Any) -> bool:
    """Of this rank's elements."""
    left, right = (t.to_local() if hasattr(t, "to_local") else t for t in (left, right))
    return torch.equal(left, right)


@pytest.mark.parametrize(("front", "kind", "mesh"), CASES)
def test_hooks_may_communicate(run_ranks, front, kind, mesh):
    assert_same(run_ranks(communicating, front, kind, mesh, "rank 0 at once", timeout=8))


def clipped_in_backward(front: str) -> list[str]:
    """Each parameter clipped by its whole norm and stepped in its hook: as the same after the backward."""
    results = []
    for hooked in (True, False):
        model = sharded(front, Differing("alternating"))

        def step(parameter: Any) -> None:
            total = parameter.grad.norm() if hasattr(parameter.grad, "full_tensor") else whole_norm(parameter.grad)
            if hasattr(total, "full_tensor"):
                total = total.full_tensor()
            with torch.no_grad():
                parameter.add_(parameter.grad * (0.1 / (total + 1e-3)), alpha=-1.0)
            parameter.grad = None

        if hooked:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)
        for index in range(2):
            model(batch(index)).square().mean().backward()
            if not hooked:
                for parameter in model.parameters():
                    step(parameter)
        values = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        results.append([value.detach().clone() for value in values])
    names = [name for name, _ in model.named_parameters()]
    return [f"{n}: {a} {b}" for n, a, b in zip(names, *results, strict=True) if not torch.allclose(a, b, atol=1e-6)]


def whole_norm(grad: Tensor) -> Tensor:
    total = grad.square().sum()
    dist.all_reduce(total)
    return total.sqrt()


@pytest.mark.parametrize("front", ["rows", "flat", "flat parameter"])
def test_clipping_inside_backward(run_ranks, front):
    """The usual way to step in backward; the norm is a collective."""
    assert_same(run_ranks(clipped_in_backward, front, timeout=8))


def uneven(front: str) -> list[str]:
    """A parameter of which one rank holds nothing: its hook runs on both ranks or on neither."""
    comm = Differing("alternating")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDE, 1), nn.Linear(1, 1))
    if front in ("flat parameter", "original parameters"):
        model = FSDP(model, use_orig_params=front == "original parameters", comm=comm)
    else:
        fullshard.fully_shard(model, layout=front, comm=comm)
    add_hooks(model, "post-accumulate", comm.log.append)
    model(batch(0)).square().mean().backward()
    return [entry for entry in comm.log if "gather" not in entry and "reduce" not in entry]


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_hooks_of_parameters_of_which_a_rank_holds_nothing(run_ranks, front):
    first, second = run_ranks(uneven, front)
    assert first
    assert first == second
