"""Errors of `fully_shard` and of a unit's methods; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from fullshard.comm import HookComm, TorchComm
from fullshard.mesh.axes import subdivide
from fullshard.wrap import CustomPolicy
from raising import ONE, assert_raises, raises, run, sharded, step, two_layers, unit, words_of


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


class Own:
    """A collective of one's own: `allocate` gives memory of another shape."""

    def __call__(self, *tensors: torch.Tensor, **_: object) -> None:
        raise AssertionError("not reached: its memory does not fit")

    def allocate(self, size: object, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device=device)


def linears(**settings: Any) -> nn.Module:
    """Two layers, each a unit of these settings."""
    policy = CustomPolicy(lambda module: settings if isinstance(module, nn.Linear) else False)
    return fully_shard(two_layers(), auto_wrap_policy=policy)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(4, 4))


def sparse() -> nn.Module:
    """A layer whose weight is sparse."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.eye(4).to_sparse())
    return model


def reduce_kept(m: nn.Module) -> None:
    fully_shard.state(m)._root_post_backward_final_callback()


def a_root_of_fewer_ranks() -> nn.Module:
    model = two_layers()
    fully_shard(model[0], reduction="tokens")
    return fully_shard(model, mesh=DeviceMesh("cpu", [0]), reduction="tokens")


META = {"device": "meta"}
CALLS = [
    (lambda: unit(check="always"), "ConfigError: check is invalid"),
    (lambda: unit(sync_module_states="yes"), "ConfigError: fully_shard(sync_module_states=) is invalid"),
    (
        lambda: unit(mp_policy=torch.bfloat16),
        "ConfigError: fully_shard(mp_policy=) is invalid",
    ),  # meant: MixedPrecisionPolicy(torch.bfloat16)
    (
        lambda: fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], auto_wrap_policy={nn.Linear}),
        "ConfigError: auto_wrap_policy needs a single module, not a list",
    ),
    (lambda: linears(comm="null"), "ConfigError: auto_wrap_policy has arguments for '0' (Linear) that cannot"),
    (lambda: linears(mp_policy=torch.half), "ConfigError: mp_policy for '0' is invalid ... MixedPrecisionPolicy"),
    (
        lambda: linears(reshard_after_forward=2),
        "ConfigError: reshard_after_forward for '0' is invalid ... None",
    ),
    (lambda: fully_shard([]), "ConfigError: fully_shard was called with an empty list ... expected ... remedy"),
    (lambda: fully_shard(scripted()), "ConfigError: A ScriptModule cannot be sharded ... the module itself ... remedy"),
    (lambda: fully_shard(nn.Sequential(scripted())), "ConfigError: A ScriptModule cannot be sharded ... 0, a Script"),
    (lambda: fully_shard(torch.jit.script(nn.Tanh())), "ConfigError: RecursiveScriptModule defines no forward"),
    (lambda: fully_shard(sparse()), "ConfigError: A parameter is not dense ... weight ... torch.sparse_coo ... remedy"),
    (lambda: fully_shard(sparse(), layout="flat"), "ConfigError: A parameter is not dense ... weight"),
    (
        lambda: unit(auto_wrap_policy=lambda module: True),
        "ConfigError: auto_wrap_policy is invalid ... policy(module=, recurse=, nonwrapped_numel=) ... lambda_fn",
    ),
    (lambda: fully_shard(list(nn.Linear(4, 4).parameters())), "ArgumentTypeError: fully_shard takes an nn.Module or a"),
    (
        lambda: fully_shard(nn.ModuleList([nn.Linear(4, 4)])),
        "ConfigError: ModuleList defines no forward, so it cannot be a unit",
    ),
    (unit, fully_shard, "AssertedError: fully_shard was already applied to this Linear ... once"),
    (
        lambda: unit(offload_policy=True),
        "ConfigError: fully_shard(offload_policy=) is invalid",
    ),  # meant: CPUOffloadPolicy()
    (
        lambda: unit(layout="columns"),
        "ConfigError: fully_shard(layout=) is invalid ... 'columns' ... rows ... flat",
    ),
    (
        lambda: fully_shard(nn.Linear(4, 4, **META), sync_module_states=True),
        "ConfigError: sync_module_states=True needs modules with values ... weight of Linear ... meta ... to_empty",
    ),
    (lambda: unit(prefetch=-1), "ConfigError: fully_shard(prefetch=) is invalid ... -1"),
    (
        lambda: unit(dp_mesh_dims=DataParallelMeshDims("dp")),
        "ConfigError: dp_mesh_dims names the dims of mesh= that are data-parallel",
    ),
    (
        lambda: unit(reshard_after_forward="no"),
        "ConfigError: fully_shard(reshard_after_forward=) is invalid ... no",
    ),
    (
        lambda: sharded().set_reshard_after_forward(2),
        "ConfigError: set_reshard_after_forward() is invalid ... 2",
    ),
    (
        lambda: sharded().set_requires_gradient_sync("no"),
        "ConfigError: set_requires_gradient_sync() is invalid ... True or False ... 'no'",
    ),
    (
        lambda: sharded().set_reshard_after_backward(None),
        "ConfigError: set_reshard_after_backward() is invalid ... True or False ... None",
    ),
    (
        lambda: sharded().set_reduce_scatter_unused_params([True]),
        "ConfigError: set_reduce_scatter_unused_params() is invalid ... True or False",
    ),
    (
        sharded,
        lambda m: m.set_custom_reduce_scatter(lambda *_: None),
        "ConfigError: A custom reduce-scatter must be callable and have a method ... allocate",
    ),
    (
        sharded,
        lambda m: m.set_post_optim_event(3),
        "ConfigError: set_post_optim_event() is invalid ... Event",
    ),
    (
        sharded,
        run,
        lambda m: m[0].set_post_optim_event(torch.Event()),
        "PhaseError: set_post_optim_event() is for the root; unit '0' is",
    ),
    (
        lambda: sharded().set_gradient_divide_factor(0),
        "ConfigError: the gradient divide factor is invalid",
    ),
    (
        lambda: sharded().set_reduce_scatter_max_input_buffers(0),
        "ConfigError: max_input_buffers is invalid ... 1",
    ),
    (lambda: fullshard.share_comm_ctx([sharded(), nn.Linear(4, 4)]), "ConfigError: Only units can share a"),
    (
        sharded,
        run,
        lambda m: fullshard.share_comm_ctx([m[0], m]),
        "ConfigError: share_comm_ctx takes roots, whose forward is called from outside",
    ),
    (
        unit,
        lambda m: fullshard.register_fsdp_forward_method(m, "encode"),
        "ConfigError: Linear has no method 'encode' to register as a forward",
    ),
    (lambda: unit(reduction="average"), "ConfigError: reduction= is invalid ... 'average'"),
    (lambda: unit(comm=HookComm(TorchComm(), None, print), reduction="sum"), "ConfigError: reduction='sum' cannot be"),
    (
        lambda: sharded(reduction="sum"),
        lambda m: m.set_gradient_divide_factor(8),
        "ConfigError: a gradient divide factor cannot be combined with ... scale the loss",
    ),
    (lambda: unit(comm="nccl"), 'ConfigError: comm is invalid ... "torch" ... nccl'),
    (
        sharded,
        lambda m: m.set_custom_all_gather(Own()),
        run,
        "ConfigError: allocate() of the custom collective Own returned a",
    ),
    (
        lambda: sharded()[0].set_allocate_memory_from_process_group_for_comm(True),
        "ConfigError: The fake backend does not allocate its own memory for communication",
    ),
    (
        unit,
        lambda m: m.set_custom_all_gather(Own()),
        lambda m: m.set_allocate_memory_from_process_group_for_comm(True),
        "ConfigError: memory from the process group and custom collectives are mutually exclusive",
    ),
    (
        lambda: unit(reshard_after_forward=3),
        "ConfigError: reshard_after_forward=3 does not divide 2 ranks into",
    ),
    (lambda: MixedPrecisionPolicy(param_dtype=torch.int8), "ConfigError: MixedPrecisionPolicy.param_dtype is invalid"),
    *(
        (
            lambda dtype=dtype: MixedPrecisionPolicy(reduce_dtype=dtype),
            f"ConfigError: MixedPrecisionPolicy.reduce_dtype is invalid ... 16 bits ... {dtype} ... scatter_dtype",
        )
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    ),
    (
        lambda: MixedPrecisionPolicy(cast_forward_inputs="no"),
        "ConfigError: MixedPrecisionPolicy.cast_forward_inputs is invalid ... True or False ... 'no'",
    ),
    (lambda: MixedPrecisionPolicy(cast_forward_inputs=5), "ConfigError: MixedPrecisionPolicy.cast_forward_inputs is"),
    (lambda: MixedPrecisionPolicy(error_feedback="no"), "ConfigError: MixedPrecisionPolicy.error_feedback is invalid"),
    (lambda: CPUOffloadPolicy(pin_memory="x"), "ConfigError: CPUOffloadPolicy.pin_memory is invalid ... 'x'"),
    (
        two_layers,
        lambda m: fully_shard(m[0], reduction="sum"),
        fully_shard,
        run,
        "ConfigError: Units of one model have different values of reduction=. ... 'sum' of '0' ... 'mean' of '(root)'",
    ),
    (
        a_root_of_fewer_ranks,
        run,
        "ConfigError: Tokens are counted over the ... unit '0' on 2 ranks ... at most 1 ranks",
    ),
    (
        lambda: fully_shard(nn.Sequential(nn.Linear(4, 4, **META), nn.Linear(4, 4, **META))),
        lambda m: m[0].to_empty(device="cpu"),
        run,
        "ConfigError: Some parameters of a unit are on the meta device and others are",
    ),
    (
        lambda: unit(shard_placement_fn=lambda _: "dim 0"),
        "ConfigError: shard_placement_fn returned an unsupported placement.",
    ),
    (lambda: unit(shard_placement_fn=lambda _: Shard(2)), "AssertedError: shard_placement_fn returned a placement on"),
    (lambda: fully_shard(nn.LazyLinear(4)), "ConfigError: A parameter of a lazy module has no shape yet ... weight"),
    (lambda: unit(ignored_params={"weight"}), "ArgumentTypeError: ignored_params must hold Parameters"),
    (lambda: unit(ignored_params=3), "ArgumentTypeError: ignored_params must hold Parameters ... int 3"),
    (
        lambda: unit(ignored_params=nn.Linear(4, 4).weight),
        "ArgumentTypeError: ignored_params must hold Parameters ... a tensor of shape (4, 4), not in a set",
    ),
    (
        lambda: nn.Linear(4, 4),
        lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(1.0))),
        fully_shard,
        "LayoutError: parameter scale is a scalar (0 dimensions) and cannot be split ... flat",
    ),
    (
        lambda: fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda _: Shard(1)),
        "UnevenError: parameter weight of shape",
    ),
    (lambda: unit(layout=fullshard.Blocks(0)), 'LayoutError: Blocks takes a positive number of elements or "row", got'),
    (sharded, run, lambda m: m[0].reset_iter_state(), "PhaseError: reset_iter_state() is for the ... root"),
    (
        sharded,
        run,
        lambda m: reduce_kept(m[0]),
        "PhaseError: _root_post_backward_final_callback() is for the root",
    ),
    (
        sharded,
        lambda m: m[0].register_forward_hook(lambda *_: reduce_kept(m)),
        run,
        "PhaseError: Kept gradients cannot be reduced while the model runs",
    ),
    (sharded, lambda m: m[0](ONE), run, "PhaseError: Unit '0' was used on its own before the model that"),
    (lambda: fully_shard(nn.Linear(4, 4, **META))(ONE), "PhaseError: A forward was called while parameters are on the"),
    (lambda: unit(reshard_after_forward=1), "UserWarning: reshard_after_forward=1 (int) keeps whole units until their"),
    (
        lambda: nn.Sequential(unit(unused="zeros"), nn.Linear(4, 4)),
        fully_shard,
        run,
        "UserWarning: unused= of units below the root is ignored: only the",
    ),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


def test_ignored_parameters_from_a_generator():
    model = nn.Linear(4, 4)
    weight = model.weight
    fully_shard(model, ignored_params=(p for p in [weight]))
    assert model.weight is weight and model.bias.shape == (4,) and type(model.bias) is not nn.Parameter


def test_an_ignored_parameter_may_be_sparse():
    model = sparse()
    fully_shard(model, ignored_params={model.weight})
    assert model.weight.is_sparse


def test_a_module_whose_parameters_a_unit_around_it_has():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    for inside in (model[1], model[1][0]):
        with raises("ConfigError: fully_shard was applied to a ... after the module around it"):
            fully_shard(inside)
    assert type(model[1]) is nn.Sequential
    fully_shard(model[1][1])  # nothing is gathered for it
    model[1].append(nn.Linear(4, 4))
    assert isinstance(fully_shard(model[1][2]), fullshard.FSDPModule)  # added since
    shared = nn.Linear(4, 4)
    for one in (first := nn.Sequential(shared), second := nn.Sequential(shared)):
        fully_shard(one)  # side by side: a unit around both will have it
    fully_shard(nn.Sequential(first, second))


@pytest.mark.parametrize(("ranks", "given", "told"), [(12, 5, "one of 2, 3, 4, 6"), (7, 3, "True or False")])
def test_the_divisors_are_told(ranks, given, told):
    axes: Any = SimpleNamespace(shard=SimpleNamespace(size=ranks))
    with raises(f"ConfigError: does not divide {ranks} ranks into smaller groups of equal size ... expected:  {told}"):
        subdivide(axes, given)


@pytest.mark.parametrize("number", [2.5, True])
def test_reductions_in_flight_that_are_no_count(number):
    with raises("ArgumentTypeError: max_input_buffers is invalid ... an int of at least 1"):
        sharded().set_reduce_scatter_max_input_buffers(number)


def test_a_unit_by_itself_after_its_root():
    """As the error for a unit that is called first says."""
    model = sharded()
    with torch.no_grad():
        run(model)
    assert model[0](ONE).requires_grad
    run(model)


def test_what_was_there_before_sharding():
    """A parameter, an optimizer; and the class of a unit is no unit."""
    model = nn.Linear(4, 4)
    weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    step(fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    with raises("ConfigError: This Parameter object was replaced by its sharded form in"):
        weight.add(1)
    with raises("ConfigError: This SGD was built before its model was ... optimizer ... after ... fully_shard"):
        optimizer.step()
    other = nn.Linear(4, 4)
    other.__class__ = type(model)
    with raises("PhaseError: Linear has lost its unit; apply fully_shard again"):
        run(other)
