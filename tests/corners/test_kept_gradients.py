"""What a user keeps of a gradient, or puts in its place, stays: over `zero_grad`, the next backward, and frees."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from ways import (
    LAYOUTS,
    batch,
    but_last,
    differences,
    every_way,
    gradient_problems,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    some_ways,
    value_problems,
    whole_parameters,
)


def local(grad: Any) -> Any:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def storage_of(grad: Any) -> Callable[[], Tensor]:
    held = local(grad)
    storage, shape, stride, offset = held.untyped_storage(), held.shape, held.stride(), held.storage_offset()
    return lambda: torch.empty(0, dtype=torch.float64).set_(storage, offset, shape, stride)


# Each takes something that shares a gradient's memory, or a function that reads it.
KEEPS: dict[str, Callable[[Any], Any]] = {
    "object": lambda grad: grad,
    "local": local,
    "inner": lambda grad: getattr(grad, "_local_tensor", grad),
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "view": lambda grad: local(grad).view(-1),
    "slice": lambda grad: local(grad)[:1],
    "numpy": lambda grad: torch.from_numpy(local(grad).detach().numpy()),
    "dlpack": lambda grad: torch.from_dlpack(local(grad).detach()),
    "storage": storage_of,
}


def value(kept: Any) -> Tensor:
    """A copy of what is kept, as the plain tensor of this rank's part."""
    if not isinstance(kept, Tensor):
        kept = kept()
    return local(kept).detach().clone()


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def next_step(model: nn.Module, seed: int) -> None:
    """`zero_grad` and the next gradients, which are others."""
    model.zero_grad()
    loss_of(model, 3 * mine(seed)).backward()


def is_gone(kept: Any) -> bool:
    """Whether the memory of something kept was given back, so that reading it would end the process."""
    if not isinstance(kept, Tensor):
        return False
    held = local(kept)
    return held.numel() > 0 and held.untyped_storage().nbytes() == 0


@every_way
@on_ranks
def test_what_is_kept_of_a_gradient_stays(way: str) -> list[str]:
    """Whether a forward or the next backward comes after `zero_grad`; the next gradients are right."""
    problems: list[str] = []
    model, reference = shard(layers(), way, but_last), layers()
    loss_of(reference, 3 * batch(1)).backward()
    for name, keep in KEEPS.items():
        for graph in (False, True):
            next_step(model, 0)
            with torch.set_grad_enabled(graph):
                kept = [keep(grad) for grad in gradients(model)]
            before = [value(each) for each in kept]
            model.zero_grad()
            with torch.no_grad():
                model(mine(1))  # in which the memory of gradients is given back
            if not before or any(map(is_gone, kept)):
                problems.append(f"{name}: its memory is gone")  # reading it would end the process
                continue
            next_step(model, 1)
            assert all(map(torch.equal, map(value, kept), before)), f"{name}: changed by the next step"
            problems += gradient_problems(f"{name}: next", model, reference)[:1]
    return problems


@some_ways
@on_ranks
def test_gradients_collected_over_steps(way: str) -> list[str]:
    """What gradient-conflict methods and curvature estimates do: keep several losses' gradients, then combine them."""
    model, reference = shard(layers(), way, but_last), layers()
    kept: dict[Any, list[Tensor]] = {parameter: [] for parameter in model.parameters()}
    for seed in range(4):
        loss_of(model, mine(seed)).backward()
        loss_of(reference, batch(seed)).backward()
        with torch.no_grad():
            for parameter, seen in kept.items():
                seen += [local(parameter.grad)] if parameter.grad is not None else []
        model.zero_grad()
    with torch.no_grad():
        for parameter, seen in kept.items():
            if seen:
                local(parameter).copy_(torch.stack(seen).sum(0))
    want = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return differences("the sum of four kept gradients of", whole_parameters(model), want)


