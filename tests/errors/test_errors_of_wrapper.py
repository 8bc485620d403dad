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
from fullshard.errors import PhaseError
from fullshard.state_dict import get_model_state_dict
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, transformer_auto_wrap_policy
from raising import NOT_CLIPPED, ONE, assert_raises, nested, raises, run, step, two_layers, warns, words_of, wrapped


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


def sparse() -> nn.Module:
    """A layer whose weight is sparse."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.eye(4).to_sparse())
    return model


def summon(m: FSDP) -> None:
    with FSDP.summon_full_params(m):
        pass


def hook(m: FSDP) -> None:
    m.register_comm_hook(None, lambda state, gradient, part: None)


world = torch.distributed.distributed_c10d._get_default_group
CALLS = [
    (
        lambda: FSDP(nn.Sequential(FSDP(nn.Linear(4, 4))), auto_wrap_policy={nn.Linear}),
        "ConfigError: auto_wrap_policy was passed for a model that is already wrapped",
    ),
    (
        lambda: by_policy({"layout": "rows"}),
        "ArgumentTypeError: auto_wrap_policy has arguments for a Linear that Fully",
    ),
    (
        lambda: FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()), use_orig_params=False),
        "ConfigError: Must flatten tensors with uniform dtype when use_orig_params=False",
    ),
    (lambda: setattr(CPUOffload(), "pin_memory", True), "ConfigError: CPUOffload has no field"),
    (lambda: MixedPrecision(param_dtype="bfloat16"), "ConfigError: MixedPrecision.param_dtype is invalid"),
    (
        lambda: wrapped(sharding_strategy="FULL_SHARD"),
        "ConfigError: sharding_strategy is invalid",
    ),  # meant: ShardingStrategy.FULL_SHARD
    (lambda: FSDP(torch.nn.functional.relu), "ConfigError: FullyShardedDataParallel takes an nn.Module, got function"),
    (
        lambda: wrapped(process_group=world(), device_mesh=init_device_mesh("cpu", (2,))),
        "ConfigError: process_group and device_mesh are mutually exclusive: pass one of them",
    ),
    (
        lambda: wrapped(device_mesh=init_device_mesh("cpu", (2,)), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        "ConfigError: HYBRID_SHARD cannot use this device_mesh",
    ),
    (lambda: wrapped(device_id="gpu"), "ConfigError: FullyShardedDataParallel(device_id=) is invalid"),
    (
        lambda: wrapped(ignored_modules=[], ignored_states=[]),
        "ConfigError: ignored_modules and ignored_states are mutually",
    ),
    (
        lambda: FSDP(two_layers(), ignored_modules=1),
        "ArgumentTypeError: FullyShardedDataParallel(ignored_modules=) is invalid ... a list or set of modules ... 1",
    ),
    (
        lambda: wrapped(ignored_modules="head"),
        "ArgumentTypeError: FullyShardedDataParallel(ignored_modules=) is invalid ... 'head' ... remedy",
    ),
    (
        lambda: wrapped(ignored_states=nn.Parameter(torch.ones(4))),
        "ArgumentTypeError: FullyShardedDataParallel(ignored_states=) is invalid ... parameters, or of modules ... rem",
    ),
    (
        lambda: wrapped(ignored_states=["0.weight"]),
        "ConfigError: FullyShardedDataParallel(ignored_states=) is invalid ... '0.weight' ... remedy",
    ),
    (
        lambda: wrapped(use_orig_params="yes"),
        "ConfigError: FullyShardedDataParallel(use_orig_params=) is invalid ... True or False ... 'yes'",
    ),
    (
        lambda: wrapped(sync_module_states="yes"),
        "ConfigError: FullyShardedDataParallel(sync_module_states=) is invalid ... True or False",
    ),
    (
        lambda: MixedPrecision(reduce_dtype=torch.float8_e5m2),
        "ConfigError: MixedPrecision.reduce_dtype is invalid ... 16 bits ... float8_e5m2 ... scatter_dtype",
    ),
    (lambda: FSDP(torch.jit.script(nn.Linear(4, 4))), "ConfigError: A ScriptModule cannot be sharded ... remedy"),
    (lambda: FSDP(sparse()), "ConfigError: A parameter is not dense ... weight ... torch.sparse_coo ... remedy"),
    (
        lambda: wrapped(auto_wrap_policy=lambda module: True),
        "ConfigError: auto_wrap_policy is invalid ... policy(module=, recurse=, nonwrapped_numel=)",
    ),
    (
        lambda: FSDP(nn.Linear(4, 4)),
        lambda m: FSDP(nn.Sequential(m, nn.Linear(4, 4)), ignored_modules=[m]),
        "ConfigError: ignored modules must not be FullyShardedDataParallel instances",
    ),
    (lambda: wrapped(param_init_fn="normal"), "ConfigError: param_init_fn is invalid"),
    (lambda: FSDP(Scale()), "ConfigError: Scale is on the meta device and has no reset_parameters()"),
    (
        lambda: FSDP(nn.Linear(4, 4, device="meta"), param_init_fn=lambda module: None),
        "ConfigError: param_init_fn left Linear on the meta device",
    ),
    (
        lambda: FSDP.summon_full_params(wrapped(), rank0_only=True).__enter__(),
        "NotSupportedError: writeback=True and rank0_only=True is not supported",
    ),
    (lambda: wrapped().register_comm_hook(None, "average"), "ConfigError: register_comm_hook(hook=) is invalid"),
    (lambda: wrapped(auto_wrap_policy={"Linear"}), "ConfigError: auto_wrap_policy must contain module classes, got"),
    (
        lambda: wrapped(auto_wrap_policy=nn.Linear),
        'ArgumentTypeError: auto_wrap_policy must be "auto"',
    ),  # meant: {nn.Linear}
    (lambda: by_policy(None), "ConfigError: CustomPolicy's lambda_fn returned an invalid value"),
    (
        lambda: enable_wrap(wrapper_cls="FSDP").__enter__(),
        "ConfigError: enable_wrap(wrapper_cls=) is invalid",
    ),
    (lambda: ModuleWrapPolicy({"Linear"}), "ConfigError: module_classes is invalid ... module classes"),
    (lambda: DefaultState(None), "ConfigError: Expected to pass in an explicit ProcessGroup to DefaultState"),
    (
        flat,
        lambda m: setattr(m.module, "_flat_param", nn.Parameter(torch.ones(3))),
        run,
        "ReplacementError: A sharded parameter was replaced by something that is not its shard",
    ),
    (
        originals,
        lambda m: setattr(m.module[0], "weight", nn.Parameter(torch.ones(3))),
        run,
        "ReplacementError: A sharded parameter was replaced by something ... or this rank's part (16,)",
    ),
    (
        lambda: wrapped(process_group=world(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        "ConfigError: process_group has an invalid value ... (shard_group, replicate_group)",
    ),
    (
        lambda: wrapped(process_group=(world(), world())),
        "ConfigError: process_group has an invalid ... a pair of groups only",
    ),
    (
        lambda: wrapped(process_group="nccl"),
        "ConfigError: process_group has an invalid ... a process group",
    ),
    (
        wrapped,
        step,
        lambda m: clip_grad_norm_(list(m.parameters())[:1], 1.0),
        "ConfigError: clip_grad_norm_ does not take parameters of a ... model.clip_grad_norm_",
    ),
    *((wrapped, step, lambda m, given=given: m.clip_grad_norm_(*given), words) for given, words in NOT_CLIPPED),
    (lambda: FSDP.__new__(FSDP), nn.Module.__init__, lambda m: m[0], "PhaseError: the instance has no module yet"),
    (nested, run, lambda m: hook(m.module[0]), "UsageError: register_comm_hook can only be called on a root"),
    (nested, step, lambda m: m.module[0].clip_grad_norm_(1.0), "PhaseError: clip_grad_norm_() is for the root"),
    (
        wrapped,
        lambda m: m.module[0].register_forward_hook(lambda *_: summon(m)),
        run,
        "UsageError: Cannot manually unshard parameters during forward/backward",
    ),
    (wrapped, hook, hook, "UsageError: a communication hook is already registered"),
    (hybrid, hook, "UsageError: Communication hooks do not work with hybrid strategies"),
    (flat, lambda m: m.module[0].weight + 1, "PhaseError: add was used on a parameter whose instance is not"),
    (
        flat,
        lambda m: _apply_optimizer_in_backward(torch.optim.SGD, m.parameters(), {"lr": 0.1}),
        step,
        "PhaseError: An optimizer to be stepped in backward was attached to a",
    ),
    (lambda: setattr(wrapped(), "_is_root", True), "UsageError: _is_root cannot be set"),
    (wrapped, fully_shard, "AssertedError: fully_shard was already applied to this ... once"),
    (
        lambda: FSDP(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            auto_wrap_policy={nn.Linear},
        ),
        "UserWarning: Modules of type BatchNorm1d become separate instances",
    ),
    (two_layers, lambda m: FSDP(m, ignored_modules=[m]), "UserWarning: the module passed to FullyShardedDataParallel"),
]
SUMMONED = [
    # While `model` is summoned.
    (
        lambda m: setattr(m.module[0], "weight", nn.Parameter(torch.ones(2, 4))),
        "ReplacementError: A parameter was replaced inside summon_full_params by one of",
    ),
    (lambda m: m.load_state_dict(two_layers().state_dict()), "PhaseError: load_state_dict() was called inside"),
    (summon, "UsageError: Cannot manually unshard parameters when already unsharding"),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


@pytest.mark.parametrize("row", SUMMONED, ids=words_of)
def test_inside_summon_full_params(row):
    model = originals()
    call, words = row
    with raises(words), FSDP.summon_full_params(model):
        call(model)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator of this number")
def test_an_accelerator_that_there_is_not():
    with raises("ConfigError: device_id=0 names an accelerator, and this machine has none"):
        wrapped(device_id=0)


def test_no_shard_on_a_mesh_of_two_dims():
    with raises("ConfigError: NO_SHARD cannot use this device_mesh"):
        wrapped(device_mesh=init_device_mesh("cpu", (1, 2)), sharding_strategy=ShardingStrategy.NO_SHARD)


def test_a_policy_that_is_none():
    with raises('ArgumentTypeError: auto_wrap_policy must be "auto"'):
        wrapped(auto_wrap_policy=1000)


@pytest.mark.parametrize(
    "policy",
    ["auto", {nn.Bilinear}, ModuleWrapPolicy({nn.Bilinear}),
     partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Bilinear})],
    ids=["auto", "classes", "policy", "function"],
)  # fmt: skip
def test_a_policy_that_chooses_nothing(policy):
    words = "Units are the repeated blocks" if policy == "auto" else "auto_wrap_policy matched no module"
    with warns(f"UserWarning: {words}"):
        wrapped(auto_wrap_policy=policy)


@pytest.mark.parametrize("use", [FSDP.state_dict, FSDP.check_is_root, lambda inner: inner.clip_grad_norm_(1.0)])
def test_an_inner_instance_that_is_used_first(use):
    model = nested()
    use(model.module[0])
    with pytest.raises(PhaseError, match="was used on its own before the model") as caught:
        run(model)
    assert "state_dict or other use of '0'" in str(caught.value)  # it said "a forward", and there was none


def test_a_forward_inside_summon_full_params():
    model = wrapped()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        model._runner().unit.showing.summon(True, False)  # as on another rank than the first
        with raises("UsageError: forward() was called inside summon_full_params() of the same model"):
            run(model)


def test_a_backward_of_what_was_summoned():
    model = wrapped()
    with FSDP.summon_full_params(model):
        loss = model.module[0].weight.sum()
    with raises("UsageError: backward() reached whole parameters of"):
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
        with raises("UsageError: backward() reached whole parameters of"):
            loss.backward()
    assert weight.grad is None and bias.grad is None
    before.backward()
    after.backward()
    assert weight.grad.tolist() == [2.0] * 16 and bias.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("make", [flat, originals])
def test_the_state_of_a_module_inside_of_an_instance(make):
    model = make()
    for inside in (model.module, model.module[0]):
        with raises("CheckpointError: The module is inside a FullyShardedDataParallel"):
            get_model_state_dict(inside)


def test_a_backward_inside_summon_full_params():
    model = wrapped()
    loss = model(ONE).sum()
    with FSDP.summon_full_params(model), raises("UsageError: backward() was called inside summon_full_params()"):
        loss.backward()


def test_a_step_inside_summon_full_params():
    model = flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    with raises("UsageError: A FlatParameter was changed inside summon_full_params"), FSDP.summon_full_params(model):
        optimizer.step()


def test_one_rank_splits_nothing():
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    with warns("UserWarning: FSDP is switching to use `NO_SHARD` instead of"):
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
    with warns("UserWarning: Momentum was given runs of elements in one dim"):
        optimizer.step()


def test_an_optimizer_from_before_sharding():
    """It is refused, except where the wrapper keeps the Parameter objects: there it trains them."""
    for original in (False, True):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        instance = FSDP(model, use_orig_params=original)
        step(instance)
        held = [parameter for parameter in instance.parameters() if parameter.numel()]
        before = [parameter.detach().clone() for parameter in held]
        if original:
            optimizer.step()
            assert not any(map(torch.equal, before, held))
        else:
            with raises("ConfigError: This SGD was built before its model was"):
                optimizer.step()
