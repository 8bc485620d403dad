"""What holds between the rules of the machine, whatever they were: values, bytes, and nothing that grows."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from collections import deque
from typing import Any

import torch
from random_ways import Way
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.agreement.log import Log
from fullshard.watcher import RANK
from ways import whole_gradients, whole_parameters


def differences(got: dict[str, Tensor | None], want: dict[str, Tensor | None], relative: float, least: float) -> list:
    """A line for each name with None on one side only, another dtype, or a difference beyond what is let."""
    if got.keys() != want.keys():
        return [f"names {sorted(got)} where {sorted(want)} are wanted"]
    problems = []
    for name, wanted in want.items():
        found = got[name]
        if wanted is None or found is None:
            problems += [] if wanted is found else [f"{name}: {'no tensor' if found is None else 'a tensor'} is there"]
        elif (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            problems.append(f"{name}: {found.shape} {found.dtype} where {wanted.shape} {wanted.dtype} is wanted")
        else:
            off, norm = float((found.double() - wanted.double()).norm()), float(wanted.double().norm())
            if not off <= relative * norm + least:
                problems.append(f"{name}: off by {off:.3g} of {norm:.3g}, where {relative:.1g} and {least:.1g} are let")
    return problems


def gradient_problems(model: nn.Module, reference: nn.Module, relative: float, least: float) -> list:
    """How the gradients differ from the unsharded model's. Collective."""
    got = whole_gradients(model)
    want = {name: None if p.grad is None else p.grad.clone() for name, p in reference.named_parameters()}
    if isinstance(model, FSDP) and len(list(model.parameters())) < len(want):
        # One FlatParameter has one gradient: what got none beside others that did is zero there.
        got = {name: None if want[name] is None and g is not None and not g.any() else g for name, g in got.items()}
    return differences(got, want, relative, least)


def value_problems(model: nn.Module, reference: nn.Module, relative: float) -> list:
    """How parameters and buffers differ from the unsharded model's. Collective."""
    problems = differences(whole_parameters(model), dict(reference.named_parameters()), relative, relative)
    buffers = {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}
    return problems + differences(buffers, dict(reference.named_buffers()), 0.0, 0.0)


def byte_problems(held: list[int], way: Way, reference: nn.Module) -> list:
    """Shards of all ranks together hold each element once in each copy, and little beside them."""
    copies = way.copies(len(held))
    split = len(held) // copies
    parameters = list(reference.parameters())
    total = sum(p.numel() * p.element_size() for p in parameters)
    if sum(held) < total * copies:
        return [f"{held} bytes on the ranks cannot be {copies} copies of {total}"]
    aligned = sum(
        128 * split for _ in parameters
    )  # each begins and ends on 16 bytes of what is gathered, on every rank
    rows = sum((math.ceil(len(p) / split) * split - len(p)) * p[0].numel() * p.element_size() for p in parameters)
    bounded = way.front not in ("blocks", "owner")
    if bounded and sum(held) > (total + aligned + rows) * copies:
        return [f"{held} bytes on the ranks are more than {copies} copies of {total}, {aligned} and {rows}"]
    return []


def plain_counts(model: Any, way: Way, world: int) -> dict[str, int] | None:
    """The collectives of one step of the plain idiom (docs/architecture.md); None of any other.

    Two gathers of each unit, but one of the root; a reduction of each, and one small all-reduce.
    """
    plan = model.plan
    blocks = plan.blocks
    plain = way.units == "blocks" and way.strategy == "full" and not (way.hybrid or way.offload)
    plain = plain and way.param is way.reduce is None and way.reduction == "mean"
    plain = plain and all(block.recompute == "no" and block.inner is None and not block.tied for block in blocks)
    plain = plain and all(block.kind in ("layers", "norm", "odd", "twice", "in place", "again") for block in blocks)
    plain = plain and not hasattr(model, "adapter") and all(p.requires_grad for p in model.parameters())
    if not plain or world == 1:
        return None
    calls = sum(2 if block.kind == "again" else 1 for block in blocks)
    return {"gathers": 2 * calls + 1, "reductions": len(blocks) + 1, "small": 1}


def held_by_this_process() -> dict[str, int]:
    """How many there are of what must not grow, besides what was there when `gc.freeze` was called."""
    gc.collect()
    objects = gc.get_objects()
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "fullshard"]
    bounded = {id(each._history) for each in objects if type(each) is Log}  # the kinds of the last 256 passes
    bounded |= {id(RANK.log)}  # what was issued last, 2,048 numbers
    theirs = [each for module in modules for each in vars(module).values() if hasattr(each, "__dict__")]
    holders = {id(each): each for each in (*modules, *theirs)}.values()  # once where several modules import it
    tables = [v for each in holders for v in list(vars(each).values()) if isinstance(v, (list, dict, set, deque))]
    return {
        "tensors": sum(1 for each in objects if isinstance(each, Tensor)),
        "entries": sum(len(each) for each in objects if type(each) in (list, set, deque) and id(each) not in bounded),
        "tables": sum([len(v) for v in tables if id(v) not in bounded]),  # of modules, classes, objects from before
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def groups_of_this_rank() -> int:
    return len(distributed_c10d._world.pg_map)


def bytes_held(model: nn.Module) -> int:
    """Of this rank's shards."""
    return fullshard.memory_use(model).parameters


def finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rss() -> int:
    """Resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
