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
from raising import raises, sharded, two_layers

ONE = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(4)


# Tensor subclasses with a gather of their own (`GatheredInt8`: tests/quantised.py).


def int8(cls: type[GatheredInt8] = GatheredInt8) -> nn.Linear:
    """A layer whose weight is gathered as int8."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(cls(layer.weight.detach()))
    return layer


def test_splitting_the_columns_of_a_subclass():
    with raises("C099"):
        fully_shard(int8(), shard_placement_fn=lambda _: Shard(1))


class Silent(GatheredInt8):
    """Does not say how it is gathered."""

    fsdp_pre_all_gather = property()


def test_a_subclass_that_does_not_say_how_it_is_gathered():
    model = fully_shard(int8(Silent))
    with raises("C101"):
        model(ONE)


class Short(GatheredInt8):
    """Makes a row less than there is."""

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        made = torch.ones(3, 4)
        return made, (made,)


def test_a_gather_that_makes_another_shape():
    model = fully_shard(int8(Short))
    with raises("C102"):
        model(ONE)


def test_a_subclass_is_freed_whole():
    model = fully_shard(int8())
    model.unshard()
    unit = unit_of(model)
    with raises("C103"):
        unit.buckets[0].full.cut(unit.buckets[0].axes.shard)


def test_the_wrapper_cannot_cut_a_subclass():
    with raises("C175"):
        FullyShardedDataParallel(int8())


class Sealed(GatheredInt8):
    """Does not say what it is made of."""

    __tensor_flatten__ = property()


def test_saving_a_subclass_that_does_not_say_what_it_is_made_of(tmp_path):
    model = fully_shard(int8(Sealed))
    with raises("K133"):
        fullshard.save(tmp_path, model)


# Tensor parallelism: parameters that are DTensors before they are sharded.


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def split(over: DeviceMesh, placement: object) -> nn.Linear:
    """A layer whose weight is a DTensor over these ranks."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), over, [placement], run_check=False))
    return layer


def test_sending_a_part_to_ranks_that_hold_others():
    with raises("C002"):
        fully_shard(split(mesh()["dp"], Shard(0)), mesh=mesh()["dp"], sync_module_states=True)


def test_a_parameter_that_is_split_over_data_parallel_ranks():
    over = mesh()
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), over, [Shard(0), Replicate()], src_data_rank=None))
    with raises("C097"):
        fully_shard(layer, mesh=over, dp_mesh_dims=DataParallelMeshDims("dp"))


def test_a_parameter_that_is_a_sum_over_ranks():
    with raises("C098"):
        fully_shard(split(mesh()["tp"], Partial()), mesh=mesh()["dp"])


def test_a_flat_layout_of_what_is_tensor_parallel():
    over = mesh()
    with raises("C177"):
        fully_shard(split(over["tp"], Shard(0)), mesh=over["dp"], layout="flat")


def test_two_meshes_that_are_not_of_one():
    with raises("C202"):
        fully_shard(split(mesh()["tp"], Shard(0)), mesh=init_device_mesh("cpu", (4,)))


def test_a_gradient_that_is_a_sum_over_ranks():
    parameter = split(mesh()["tp"], Replicate()).weight
    parameter.grad = DTensor.from_local(torch.ones(4, 4), parameter.device_mesh, [Partial()], run_check=False)
    with raises("C156"):
        fullshard.clip_grad_norm_([parameter], 1.0)


def test_saving_a_sum_over_ranks(tmp_path):
    layer = nn.Linear(4, 4)
    layer.register_buffer("total", DTensor.from_local(torch.ones(4), mesh()["tp"], [Partial()], run_check=False))
    with raises("K132"):
        fullshard.save(tmp_path, layer)


def test_a_sharded_state_dict_over_two_meshes():
    model = FullyShardedDataParallel(split(mesh()["tp"], Replicate()), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT), raises("K017"):
        model.state_dict()


def test_several_rectangles_for_a_writer_of_one(tmp_path):
    model = fully_shard(nn.Linear(3, 7), layout="flat")
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
    with pytest.raises(CheckpointException, match="code:      K037"):
        dcp.save(dict(model.state_dict()), storage_writer=writer, no_dist=True)


# Devices.


def test_a_parameter_on_another_accelerator():
    layer = nn.Linear(4, 4)
    with FakeTensorMode():
        layer.weight = nn.Parameter(torch.empty(4, 4, device="cuda:1"))
    with raises("C176"):
        fully_shard(layer)


# Ties.


def test_a_tensor_parallel_weight_that_is_tied_between_units():
    over = mesh()
    model = nn.Sequential(split(over["tp"], Shard(0)), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=over["dp"])
    with raises("L011"):
        fully_shard(model, mesh=over["dp"])


def test_a_weight_that_is_used_outside_of_its_unit():
    model = sharded()
    model[1].weight = model[0].weight
    with raises("L013"):
        model(ONE)


def test_a_weight_that_is_tied_after_sharding():
    model = fully_shard(two_layers())
    model[1].weight = model[0].weight
    with raises("C095"):
        model(ONE)


def test_a_cast_of_a_part_of_a_unit():
    model = fully_shard(two_layers())
    model[0].half()
    with raises("C168"):
        model(ONE)


# Quantised weights, frozen, which are split by rows of what they are made of.


def frozen() -> nn.Linear:
    """A layer of a weight whose class does not say how it is gathered."""
    return int8(Silent).requires_grad_(False)


def test_a_quantised_weight_that_has_no_rows():
    model = frozen()
    model.weight.values = torch.zeros(9999)
    with raises("C223"):
        by_rows(model)


def test_computing_with_a_quantised_weight_before_it_is_sharded():
    model = frozen()
    by_rows(model)
    with raises("C246"):
        model(ONE)
