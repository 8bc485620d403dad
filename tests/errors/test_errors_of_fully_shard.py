"""Errors of `fully_shard` and of a unit's methods; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from fullshard.comm import HookComm, TorchComm
from fullshard.mesh.axes import subdivide
from fullshard.wrap import CustomPolicy
from raising import raises, sharded, two_layers, warns


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


def test_sync_module_states_is_a_switch():
    with raises("C003"):
        fully_shard(nn.Linear(4, 4), sync_module_states="yes")


def test_a_precision_policy_of_another_kind():
    with raises("C004"):
        fully_shard(nn.Linear(4, 4), mp_policy=torch.bfloat16)  # meant: MixedPrecisionPolicy(torch.bfloat16)


def test_a_policy_for_a_list_of_modules():
    with raises("C005"):
        fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], auto_wrap_policy={nn.Linear})


def test_arguments_of_a_policy_that_no_unit_has():
    policy = CustomPolicy(lambda module: {"comm": "null"} if isinstance(module, nn.Linear) else False)
    with raises("C006"):
        fully_shard(two_layers(), auto_wrap_policy=policy)


def test_a_precision_policy_of_another_kind_for_a_block():
    policy = CustomPolicy(lambda module: {"mp_policy": torch.half} if isinstance(module, nn.Linear) else False)
    with raises("C007"):
        fully_shard(two_layers(), auto_wrap_policy=policy)


def test_ranks_to_keep_a_block_for():
    policy = CustomPolicy(lambda module: {"reshard_after_forward": 2} if isinstance(module, nn.Linear) else False)
    with raises("C008"):
        fully_shard(two_layers(), auto_wrap_policy=policy)


def test_no_modules():
    with raises("C009"):
        fully_shard([])


def test_parameters_in_place_of_a_module():
    with raises("C010"):
        fully_shard(list(nn.Linear(4, 4).parameters()))


def test_a_list_of_modules_has_no_forward():
    with raises("C011"):
        fully_shard(nn.ModuleList([nn.Linear(4, 4)]))


def test_a_module_that_is_a_unit_already():
    model = fully_shard(nn.Linear(4, 4))
    with raises("C012"):
        fully_shard(model)


def test_ignored_parameters_by_name():
    with raises("C276"):
        fully_shard(nn.Linear(4, 4), ignored_params={"weight"})


def test_a_setting_of_the_root_below_it():
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), unused="zeros"), nn.Linear(4, 4))
    fully_shard(model)
    with warns("W033"):
        model(torch.ones(1, 4))


def test_a_module_whose_parameters_a_unit_around_it_has():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    for inside in (model[1], model[1][0]):
        with raises("C270"):
            fully_shard(inside)
    assert type(model[1]) is nn.Sequential
    fully_shard(model[1][1])  # nothing is gathered for it
    model[1].append(nn.Linear(4, 4))
    assert isinstance(fully_shard(model[1][2]), fullshard.FSDPModule)  # added since
    shared = nn.Linear(4, 4)
    for one in (first := nn.Sequential(shared), second := nn.Sequential(shared)):
        fully_shard(one)  # side by side: a unit around both will have it
    fully_shard(nn.Sequential(first, second))


def test_an_offload_policy_of_another_kind():
    with raises("C013"):
        fully_shard(nn.Linear(4, 4), offload_policy=True)  # meant: CPUOffloadPolicy()


def test_a_layout_that_there_is_not():
    with raises("C014"):
        fully_shard(nn.Linear(4, 4), layout="columns")


def test_prefetching_fewer_than_no_units():
    with raises("C015"):
        fully_shard(nn.Linear(4, 4), prefetch=-1)


def test_data_parallel_dims_without_a_mesh():
    with raises("C016"):
        fully_shard(nn.Linear(4, 4), dp_mesh_dims=DataParallelMeshDims("dp"))


def test_reshard_after_forward_of_another_type():
    with raises("C017"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward="no")


def test_one_rank_to_reshard_to():
    with warns("W001"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=1)


def test_ranks_to_reshard_to_that_do_not_divide_the_axis():
    with raises("C139"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=3)


@pytest.mark.parametrize(("ranks", "given", "told"), [(12, 5, "one of 2, 3, 4, 6"), (7, 3, "True or False")])
def test_the_divisors_are_told(ranks, given, told):
    axes: Any = SimpleNamespace(shard=SimpleNamespace(size=ranks))
    with pytest.raises(fullshard.ConfigError) as caught:
        subdivide(axes, given)
    assert caught.value.code == "C139" and caught.value.expected.startswith(told)


def test_the_setter_takes_a_switch():
    with raises("C018"):
        sharded().set_reshard_after_forward(2)


def test_a_custom_gather_that_allocates_nothing():
    with raises("C019"):
        sharded().set_custom_all_gather(torch.distributed.all_gather_into_tensor)


def test_something_else_than_an_event():
    with raises("C023"):
        sharded().set_post_optim_event(None)


def test_an_event_for_a_unit_below_the_root():
    model = sharded()
    model(torch.ones(1, 4))
    with raises("C024"):
        model[0].set_post_optim_event(torch.Event())


def test_a_factor_of_zero():
    with raises("C025"):
        sharded().set_gradient_divide_factor(0)


def test_no_reductions_in_flight():
    with raises("C026"):
        sharded().set_reduce_scatter_max_input_buffers(0)


@pytest.mark.parametrize("number", [2.5, True])
def test_reductions_in_flight_that_are_no_count(number):
    with raises("C381"):
        sharded().set_reduce_scatter_max_input_buffers(number)


def test_a_module_to_prefetch_that_is_no_unit():
    with raises("C027"):
        sharded().set_modules_to_forward_prefetch([nn.Linear(4, 4)])


def test_units_below_a_root_cannot_share_its_communication():
    model = sharded()
    model(torch.ones(1, 4))
    with raises("C028"):
        fullshard.share_comm_ctx([model[0]])


def test_a_forward_method_that_there_is_not():
    with raises("C029"):
        fullshard.register_fsdp_forward_method(sharded(), "generate")


def test_an_iteration_is_reset_at_the_root():
    model = sharded()
    model(torch.ones(1, 4))
    with raises("P003"):
        model[0].reset_iter_state()


def test_a_reduction_that_there_is_not():
    with raises("C038"):
        fully_shard(nn.Linear(4, 4), reduction="max")


def test_a_factor_beside_sums():
    with raises("C040"):
        sharded(reduction="sum").set_gradient_divide_factor(8)


def test_communication_that_there_is_not():
    with raises("C084"):
        fully_shard(nn.Linear(4, 4), comm="nccl")


def test_a_check_that_there_is_not():
    with raises("C001"):
        fully_shard(nn.Linear(4, 4), check="always")


def test_memory_from_a_group_that_has_none():
    with raises("C086"):
        sharded()[0].set_allocate_memory_from_process_group_for_comm(True)


def test_units_of_one_model_that_reduce_in_different_ways():
    model = two_layers()
    fully_shard(model[0], reduction="sum")
    fully_shard(model)
    with raises("C165"):
        model(torch.ones(1, 4))


def test_a_lazy_module_has_no_shapes_yet():
    with raises("C174"):
        fully_shard(nn.LazyLinear(4))


def test_parameters_on_the_meta_device_and_others():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")))
    model[0].to_empty(device="cpu")
    with raises("C167"):
        model(torch.ones(1, 4))


def test_a_precision_that_is_no_floating_point_dtype():
    with raises("C164"):
        MixedPrecisionPolicy(param_dtype=torch.int8)


def test_a_placement_that_cannot_be_used():
    with raises("C171"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: "dim 0")


def test_a_placement_on_a_dim_that_there_is_not():
    with raises("C173"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: torch.distributed.tensor.Shard(2))


def test_a_dim_that_does_not_divide_evenly():
    with raises("L004"):
        fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda _: torch.distributed.tensor.Shard(1))


def test_blocks_of_no_elements():
    with raises("L005"):
        fully_shard(nn.Linear(4, 4), layout=fullshard.Blocks(0))


def test_a_scalar_has_no_rows():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with raises("L002"):
        fully_shard(model)


def test_a_forward_before_there_are_values():
    model = fully_shard(nn.Linear(4, 4, device="meta"))
    with raises("P050"):
        model(torch.ones(1, 4))


def test_a_unit_by_itself_before_its_root():
    model = sharded()
    model[0](torch.ones(1, 4))
    with raises("P043"):
        model(torch.ones(1, 4))


def test_a_unit_by_itself_after_its_root():
    """What P043 tells to do."""
    model = sharded()
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert model[0](torch.ones(1, 4)).requires_grad
    model(torch.ones(1, 4))


def test_the_parameters_that_were_there_before():
    model = nn.Linear(4, 4)
    weight = model.weight
    fully_shard(model)
    with raises("C092"):
        weight.add(1)


def test_an_optimizer_that_was_built_before():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    with raises("C158"):
        optimizer.step()


def test_offloading_is_a_policy():
    assert fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))


class Own:
    """A collective of one's own: `allocate` gives memory of another shape."""

    def __call__(self, *tensors: torch.Tensor, **_: object) -> None:
        raise AssertionError("not reached: its memory does not fit")

    def allocate(self, size: object, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device=device)


