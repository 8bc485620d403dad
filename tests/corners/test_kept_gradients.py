"""What a user keeps of a gradient stays as it is: after `zero_grad`, the next backward, and when units are freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from training import assert_same
from ways import LAYOUTS, batch, but_last, every_way, layers, loss_of, mine, shard, whole_gradients, whole_parameters

# Each takes something that shares a gradient's memory, and gives a function that reads it.


def keep_object(grad: Any) -> Any:
    return grad


def keep_local(grad: Any) -> Any:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def keep_inner(grad: Any) -> Any:
    return getattr(grad, "_local_tensor", grad)


def keep_detached(grad: Any) -> Any:
    return grad.detach()


def keep_data(grad: Any) -> Any:
    return grad.data


def keep_local_view(grad: Any) -> Any:
    return keep_local(grad).view(-1)


def keep_local_slice(grad: Any) -> Any:
    return keep_local(grad)[:1]


def keep_numpy(grad: Any) -> Any:
    return torch.from_numpy(keep_local(grad).detach().numpy())


def keep_dlpack(grad: Any) -> Any:
    return torch.from_dlpack(keep_local(grad).detach())


def keep_storage(grad: Any) -> Any:
    held = keep_local(grad)
    storage, shape, stride, offset = held.untyped_storage(), held.shape, held.stride(), held.storage_offset()
    return lambda: torch.empty(0, dtype=torch.float64).set_(storage, offset, shape, stride)


KEEPS: dict[str, Callable[[Any], Any]] = {
    name.removeprefix("keep_"): keep for name, keep in list(globals().items()) if name.startswith("keep_")
}


def values(kept: Any) -> Tensor:
    """A copy of what is kept, as the plain tensor of this rank's part."""
    if callable(kept) and not isinstance(kept, Tensor):
        kept = kept()
    return keep_local(kept).detach().clone()


def next_step(model: nn.Module, seed: int) -> None:
    """`zero_grad` and the next gradients, which are others."""
    model.zero_grad()
    loss_of(model, 3 * mine(seed)).backward()


@every_way
@pytest.mark.parametrize("graph", [False, True], ids=["no_grad", "grad"])
def test_what_is_kept_of_a_gradient_stays(run_ranks, graph, way):
    assert_same(run_ranks(kept_in_all_forms, graph, way))


