"""Training an Example wrapped by FullyShardedDataParallel, ours or PyTorch's, into the Records of training.py."""

from __future__ import annotations

import types
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from models import EXAMPLES, Example
from training import FP32, OPTIMIZER, Options, Record, compare, mean_over_ranks, reference, take_step


@dataclass(frozen=True)
class Wrapping:
    """How a model is wrapped and stepped. Hashable, as Options is."""

    orig: bool = False  # use_orig_params
    strategy: str = "FULL_SHARD"
    groups: str = "default"  # hybrid: "tuple" of groups, "mesh", or "default" (node-local)
    prefetch: str | None = "BACKWARD_PRE"
    limit: bool = True
    forward_prefetch: bool = False
    clip: bool = False
    norm_type: float = 2.0
    max_norm: float = 0.5
    step: Options = field(default_factory=Options)  # scenario, micro-batches, steps, dtype


def hybrid_groups() -> tuple[Any, Any]:
    """(shard, replicate) of this rank: 2 x 2 over 4 ranks."""
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return shards[rank // 2], replicas[rank % 2]


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def arguments(library: types.ModuleType, wrapping: Wrapping) -> dict[str, Any]:
    """The constructor's arguments for every instance."""
    given: dict[str, Any] = {
        "use_orig_params": wrapping.orig,
        "sharding_strategy": library.ShardingStrategy[wrapping.strategy],
        "backward_prefetch": library.BackwardPrefetch[wrapping.prefetch] if wrapping.prefetch else None,
        "limit_all_gathers": wrapping.limit,
        "forward_prefetch": wrapping.forward_prefetch,
    }
    if wrapping.groups == "tuple":
        given["process_group"] = hybrid_groups()
    elif wrapping.groups == "mesh":
        given["device_mesh"] = hybrid_mesh()
    if library is torch_fsdp:
        given["device_id"] = torch.device("cpu")  # PyTorch's looks for an accelerator otherwise
    return given


def wrap_example(library: types.ModuleType, model: nn.Module, example: Example, wrapping: Wrapping) -> nn.Module:
    """`model` with every unit of the example an instance, and itself one."""
    given = arguments(library, wrapping)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for unit in example.units(model):
            assert isinstance(unit, nn.Module)
            wrapped = library.FullyShardedDataParallel(unit, **given)
            for parent in model.modules():
                for name, child in parent.named_children():
                    if child is unit and parent is not wrapped:
                        parent._modules[name] = wrapped
        return library.FullyShardedDataParallel(model, **given)


def train_wrapped(library: types.ModuleType, example: Example, wrapping: Wrapping) -> Record:
    """Each rank on its own batches. Gradients only of Fullshard: PyTorch's summon fails on them on a CPU."""
    options = wrapping.step
    model = wrap_example(library, example.make(options.dtype), example, wrapping)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    record = Record()
    for step in range(options.steps):
        loss = take_step(model, example, step, [dist.get_rank()], options)
        if wrapping.clip:
            record.norms.append(model.clip_grad_norm_(wrapping.max_norm, wrapping.norm_type).item())
        record.losses.append(mean_over_ranks(loss))
        if step in (0, options.steps - 1) and library is fullshard:
            record.gradients[step] = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    state, plain = model.state_dict(), example.make(options.dtype)
    record.parameters = {name: state[name] for name, _ in plain.named_parameters()}
    record.buffers = {name: state[name] for name, _ in plain.named_buffers()}
    return record


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    with fullshard.FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        # A parameter without elements has no gradient on any rank; a plain one has an empty gradient.
        return {
            name: (None if p.numel() else torch.zeros_like(p)) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }


def wrapped_parity(
    name: str, wrapping: Wrapping, tolerance: float = FP32, check_torch: bool = True, check_buffers: bool = True
) -> list[str]:
    """Trains the named example on this rank and compares with one process and with PyTorch's wrapper."""
    example = EXAMPLES[name]
    got = train_wrapped(fullshard, example, wrapping)
    plain = Options(
        micro_batches=wrapping.step.micro_batches,
        steps=wrapping.step.steps,
        dtype=wrapping.step.dtype,
        scenario=wrapping.step.scenario,
        clip="torch" if wrapping.clip else "none",
        norm_type=wrapping.norm_type,
        max_norm=wrapping.max_norm,
    )
    want = reference(name, plain, dist.get_world_size())
    assert got.gradients, "no step's gradients were recorded"
    buffers = check_buffers and not example.per_rank
    problems = compare(got, want, tolerance, "one process", buffers=buffers)
    if check_torch:
        theirs = train_wrapped(torch_fsdp, example, wrapping)
        without_gradients = replace(got, gradients={})  # theirs cannot be seen; ours were compared with one process'
        problems += compare(without_gradients, theirs, tolerance, "PyTorch's wrapper")
    return problems