def test_a_custom_gather_that_allocates_something_else():
    model = sharded()
    model.set_custom_all_gather(Own())
    with raises("C085"):
        model(torch.ones(1, 4))


def test_memory_of_the_group_for_a_collective_of_ones_own():
    model = sharded()[0]
    model.set_custom_all_gather(Own())
    with raises("C021"):
        model.set_allocate_memory_from_process_group_for_comm(True)


def test_a_comm_that_scales_gradients_itself():
    comm = HookComm(TorchComm(), None, print)
    with raises("C039"):
        fully_shard(nn.Linear(4, 4), comm=comm, reduction="sum")


def test_the_class_of_a_unit_and_no_more():
    model = fully_shard(nn.Linear(4, 4))
    other = nn.Linear(4, 4)
    other.__class__ = type(model)
    with raises("P002"):
        other(torch.ones(1, 4))


def test_gradients_that_were_kept_are_reduced_by_the_root():
    model = sharded()
    model(torch.ones(1, 4))
    with raises("P004"):
        fully_shard.state(model[0])._root_post_backward_final_callback()


def test_reducing_kept_gradients_inside_a_forward():
    model = sharded()
    model[0].register_forward_hook(lambda *_: fully_shard.state(model)._root_post_backward_final_callback())
    with raises("P042"):
        model(torch.ones(1, 4))


def test_an_argument_of_a_root_with_fewer_ranks():
    model, alone = two_layers(), DeviceMesh("cpu", [0])
    fully_shard(model[0], reduction="tokens")
    fully_shard(model, mesh=alone, reduction="tokens")
    with raises("C166"):
        model(torch.ones(1, 4))
