"""Errors of parameters of special kinds: tensor subclasses, tensor parallelism, ties; rank 0 of 4, no data moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fullshard
from fullshard import DataParallelMeshDims, FullyShardedDataParallel, fully_shard
from fullshard.integrations.quantised import by_rows
from quantised import GatheredInt8
from raising import assert_raises, raises, run, sharded, two_layers, words_of


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(4)


# Tensor subclasses with a gather of their own (`GatheredInt8`: tests/quantised.py).


class Silent(GatheredInt8):
    """Does not say how it is gathered."""

    fsdp_pre_all_gather = property()


class Short(GatheredInt8):
    """Makes a row less than there is."""

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        made = torch.ones(3, 4)
        return made, (made,)


class Sealed(GatheredInt8):
    """Does not say what it is made of."""

    __tensor_flatten__ = property()


def int8(cls: type[GatheredInt8] = GatheredInt8) -> nn.Linear:
    """A layer whose weight is gathered as int8."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(cls(layer.weight.detach()))
    return layer


def frozen() -> nn.Linear:
    """A quantised weight whose class does not say how it is gathered: it is split by rows of what it is made of."""
    return int8(Silent).requires_grad_(False)


# Tensor parallelism: parameters that are DTensors before they are sharded.


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def split(over: DeviceMesh, placement: object) -> nn.Linear:
    """A layer whose weight is a DTensor over these ranks."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), over, [placement], run_check=False))
    return layer


def split_by_data_parallel_ranks() -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    whole = torch.ones(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(whole, mesh(), [Shard(0), Replicate()], src_data_rank=None))
    return layer


def sum_over_ranks(*shape: int) -> DTensor:
    return DTensor.from_local(torch.ones(shape), mesh()["tp"], [Partial()], run_check=False)


def with_a_sum() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_buffer("total", sum_over_ranks(4))
    return layer


def tied_over_a_mesh() -> tuple[nn.Module, DeviceMesh]:
    over = mesh()
    model = nn.Sequential(split(over["tp"], Shard(0)), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=over["dp"])
    return model, over["dp"]


def on_another_accelerator() -> nn.Linear:
    layer = nn.Linear(4, 4)
    with FakeTensorMode():
        layer.weight = nn.Parameter(torch.empty(4, 4, device="cuda:1"))
    return layer


def tie(m: nn.Module) -> None:
    m[1].weight = m[0].weight


CALLS = [
    (
        lambda: fully_shard(int8(), shard_placement_fn=lambda _: Shard(1)),
        "ConfigError: A parameter of class GatheredInt8 cannot be split into rows",
    ),
    (
        lambda: fully_shard(int8(Silent)),
        run,
        "ConfigError: A parameter is a tensor subclass with inner ... Silent without fsdp_pre_all_gather",
    ),
    (
        lambda: fully_shard(int8(Short)),
        run,
        "ConfigError: fsdp_post_all_gather returned a tensor with a different shape",
    ),
    (
        lambda: FullyShardedDataParallel(int8()),
        "ConfigError: A parameter is a tensor subclass with inner ... a plain tensor, or",
    ),
    (
        frozen,
        lambda m: setattr(m.weight, "values", torch.zeros(9999)),
        by_rows,
        "ConfigError: A quantised weight of class Silent cannot be split over ranks",
    ),
    (frozen, by_rows, run, "NotSupportedError: A quantised weight that is split can only be moved"),
    # Tensor parallelism: parameters that are DTensors before they are sharded.
    (
        lambda: fully_shard(split(mesh()["dp"], Shard(0)), mesh=mesh()["dp"], sync_module_states=True),
        "ConfigError: sync_module_states=True cannot broadcast a tensor that is",
    ),
    (
        split_by_data_parallel_ranks,
        lambda m: fully_shard(m, mesh=m.weight.device_mesh, dp_mesh_dims=DataParallelMeshDims("dp")),
        "ConfigError: A parameter is already split on a data-parallel dim of ... Replicate() on 'dp'",
    ),
    (
        lambda: fully_shard(split(mesh()["tp"], Partial()), mesh=mesh()["dp"]),
        "ConfigError: A tensor-parallel parameter has a placement that cannot be",
    ),
    (
        lambda: split(mesh()["tp"], Replicate()).weight,
        lambda parameter: setattr(parameter, "grad", sum_over_ranks(4, 4)),
        lambda parameter: fullshard.clip_grad_norm_([parameter], 1.0),
        "ConfigError: cannot take the norm of a gradient with a partial placement",
    ),
    (
        mesh,
        lambda over: fully_shard(split(over["tp"], Shard(0)), mesh=over["dp"], layout="flat"),
        "ConfigError: fully_shard was given a parameter that is already a",
    ),
    (
        lambda: fully_shard(split(mesh()["tp"], Shard(0)), mesh=init_device_mesh("cpu", (4,))),
        "ConfigError: A parameter is already a DTensor (tensor parallelism),",
    ),
    # Devices, ties and casts.
    (
        lambda: fully_shard(two_layers()),
        tie,
        run,
        "ConfigError: A sharded parameter was tied to a different parameter of",
    ),
    (
        lambda: fully_shard(two_layers()),
        lambda m: m[0].half(),
        run,
        "ConfigError: Some parameters of a unit ... one dtype",
    ),
    (
        on_another_accelerator,
        fully_shard,
        "ConfigError: A parameter is on a device that is not its mesh's ... init_device_mesh",
    ),
    (
        tied_over_a_mesh,
        lambda both: fully_shard(both[0], mesh=both[1]),
        "LayoutError: A parameter that is tensor-parallel, or of a tensor ... 0.weight",
    ),
    (sharded, tie, run, "LayoutError: A weight of unit '0' is also used outside the unit, where"),
]
SAVED = [
    (with_a_sum, "CheckpointError: The placements of a tensor do not determine which rank has ... model.total"),
    (lambda: fully_shard(int8(Sealed)), "CheckpointError: A parameter of class Sealed does not implement"),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


@pytest.mark.parametrize("row", SAVED, ids=words_of)
def test_saving(tmp_path, row):
    make, words = row
    model = make()
    with raises(words):
        fullshard.save(tmp_path, model)


def test_a_sharded_state_dict_over_two_meshes():
    model = FullyShardedDataParallel(split(mesh()["tp"], Replicate()), use_orig_params=True)
    with (
        FullyShardedDataParallel.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT),
        raises("CheckpointError: The sharded state of a tensor-parallel parameter requires one"),
    ):
        model.state_dict()


def test_several_rectangles_for_a_writer_of_one(tmp_path):
    model = fully_shard(nn.Linear(3, 7), layout="flat")
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
    with pytest.raises(CheckpointException, match="storage writer stores a single tensor per name"):
        dcp.save(dict(model.state_dict()), storage_writer=writer, no_dist=True)
