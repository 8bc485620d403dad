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
from fullshard.runtime.units import unit_of
from quantised import GatheredInt8
from raising import assert_raises, raises, run, sharded, two_layers


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


CALLS = {
    "C099": lambda: fully_shard(int8(), shard_placement_fn=lambda _: Shard(1)),
    "C101": (lambda: fully_shard(int8(Silent)), run),
    "C102": (lambda: fully_shard(int8(Short)), run),
    "C103": (
        lambda: fully_shard(int8()),
        lambda m: m.unshard(),
        lambda m: unit_of(m).buckets[0].full.cut(unit_of(m).buckets[0].axes.shard),
    ),
    "C175": lambda: FullyShardedDataParallel(int8()),
    "C223": (frozen, lambda m: setattr(m.weight, "values", torch.zeros(9999)), by_rows),
    "C246": (frozen, by_rows, run),
    # Tensor parallelism: parameters that are DTensors before they are sharded.
    "C002": lambda: fully_shard(split(mesh()["dp"], Shard(0)), mesh=mesh()["dp"], sync_module_states=True),
    "C097": (
        split_by_data_parallel_ranks,
        lambda m: fully_shard(m, mesh=m.weight.device_mesh, dp_mesh_dims=DataParallelMeshDims("dp")),
        "Replicate() on 'dp'",
    ),
    "C098": lambda: fully_shard(split(mesh()["tp"], Partial()), mesh=mesh()["dp"]),
    "C156": (
        lambda: split(mesh()["tp"], Replicate()).weight,
        lambda parameter: setattr(parameter, "grad", sum_over_ranks(4, 4)),
        lambda parameter: fullshard.clip_grad_norm_([parameter], 1.0),
    ),
    "C177": (mesh, lambda over: fully_shard(split(over["tp"], Shard(0)), mesh=over["dp"], layout="flat")),
    "C202": lambda: fully_shard(split(mesh()["tp"], Shard(0)), mesh=init_device_mesh("cpu", (4,))),
    # Devices, ties and casts.
    "C095": (lambda: fully_shard(two_layers()), tie, run),
    "C168": (lambda: fully_shard(two_layers()), lambda m: m[0].half(), run),
    "C176": (on_another_accelerator, fully_shard),
    "L011": (tied_over_a_mesh, lambda both: fully_shard(both[0], mesh=both[1])),
    "L013": (sharded, tie, run),
}
SAVED = {"K132": with_a_sum, "K133": lambda: fully_shard(int8(Sealed))}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])


@pytest.mark.parametrize("code", SAVED)
def test_saving(tmp_path, code):
    model = SAVED[code]()
    with raises(code):
        fullshard.save(tmp_path, model)


def test_a_sharded_state_dict_over_two_meshes():
    model = FullyShardedDataParallel(split(mesh()["tp"], Replicate()), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT), raises("K017"):
        model.state_dict()


def test_several_rectangles_for_a_writer_of_one(tmp_path):
    model = fully_shard(nn.Linear(3, 7), layout="flat")
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
    with pytest.raises(CheckpointException, match="code:      K037"):
        dcp.save(dict(model.state_dict()), storage_writer=writer, no_dist=True)
