"""How a mesh is read: what `describe` says of it, and dim names that say that it would be misread."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecisionPolicy, ShardingStrategy, describe, fully_shard
from fullshard.mesh.dim_names import meaning


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def first_lines(model: nn.Module) -> list[str]:
    """What comes before the table."""
    lines = describe(model).splitlines()
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("unit "))]


CASES = [
    ((4,), {}, "4 ranks: sharded 4 ways; gradients: mean over 4"),
    ((4, 2), {}, "8 ranks: sharded 2 ways x 4 replicas; gradients: mean over 8"),
    ((4, 2), {"reduction": "sum"}, "8 ranks: sharded 2 ways x 4 replicas; gradients: sum over 8"),
    (
        (4, 2),
        {"reduction": "tokens"},
        "8 ranks: sharded 2 ways x 4 replicas; gradients: sum over 8, divided by the count of tokens of 8",
    ),
    ((1,), {}, "1 rank: not sharded; gradients: mean over 1"),
    ((8, 1), {}, "8 ranks: not sharded, 8 replicas; gradients: mean over 8"),
]


@pytest.mark.parametrize(("shape", "settings", "line"), CASES)
def test_describe_says_how_the_mesh_was_read(fake_world, shape, settings, line) -> None:
    fake_world(torch.Size(shape).numel())
    mesh = init_device_mesh("cpu", shape)
    model = blocks()
    for block in [*model, model]:
        fully_shard(block, mesh=mesh, **settings)
    assert first_lines(model) == [line]
    if shape[-1] > 1:
        strategy = ShardingStrategy.HYBRID_SHARD if len(shape) == 2 else ShardingStrategy.FULL_SHARD
        wrapped = FSDP(blocks(), device_mesh=mesh, sharding_strategy=strategy, **settings)
        assert first_lines(wrapped) == [line]


def test_sizes_are_told_in_the_unit_that_fits_them(fake_world) -> None:
    fake_world(4)
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(4, 4, bias=False))
    for block in [*model, model]:
        fully_shard(block)
    table = [line.split() for line in describe(model).splitlines()[2:]]
    assert [" ".join(line[5:9]) for line in table[:-1]] == ["4.0 MiB 1.0 MiB", "1.0 KiB 256 B", "64 B 16 B"]
    assert " ".join(table[-1]) == "in all 3 1,048,848 4.0 MiB 1.0 MiB 0.0%"


def test_dtypes_are_told_and_what_is_frozen(fake_world) -> None:
    fake_world(4)
    model = blocks()
    model[1].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in [*model, model]:
        fully_shard(block, mp_policy=policy if block is model[0] else MixedPrecisionPolicy())
    table = describe(model).splitlines()[2:]
    start, stop = describe(model).splitlines()[1].index("dtype"), describe(model).splitlines()[1].index("tensors")
    told = [line[start:stop].strip() for line in table]
    assert told == ["float32 as bfloat16", "float32, frozen", "float32", ""]


def test_describe_names_the_units_that_differ(fake_world) -> None:
    fake_world(4)
    model = blocks()
    for block in [*model, model]:
        fully_shard(block)
    model[1].set_gradient_divide_factor(3.0)
    assert first_lines(model) == [
        "4 ranks: sharded 4 ways; gradients: mean over 4 (0, 2)",
        "4 ranks: sharded 4 ways; gradients: sum over 4, divided by 3 (1)",
    ]
    alone = FSDP(blocks(), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert first_lines(alone) == ["4 ranks: not sharded, 4 replicas; gradients: mean over 4"]
    alone.register_comm_hook(None, lambda state, grad: None)
    assert first_lines(alone) == ["4 ranks: not sharded, 4 replicas; gradients: by a communication hook, over 4"]


MISREAD = [
    ("shard", "shard2"), ("fsdp", "fsdp2"), ("dp_shard", "dp_shard2"), ("dp_shard", "cp"), ("fsdp", "shard"),
    ("FSDP", "context"), ("shard", "replicate"), ("fsdp", "ddp"), ("dp_shard", "dp_replicate"), ("dp", "replicas"),
]  # fmt: skip
READ = [
    ("replicate", "shard"), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard_cp"), ("ddp", "fsdp"),
    ("fsdp", "tp"), ("dp", "tp"), ("ep", "edp"), ("a", "b"), ("nodes", "gpus"), ("cp", "fsdp"),
    ("replicate_shard", "replicate_shard_2"), ("sharding_of_replicas", "x"), ("zero", "zero2"), ("inter", "intra"),
]  # fmt: skip


@pytest.mark.parametrize("names", MISREAD)
def test_names_that_say_otherwise_are_refused(fake_world, names) -> None:
    fake_world(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=names)
    model = blocks()
    remedy = "replicate dim first" if meaning(names[1]) == "replicate" else r"dp_mesh_dims=DataParallelMeshDims\(shard="
    with pytest.raises(fullshard.ConfigError, match=remedy) as caught:
        fully_shard(model, mesh=mesh)
    assert names[0] in str(caught.value) and names[1] in str(caught.value) and "(4, 2)" in str(caught.value)
    with pytest.raises(fullshard.ConfigError, match=remedy):
        FSDP(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(fullshard.ConfigError, match=remedy):
        fully_shard(model, shard_placement_fn=lambda p: fullshard.ShardPlacementResult(mesh=mesh))
    assert type(model) is nn.Sequential and all(type(block) is nn.Linear for block in model)
    fully_shard(model[0], mesh=mesh[names[0]])  # the remedies work
    if meaning(names[1]) != "replicate":
        dims = fullshard.DataParallelMeshDims(shard=names)
        assert first_lines(fully_shard(model, mesh=mesh, dp_mesh_dims=dims))[0].startswith("8 ranks: sharded 8 ways;")


@pytest.mark.parametrize("names", READ)
def test_names_without_a_clear_meaning_are_not(fake_world, names) -> None:
    fake_world(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=names)
    assert first_lines(fully_shard(blocks(), mesh=mesh)) == [CASES[1][2]]


def last_lines(model: nn.Module) -> list[str]:
    """What comes after the table, of units in three places at most."""
    return [line for line in describe(model).splitlines() if "elements)" in line]


def test_describe_tells_what_no_unit_holds(fake_world) -> None:
    fake_world(2)
    model = blocks()
    fully_shard(model[0])
    model[1].bias.requires_grad_(False)
    assert last_lines(model) == ["in no unit, so each rank trains its own: 1.weight, 2.weight, 2.bias (136 elements)"]
    fully_shard(model, ignored_params={model[1].weight, model[1].bias})
    assert last_lines(model) == ["ignored: 1.weight, 1.bias (72 elements)"]
    for originals in (False, True):
        wrapped = FSDP(blocks(), ignored_states=[], use_orig_params=originals)
        assert last_lines(wrapped) == []
