"""Ways in which a model comes to be sharded: from meta, in one call, in part, from a state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import state_dict as helpers
from models import EXAMPLES
from training import (
    FP64,
    LAYOUTS,
    Options,
    compare,
    compare_tensors,
    full_gradients,
    full_parameters,
    reference,
    shard,
    take_step,
    train_reference,
    train_sharded,
)
from ways import on_ranks

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def double(layout: str, **settings: object) -> Options:
    return Options(layout=layout, dtype=torch.float64, **settings)


def sharded(name: str, options: Options, device: str = "cpu") -> nn.Module:
    example = EXAMPLES[name]
    with torch.device(device):
        model = example.make(options.dtype)
    return shard(fullshard, model, example, options)


def trains_like_one_process(model: nn.Module, name: str, options: Options) -> list[str]:
    """Trains the model as it stands and an unsharded one that starts from the same whole parameters."""
    example = EXAMPLES[name]
    plain = example.make(options.dtype)
    plain.load_state_dict(full_parameters(model), strict=False)
    got = train_sharded(fullshard, example, options, model)
    want = train_reference(example, options, dist.get_world_size(), plain)
    return compare(got, want, FP64, "one process")


@both_layouts
@on_ranks
def test_meta_then_reset_parameters(layout: str) -> list[str]:
    name = "odd_mlp"
    options = double(layout)
    model = sharded(name, options, "meta")
    problems = [f"{n} is on {p.device}, not meta" for n, p in model.named_parameters() if p.device.type != "meta"]
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters(recurse=False):
            p.fill_(0.25)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    ranks_differ = {name: p.std().item() == 0 for name, p in full_parameters(model).items() if p.ndim > 1}
    own = {name for name, _ in model.named_parameters(recurse=False)}
    problems += [f"{name} was not initialised" for name, same in ranks_differ.items() if same and name not in own]
    return problems + trains_like_one_process(model, name, options)


@pytest.mark.parametrize(("assign", "layout"), [(True, "rows"), (False, "flat")])
@on_ranks
def test_meta_then_state_dict(assign: bool, layout: str) -> list[str]:
    options = double(layout)
    source = sharded("odd_mlp", options)
    model = sharded("odd_mlp", options, "meta")
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=assign)
    got = train_sharded(fullshard, EXAMPLES["odd_mlp"], options, model)
    want = reference("odd_mlp", Options(dtype=options.dtype), dist.get_world_size())
    return compare(got, want, FP64, "one process")


@on_ranks
def test_full_state_dict_through_pytorch() -> list[str]:
    """torch.distributed.checkpoint.state_dict distributes a whole state dict over DTensors."""
    options = double("rows")
    whole = EXAMPLES["odd_mlp"].make(options.dtype).state_dict()
    model = sharded("odd_mlp", options, "meta")
    model.to_empty(device="cpu")
    settings = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=settings)
    got = train_sharded(fullshard, EXAMPLES["odd_mlp"], options, model)
    want = reference("odd_mlp", Options(dtype=options.dtype), dist.get_world_size())
    return compare(got, want, FP64, "one process")


@on_ranks
def test_rank_0s_values_reach_ranks_that_are_not_in_the_first_mesh() -> list[str]:
    """Its first unit is on a mesh of its own, as an expert's may be."""
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("expert", "shard"))["shard"]
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    whole = {name: torch.full((4, 4), 7.0) for name in model.state_dict()}
    fullshard.fully_shard(model[0], mesh=alone)
    fullshard.fully_shard(model[1])
    settings = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    helpers.set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=settings)
    return [name for name, value in model.named_parameters() if not bool((value.full_tensor() == 7.0).all())]


def test_rank_0_reaches_no_rank_of_another_mesh(fake_world: Any) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for dim, layer in zip("ab", model, strict=True):
        fullshard.fully_shard(layer, mesh=mesh[dim])
    settings = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(fullshard.CheckpointError, match=r"cannot send values to all ranks"):
        helpers.set_model_state_dict(model, model.state_dict(), options=settings)


@on_ranks
def test_one_call_shards_the_whole_model() -> list[str]:
    options = double("flat")
    example = EXAMPLES["frozen"]
    model = example.make(options.dtype)
    returned = fullshard.fully_shard(model, auto_wrap_policy="auto", layout=options.layout)
    problems = [] if returned is model else ["fully_shard returned another module"]
    units = {n for n, module in model.named_modules() if isinstance(module, fullshard.FSDPModule)}
    wanted = {"", *(f"blocks.{index}" for index in range(len(model.blocks)))}
    assert units == wanted, f"units {sorted(units)} where {sorted(wanted)} are wanted"
    got = train_sharded(fullshard, example, options, model)
    want = reference("frozen", Options(dtype=options.dtype), dist.get_world_size())
    return problems + compare(got, want, FP64, "one process")


class OtherBlock(nn.Sequential):
    pass


@on_ranks
def test_the_blocks_of_a_sequential_become_units() -> list[str]:
    """A model that is a list of blocks itself, of two classes in turn, with layers around them."""
    blocks = [kind(nn.Linear(4, 8), nn.Linear(8, 4)) for kind in (nn.Sequential, OtherBlock, nn.Sequential)]
    model = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 2)), auto_wrap_policy="auto")
    units = {name for name, module in model.named_modules() if isinstance(module, fullshard.FSDPModule)}
    return [] if units == {"", "1", "2", "3"} else [f"units {sorted(units)}"]


@both_layouts
@on_ranks
def test_ignored_parameters(layout: str) -> list[str]:
    """Ignored parameters stay as they are: plain and whole, with this rank's own gradients, as in PyTorch."""
    options = double(layout)
    example, records, problems = EXAMPLES["gpt"], {}, []
    for library in (fullshard, torch_fsdp):
        model = example.make(options.dtype)
        ignored = {model.head.weight, model.blocks[0].norm1.weight}
        keywords = {"layout": options.layout} if library is fullshard else {}
        for unit in [*example.units(model), model]:
            library.fully_shard(unit, ignored_params=ignored, **keywords)
        if library is fullshard:
            found = dict(model.named_parameters())
            for name in ("head.weight", "blocks.0.norm1.weight"):
                assert any(found[name] is p for p in ignored), f"{name} was replaced, though ignored"
        take_step(model, example, 0, [dist.get_rank()], options)
        records[library] = full_gradients(model)
    return problems + compare_tensors("gradient of", records[fullshard], records[torch_fsdp], FP64)
