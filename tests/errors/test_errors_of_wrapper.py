"""Errors of `FullyShardedDataParallel`; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.comm_hooks import DefaultState
from fullshard.state_dict import get_model_state_dict
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, transformer_auto_wrap_policy
from raising import nested, raises, two_layers, warns, wrapped

FSDP = FullyShardedDataParallel


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


def test_a_policy_for_a_model_that_is_wrapped():
    with raises("C049"):
        FSDP(nn.Sequential(FSDP(nn.Linear(4, 4))), auto_wrap_policy={nn.Linear})


def test_arguments_of_a_policy_that_no_instance_has():
    policy = CustomPolicy(lambda module: {"layout": "rows"} if isinstance(module, nn.Linear) else False)
    with raises("C050"):
        FSDP(two_layers(), auto_wrap_policy=policy)


def test_one_flat_parameter_of_two_dtypes():
    with raises("C051"):
        FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()), use_orig_params=False)


def test_a_field_that_there_is_not():
    with raises("C052"):
        CPUOffload().pin_memory = True


def test_a_field_of_another_type():
    with raises("C053"):
        MixedPrecision(param_dtype="bfloat16")


def test_a_strategy_by_its_name():
    with raises("C054"):
        wrapped(sharding_strategy="FULL_SHARD")  # meant: ShardingStrategy.FULL_SHARD


def test_something_else_than_a_module():
    with raises("C055"):
        FSDP(torch.nn.functional.relu)


def test_a_group_and_a_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with raises("C056"):
        wrapped(process_group=torch.distributed.group.WORLD, device_mesh=mesh)


def test_a_hybrid_strategy_on_a_mesh_of_one_dim():
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with raises("C057"):
        wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator of this number")
def test_an_accelerator_that_there_is_not():
    with raises("C058"):
        wrapped(device_id=0)


def test_a_device_that_is_none():
    with raises("C059"):
        wrapped(device_id="gpu")


def test_what_is_ignored_is_said_once():
    with raises("C060"):
        wrapped(ignored_modules=[], ignored_states=[])


def test_one_module_to_ignore_without_a_list():
    model = two_layers()
    with raises("C061"):
        FSDP(model, ignored_modules=1)


def test_names_of_what_is_to_be_ignored():
    with raises("C062"):
        wrapped(ignored_states=["0.weight"])


def test_instances_cannot_be_ignored():
    inner = FSDP(nn.Linear(4, 4))
    with raises("C063"):
        FSDP(nn.Sequential(inner, nn.Linear(4, 4)), ignored_modules=[inner])


def test_an_init_function_that_is_none():
    with raises("C064"):
        wrapped(param_init_fn="normal")


class Scale(nn.Module):
    """A module without `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))


def test_a_module_on_meta_that_cannot_make_its_values():
    with raises("C065"):
        FSDP(Scale())


def test_an_init_function_that_makes_no_values():
    with raises("C066"):
        FSDP(nn.Linear(4, 4, device="meta"), param_init_fn=lambda module: None)


def test_writing_back_what_one_rank_sees():
    with raises("C067"), FSDP.summon_full_params(wrapped(), rank0_only=True):
        pass


def test_a_parameter_of_another_shape_inside_summon_full_params():
    model = wrapped(use_orig_params=True)
    with raises("C068"), FSDP.summon_full_params(model):
        model.module[0].weight = nn.Parameter(torch.ones(2, 4))


def test_a_hook_that_cannot_be_called():
    with raises("C069"):
        wrapped().register_comm_hook(None, "average")


def test_classes_to_wrap_by_name():
    with raises("C070"):
        wrapped(auto_wrap_policy={"Linear"})


def test_a_policy_that_is_none():
    with raises("C071"):
        wrapped(auto_wrap_policy=1000)


def test_a_class_in_place_of_a_policy():
    with raises("C071"):
        wrapped(auto_wrap_policy=nn.Linear)  # meant: {nn.Linear}


@pytest.mark.parametrize(
    "policy",
    ["auto", {nn.Bilinear}, ModuleWrapPolicy({nn.Bilinear}),
     partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Bilinear})],
    ids=["auto", "classes", "policy", "function"],
)  # fmt: skip
def test_a_policy_that_chooses_nothing(policy):
    with warns("W034"):
        wrapped(auto_wrap_policy=policy)


def test_a_policy_that_answers_with_none():
    with raises("C072"):
        wrapped(auto_wrap_policy=CustomPolicy(lambda module: None))


def test_wrapping_with_something_that_cannot_wrap():
    with raises("C073"), enable_wrap(wrapper_cls="FSDP"):
        pass


def test_a_forward_inside_summon_full_params():
    model = wrapped()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        model._runner().unit.showing.summon(True, False)  # as on another rank than the first
        with raises("P013"):
            model(torch.ones(1, 4))


def test_a_hook_is_for_the_root():
    model = nested()
    model(torch.ones(1, 4))
    with raises("P015"):
        model.module[0].register_comm_hook(None, print)


def test_clipping_is_for_the_root():
    model = nested()
    model(torch.ones(1, 4)).sum().backward()
    with raises("P016"):
        model.module[0].clip_grad_norm_(1.0)


def test_summoning_what_is_summoned():
    model = wrapped()
    with FSDP.summon_full_params(model), raises("P019"), FSDP.summon_full_params(model):
        pass


def test_summoning_inside_a_forward():
    model = wrapped()

    def summon(*_: object) -> None:
        with FSDP.summon_full_params(model):
            pass

    model.module[0].register_forward_hook(summon)
    with raises("P020"):
        model(torch.ones(1, 4))


def test_a_backward_of_what_was_summoned():
    model = wrapped()
    with FSDP.summon_full_params(model):
        loss = model.module[0].weight.sum()
    with raises("P021"):
        loss.backward()


@pytest.mark.parametrize("trained", [False, True])
def test_a_backward_of_what_was_summoned_of_original_parameters(trained):
    """Whatever of the parameter this rank holds; graphs of its own part, made before or after, are not meant."""
    model = wrapped(use_orig_params=True)
    if trained:
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
    weight, bias = model.module[0].weight, model.module[0].bias  # this rank has all of them
    before = weight.sum()
    with FSDP.summon_full_params(model):
        shown = [weight.sum(), bias.sum()]
    after = weight.sum() + bias.sum()
    for loss in shown:
        with raises("P021"):
            loss.backward()
    assert weight.grad is None and bias.grad is None
    before.backward()
    after.backward()
    assert weight.grad.tolist() == [2.0] * 16 and bias.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("originals", [False, True])
def test_the_state_of_a_module_inside_of_an_instance(originals):
    model = wrapped(use_orig_params=originals)
    for inside in (model.module, model.module[0]):
        with raises("K008"):
            get_model_state_dict(inside)


def test_a_second_hook():
    model = wrapped()
    model.register_comm_hook(None, lambda state, gradient, part: None)
    with raises("P023"):
        model.register_comm_hook(None, lambda state, gradient, part: None)


def test_loading_inside_summon_full_params():
    model = wrapped()
    with FSDP.summon_full_params(model), raises("P018"):
        model.load_state_dict(two_layers().state_dict())


def test_modules_that_are_left_in_full_precision():
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    with warns("W002"):
        FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mixed_precision=mixed, auto_wrap_policy={nn.Linear})


def test_the_wrapped_module_is_ignored():
    model = two_layers()
    with warns("W006"):
        FSDP(model, ignored_modules=[model])


def test_a_pair_of_groups_for_a_strategy_of_one():
    world = torch.distributed.group.WORLD
    with raises("C144"):
        wrapped(process_group=(world, world))


def test_a_hybrid_strategy_with_one_group():
    with raises("C143"):
        wrapped(process_group=torch.distributed.group.WORLD, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def test_something_else_than_a_group():
    with raises("C145"):
        wrapped(process_group="nccl")


def test_no_shard_on_a_mesh_of_two_dims():
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2))
    with raises("C057"):
        wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.NO_SHARD)


def test_gradients_of_an_instance_are_clipped_by_its_method():
    model = wrapped()
    model(torch.ones(1, 4)).sum().backward()
    from fullshard import clip_grad_norm_

    with raises("C155"):
        clip_grad_norm_(list(model.parameters())[:1], 1.0)


def test_a_norm_of_order_zero():
    model = wrapped()
    model(torch.ones(1, 4)).sum().backward()
    with raises("C157"):
        model.clip_grad_norm_(1.0, norm_type=0)


def test_an_instance_that_wraps_nothing_yet():
    with raises("P014"):
        nn.Module.__init__(empty := FSDP.__new__(FSDP))
        empty[0]


def test_classes_of_a_policy_by_name():
    with raises("C074"):
        ModuleWrapPolicy({"Linear"})


def test_a_hook_for_a_hybrid_strategy():
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2))
    model = wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with raises("P024"):
        model.register_comm_hook(None, lambda state, gradient, part: None)


def test_the_state_of_a_hook_without_a_group():
    with raises("C087"):
        DefaultState(None)


def test_a_backward_inside_summon_full_params():
    model = wrapped()
    loss = model(torch.ones(1, 4)).sum()
    with FSDP.summon_full_params(model), raises("P045"):
        loss.backward()


def test_one_rank_splits_nothing():
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    with warns("W005"):
        wrapped()


def test_configs_fit_their_type():
    assert FullStateDictConfig(rank0_only=True) and FullOptimStateDictConfig(rank0_only=True)


def test_another_flat_parameter():
    model = wrapped(use_orig_params=False)
    model.module._flat_param = nn.Parameter(torch.ones(3))
    with raises("C090"):
        model(torch.ones(1, 4))


def test_a_parameter_of_another_shape():
    model = wrapped(use_orig_params=True)
    model.module[0].weight = nn.Parameter(torch.ones(3))
    with raises("C091"):
        model(torch.ones(1, 4))


def test_a_step_inside_summon_full_params():
    model = wrapped(use_orig_params=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with raises("P022"), FSDP.summon_full_params(model):
        optimizer.step()


def test_computing_with_a_weight_that_is_not_gathered():
    model = wrapped(use_orig_params=False)
    with raises("P028"):
        model.module[0].weight + 1


def test_making_an_instance_the_root():
    with raises("P062"):
        wrapped()._is_root = True


def test_an_optimizer_in_backward_of_a_flat_parameter():
    model = wrapped(use_orig_params=False)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with raises("P032"):
        model(torch.ones(1, 4)).sum().backward()


class Momentum(torch.optim.Optimizer):
    """An optimizer of which nothing is known."""

    def step(self) -> None:
        pass


def test_an_optimizer_that_is_not_known():
    model = wrapped(use_orig_params=False)
    optimizer = Momentum(model.parameters(), {})
    model(torch.ones(1, 4)).sum().backward()
    with warns("W009"):
        optimizer.step()