@pytest.mark.parametrize("of", ["whole rows", "whole flat", "views of flat", "views of owner"])
@on_ranks
def test_other_forms_of_gradients_stay(of: str) -> list[str]:
    """Whole ones, on a mesh of one rank, where `full_tensor()` is the gradient itself; and of an optimizer's view."""
    form, _, way = of.replace("of ", "").partition(" ")
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "shard"))
    model = shard(layers(), way, but_last, **({"mesh": meshes["shard"]} if form == "whole" else {}))
    views, problems = fullshard.optimizer_view(model) if form == "views" else [], []
    for name in ("object", "detached", "slice"):
        for graph in (False, True):
            next_step(model, 0)
            with torch.set_grad_enabled(graph):
                grads = [view.grad for view in views] or [grad.full_tensor() for grad in gradients(model)]
                kept = [KEEPS[name](grad) for grad in grads]
            before = [each.clone() for each in kept]
            next_step(model, 1)
            problems += [] if all(map(torch.equal, kept, before)) else [f"{name} changed, graph={graph}"]
    return problems


@pytest.mark.parametrize("way", ["rows", "flat"])
@on_ranks(world=4)
def test_what_a_hook_keeps_stays(way: str) -> list[str]:
    """The slice that `set_all_reduce_hook`'s function is given, and what post-accumulate hooks take away."""
    model = shard(layers(), way, but_last, hybrid=True)
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(grad: Tensor) -> None:
        kept.append(grad)
        copies.append(grad.detach().clone())

    def take(parameter: Tensor) -> None:
        keep(local(parameter.grad).detach())
        parameter.grad = None

    for unit in model.modules():
        if isinstance(unit, fullshard.FSDPModule):
            unit.set_all_reduce_hook(keep)
    for step in range(4):
        if step == 2:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(take)
        next_step(model, step)
    wanted = 4 * 3 + 2 * len(list(model.parameters()))
    problems = [] if len(kept) == wanted else [f"{len(kept)} gradients kept where {wanted} are wanted"]
    return problems + [f"no. {at}" for at, two in enumerate(zip(kept, copies, strict=True)) if not torch.equal(*two)]


@pytest.mark.parametrize("way", ["rows", "originals"])
def test_memory_of_gradients_is_used_again_where_nobody_keeps_them(run_ranks, way):
    """The other side: what is kept for nobody must not pile up, step by step."""
    for grown, size in run_ranks(memory_grown, way):
        assert grown < size, (grown, size)


def memory_grown(way: str) -> tuple[int, int]:
    """Bytes of all tensors after twelve steps over those after two, and bytes of this rank's gradients."""
    model = shard(layers(), way, but_last)
    sizes = []
    for steps in (2, 10):
        for seed in range(steps):
            next_step(model, seed)
            with torch.no_grad():
                [local(grad).norm() for grad in gradients(model)]
        sizes.append(bytes_of_tensors())
    return sizes[1] - sizes[0], sum(local(grad).nbytes for grad in gradients(model))


def bytes_of_tensors() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


# Put in its place: other memory for a gradient.


def set_other(grad: Any) -> None:
    held = getattr(grad, "_local_tensor", grad)
    with torch.no_grad():
        held.set_(held * -3)


ASSIGN = {"data": lambda grad: setattr(grad, "data", grad.detach() * -3), "set_": set_other}


@some_ways
@pytest.mark.parametrize("then", ["added to", "zeroed", "stepped", "parked"])
@on_ranks
def test_assigned_gradients_count(way: str, then: str) -> list[str]:
    """A gradient that the user gave other memory (`p.grad.data = ...`) is the one that counts."""
    problems: list[str] = []
    for name, assign in ASSIGN.items():
        model, plain = shard(layers(), way, but_last), layers()
        stepped = fullshard.optimizer_view(model) if way in LAYOUTS else model.parameters()
        optimizers = [torch.optim.SGD(each, lr=0.1) for each in (stepped, plain.parameters())]
        for step in range(2):
            loss_of(model, mine(step)).backward(), loss_of(plain, batch(step)).backward()
            [assign(grad) for grad in gradients(model)]
            torch._foreach_mul_(gradients(plain), -3)
            if then == "zeroed":
                model.zero_grad(set_to_none=False), plain.zero_grad(set_to_none=False)
            elif then == "parked":
                fullshard.park(model), fullshard.resume(model)
            if then != "stepped":
                loss_of(model, mine(step + 10)).backward(), loss_of(plain, batch(step + 10)).backward()
                problems += gradient_problems(f"{name}, step {step}", model, plain)
            [optimizer.step() for optimizer in optimizers]
            problems += value_problems(f"{name}, step {step}", model, plain)
    return problems
