"""Errors of `FullyShardedDataParallel`; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy, clip_grad_norm_, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm_hooks import DefaultState
from fullshard.state_dict import get_model_state_dict
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, transformer_auto_wrap_policy
from raising import ONE, assert_raises, nested, raises, run, step, two_layers, warns, wrapped


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


class Scale(nn.Module):
    """A module without `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))


def flat() -> FSDP:
    """Two layers in one flat parameter."""
    return wrapped(use_orig_params=False)


def originals() -> FSDP:
    """Two layers with their own parameters."""
    return wrapped(use_orig_params=True)


def by_policy(answer: object) -> FSDP:
    """A policy that answers so for each layer."""
    policy = CustomPolicy(lambda module: answer if isinstance(module, nn.Linear) else False)
    return wrapped(auto_wrap_policy=policy)


def hybrid() -> FSDP:
    mesh = init_device_mesh("cpu", (1, 2))
    return wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def summon(m: FSDP) -> None:
    with FSDP.summon_full_params(m):
        pass


def hook(m: FSDP) -> None:
    m.register_comm_hook(None, lambda state, gradient, part: None)


world = torch.distributed.distributed_c10d._get_default_group
CALLS = {
    "C049": lambda: FSDP(nn.Sequential(FSDP(nn.Linear(4, 4))), auto_wrap_policy={nn.Linear}),
    "C050": lambda: by_policy({"layout": "rows"}),
    "C051": lambda: FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()), use_orig_params=False),
    "C052": lambda: setattr(CPUOffload(), "pin_memory", True),
    "C053": lambda: MixedPrecision(param_dtype="bfloat16"),
    "C054": lambda: wrapped(sharding_strategy="FULL_SHARD"),  # meant: ShardingStrategy.FULL_SHARD
    "C055": lambda: FSDP(torch.nn.functional.relu),
    "C056": lambda: wrapped(process_group=world(), device_mesh=init_device_mesh("cpu", (2,))),
    "C057": lambda: wrapped(device_mesh=init_device_mesh("cpu", (2,)), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "C059": lambda: wrapped(device_id="gpu"),
    "C060": lambda: wrapped(ignored_modules=[], ignored_states=[]),
    "C061": lambda: FSDP(two_layers(), ignored_modules=1),
    "C062": lambda: wrapped(ignored_states=["0.weight"]),
    "C063": (lambda: FSDP(nn.Linear(4, 4)), lambda m: FSDP(nn.Sequential(m, nn.Linear(4, 4)), ignored_modules=[m])),
    "C064": lambda: wrapped(param_init_fn="normal"),
    "C065": lambda: FSDP(Scale()),
    "C066": lambda: FSDP(nn.Linear(4, 4, device="meta"), param_init_fn=lambda module: None),
    "C067": lambda: FSDP.summon_full_params(wrapped(), rank0_only=True).__enter__(),
    "C069": lambda: wrapped().register_comm_hook(None, "average"),
    "C070": lambda: wrapped(auto_wrap_policy={"Linear"}),
    "C071": lambda: wrapped(auto_wrap_policy=nn.Linear),  # meant: {nn.Linear}
    "C072": lambda: by_policy(None),
    "C073": lambda: enable_wrap(wrapper_cls="FSDP").__enter__(),
    "C074": lambda: ModuleWrapPolicy({"Linear"}),
    "C087": lambda: DefaultState(None),
    "C090": (flat, lambda m: setattr(m.module, "_flat_param", nn.Parameter(torch.ones(3))), run),
    "C091": (originals, lambda m: setattr(m.module[0], "weight", nn.Parameter(torch.ones(3))), run),
    "C143": lambda: wrapped(process_group=world(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "C144": lambda: wrapped(process_group=(world(), world())),
    "C145": lambda: wrapped(process_group="nccl"),
    "C155": (wrapped, step, lambda m: clip_grad_norm_(list(m.parameters())[:1], 1.0), "model.clip_grad_norm_"),
    "C157": (wrapped, step, lambda m: m.clip_grad_norm_(1.0, norm_type=0)),
    "P014": (lambda: FSDP.__new__(FSDP), nn.Module.__init__, lambda m: m[0]),
    "P015": (nested, run, lambda m: hook(m.module[0])),
    "P016": (nested, step, lambda m: m.module[0].clip_grad_norm_(1.0)),
    "P020": (wrapped, lambda m: m.module[0].register_forward_hook(lambda *_: summon(m)), run),
    "P023": (wrapped, hook, hook),
    "P024": (hybrid, hook),
    "P028": (flat, lambda m: m.module[0].weight + 1),
    "P032": (flat, lambda m: _apply_optimizer_in_backward(torch.optim.SGD, m.parameters(), {"lr": 0.1}), step),
    "P062": lambda: setattr(wrapped(), "_is_root", True),
    "C012": (wrapped, fully_shard, "once"),
    "W002": lambda: FSDP(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        auto_wrap_policy={nn.Linear},
    ),
    "W006": (two_layers, lambda m: FSDP(m, ignored_modules=[m])),
}
SUMMONED = {
    # While `model` is summoned.
    "C068": lambda m: setattr(m.module[0], "weight", nn.Parameter(torch.ones(2, 4))),
    "P018": lambda m: m.load_state_dict(two_layers().state_dict()),
    "P019": summon,
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])


@pytest.mark.parametrize("code", SUMMONED)
def test_inside_summon_full_params(code):
    model = originals()
    with raises(code), FSDP.summon_full_params(model):
        SUMMONED[code](model)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator of this number")
def test_an_accelerator_that_there_is_not():
    with raises("C058"):
        wrapped(device_id=0)


def test_no_shard_on_a_mesh_of_two_dims():
    with raises("C057"):
        wrapped(device_mesh=init_device_mesh("cpu", (1, 2)), sharding_strategy=ShardingStrategy.NO_SHARD)


def test_a_policy_that_is_none():
    with raises("C071"):
        wrapped(auto_wrap_policy=1000)


@pytest.mark.parametrize(
    "policy",
    ["auto", {nn.Bilinear}, ModuleWrapPolicy({nn.Bilinear}),
     partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Bilinear})],
    ids=["auto", "classes", "policy", "function"],
)  # fmt: skip
def test_a_policy_that_chooses_nothing(policy):
    with warns("W034"):
        wrapped(auto_wrap_policy=policy)


def test_a_forward_inside_summon_full_params():
    model = wrapped()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        model._runner().unit.showing.summon(True, False)  # as on another rank than the first
        with raises("P013"):
            run(model)


def test_a_backward_of_what_was_summoned():
    model = wrapped()
    with FSDP.summon_full_params(model):
        loss = model.module[0].weight.sum()
    with raises("P021"):
        loss.backward()


@pytest.mark.parametrize("trained", [False, True])
def test_a_backward_of_what_was_summoned_of_original_parameters(trained):
    """Whatever of the parameter this rank holds; graphs of its own part, made before or after, are not meant."""
    model = originals()
    if trained:
        step(model)
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


@pytest.mark.parametrize("make", [flat, originals])
def test_the_state_of_a_module_inside_of_an_instance(make):
    model = make()
    for inside in (model.module, model.module[0]):
        with raises("K008"):
            get_model_state_dict(inside)


def test_a_backward_inside_summon_full_params():
    model = wrapped()
    loss = model(ONE).sum()
    with FSDP.summon_full_params(model), raises("P045"):
        loss.backward()


def test_a_step_inside_summon_full_params():
    model = flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    with raises("P022"), FSDP.summon_full_params(model):
        optimizer.step()


def test_one_rank_splits_nothing():
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    with warns("W005"):
        wrapped()


def test_configs_fit_their_type():
    assert FullStateDictConfig(rank0_only=True)


class Momentum(torch.optim.Optimizer):
    """An optimizer of which nothing is known."""

    def step(self) -> None:
        pass


def test_an_optimizer_that_is_not_known():
    model = flat()
    optimizer = Momentum(model.parameters(), {})
    step(model)
    with warns("W009"):
        optimizer.step()