def kept_in_all_forms(graph: bool, way: str) -> list[str]:
    problems: list[str] = []
    model = shard(layers(), way, but_last)
    loss_of(model, mine(0)).backward()
    for seed, (name, keep) in enumerate(KEEPS.items(), start=1):
        next_step(model, 2 * seed)
        with torch.set_grad_enabled(graph):
            kept = [keep(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        before = [values(each) for each in kept]
        if not before:
            problems.append(f"{name}: there are no gradients")
        next_step(model, 2 * seed + 1)
        if not all(torch.equal(values(each), value) for each, value in zip(kept, before, strict=True)):
            problems.append(f"{name}: changed by the next backward")
        after = {n: g for n, g in whole_gradients(model).items() if g is not None}
        reference = layers()
        loss_of(reference, 3 * batch(2 * seed + 1)).backward()
        for parameter, want in reference.named_parameters():
            if not torch.allclose(after[parameter], want.grad, rtol=1e-10, atol=1e-14):
                problems.append(f"{name}: the next gradient of {parameter} is wrong")
                break
    return problems


def is_gone(kept: Any) -> bool:
    """Whether the memory of something kept was given back, so that reading it would end the process."""
    if not isinstance(kept, Tensor):
        return False
    held = keep_local(kept)
    return held.numel() > 0 and held.untyped_storage().nbytes() == 0


@every_way
def test_what_is_kept_can_be_read_while_gradients_are_freed(run_ranks, way):
    """After `zero_grad` and a forward, when the memory of gradients is given back. Reads what today is unmapped."""
    assert_same(run_ranks(read_while_freed, way, timeout=20))


def read_while_freed(way: str) -> list[str]:
    problems: list[str] = []
    model = shard(layers(), way, but_last)
    for name, keep in KEEPS.items():
        model.zero_grad()
        loss_of(model, mine(0)).backward()
        with torch.no_grad():
            kept = [keep(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
            before = [values(each) for each in kept]
            model.zero_grad()
            model(mine(1))
            if any(map(is_gone, kept)):
                problems.append(f"{name}: its memory is gone")  # reading it would end the process
                continue
            if not all(torch.equal(values(each), value) for each, value in zip(kept, before, strict=True)):
                problems.append(f"{name}: changed by a forward")
    return problems


@every_way
def test_gradients_collected_over_steps(run_ranks, way):
    """What gradient-conflict methods and curvature estimates do: keep several losses' gradients, then combine them."""
    assert_same(run_ranks(collected, way))


def collected(way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    gathered: dict[int, list[Tensor]] = {index: [] for index, _ in enumerate(model.parameters())}
    with torch.no_grad():  # the bookkeeping, not the passes
        for seed in range(4):
            with torch.enable_grad():
                loss_of(model, mine(seed)).backward()
                loss_of(reference, batch(seed)).backward()
            for index, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    gathered[index].append(keep_local(parameter.grad))
            model.zero_grad()
        for index, parameter in enumerate(model.parameters()):
            if gathered[index]:
                keep_local(parameter).copy_(torch.stack(gathered[index]).sum(0))
    shown = whole_parameters(model)
    return [
        f"{name}: the sum of four kept gradients is wrong"
        for name, parameter in reference.named_parameters()
        if not torch.allclose(shown[name], parameter.grad, rtol=1e-10, atol=1e-14)
    ]


@pytest.mark.parametrize("way", LAYOUTS)
def test_whole_gradients_of_one_rank_stay(run_ranks, way):
    """On a mesh of one rank `full_tensor()` is the gradient itself."""
    assert_same(run_ranks(kept_whole, way))


def kept_whole(way: str) -> list[str]:
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "shard"))
    problems: list[str] = []
    model = shard(layers(), way, but_last, mesh=meshes["shard"])
    for graph in (False, True):
        next_step(model, 0)
        with torch.set_grad_enabled(graph):
            kept = [parameter.grad.full_tensor() for parameter in model.parameters()]
        before = [each.clone() for each in kept]
        next_step(model, 1)
        if not all(map(torch.equal, kept, before)):
            problems.append(f"whole gradients kept with gradients {'on' if graph else 'off'} changed")
    return problems


@pytest.mark.parametrize("way", ["flat", "blocks", "owner"])
def test_gradients_of_an_optimizers_view_stay(run_ranks, way):
    assert_same(run_ranks(kept_of_views, way))


def kept_of_views(way: str) -> list[str]:
    model = shard(layers(), way, but_last)
    views = list(fullshard.optimizer_view(model))
    problems: list[str] = []
    for name, keep in {"object": keep_object, "detached": keep_detached, "slice": lambda grad: grad[:1]}.items():
        next_step(model, 0)
        kept = [keep(view.grad) for view in views]
        before = [each.clone() for each in kept]
        next_step(model, 1)
        if not kept or not all(map(torch.equal, kept, before)):
            problems.append(f"{name} of a view's gradient changed")
    return problems


@pytest.mark.parametrize("way", LAYOUTS)
def test_what_a_reduction_hook_keeps_stays(run_ranks, way):
    """The slice that `set_all_reduce_hook`'s function is given becomes the gradient."""
    assert_same(run_ranks(kept_by_hook, way, world=4))


def kept_by_hook(way: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(layers(), way, but_last, mesh=mesh)
    kept: list[Tensor] = []
    for unit in model.modules():
        if isinstance(unit, fullshard.FSDPModule):
            unit.set_all_reduce_hook(kept.append)
    next_step(model, 0)
    first, before = list(kept), [each.clone() for each in kept]
    next_step(model, 1)
    return [] if first and all(map(torch.equal, first, before)) else ["what the hook kept changed"]


@pytest.mark.parametrize("way", LAYOUTS)
def test_gradients_kept_by_a_parameters_hook_stay(run_ranks, way):
    """A post-accumulate hook that keeps the gradient and drops it from the parameter."""
    assert_same(run_ranks(kept_by_parameters_hook, way))


def kept_by_parameters_hook(way: str) -> list[str]:
    model = shard(layers(), way, but_last)
    kept: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    copies: dict[str, list[Tensor]] = {name: [] for name in kept}

    def hook_of(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            with torch.no_grad():
                kept[name].append(keep_local(parameter.grad))
                copies[name].append(kept[name][-1].clone())
            parameter.grad = None

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(name))
    for seed in range(3):
        loss_of(model, mine(seed)).backward()
    return [
        f"{name}: what step {step} kept changed"
        for name, held in kept.items()
        for step, (each, copy) in enumerate(zip(held, copies[name], strict=True))
        if not torch.equal(each, copy)
    ] + [name for name, held in kept.items() if len(held) != 3]


@every_way
def test_memory_of_gradients_is_used_again_where_nobody_keeps_them(run_ranks, way):
    """The other side: what is kept for nobody must not pile up, step by step.

    A collective's thread may let go of a step's last message a moment late, so sizes differ by bytes; what piles up
    adds a step's gradients ten times.
    """
    for grown, gradients in run_ranks(memory_grown, way):
        assert grown < gradients, (grown, gradients)


def memory_grown(way: str) -> tuple[int, int]:
    """Bytes of all tensors after twelve steps over those after two, and bytes of this rank's gradients."""
    model = shard(layers(), way, but_last)
    sizes = []
    for seed in range(12):
        next_step(model, seed)
        with torch.no_grad():
            norms = [keep_local(p.grad).norm() for p in model.parameters() if p.grad is not None]
        del norms
        sizes.append(bytes_of_tensors())
    locals_ = [keep_local(p.grad) for p in model.parameters() if p.grad is not None]
    return sizes[-1] - sizes[1], sum(each.numel() * each.element_size() for each in locals_)


def bytes_of_tensors() -> int:
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
