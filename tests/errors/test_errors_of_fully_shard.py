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
from raising import ONE, assert_raises, raises, run, sharded, step, two_layers, unit


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


def reduce_kept(m: nn.Module) -> None:
    fully_shard.state(m)._root_post_backward_final_callback()


def a_root_of_fewer_ranks() -> nn.Module:
    model = two_layers()
    fully_shard(model[0], reduction="tokens")
    return fully_shard(model, mesh=DeviceMesh("cpu", [0]), reduction="tokens")


META = {"device": "meta"}
CALLS = {
    "C001": lambda: unit(check="always"),
    "C003": lambda: unit(sync_module_states="yes"),
    "C004": lambda: unit(mp_policy=torch.bfloat16),  # meant: MixedPrecisionPolicy(torch.bfloat16)
    "C005": lambda: fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], auto_wrap_policy={nn.Linear}),
    "C006": lambda: linears(comm="null"),
    "C007": lambda: linears(mp_policy=torch.half),
    "C008": lambda: linears(reshard_after_forward=2),
    "C009": lambda: fully_shard([]),
    "C010": lambda: fully_shard(list(nn.Linear(4, 4).parameters())),
    "C011": (lambda: fully_shard(nn.ModuleList([nn.Linear(4, 4)])), "ModuleList", "forward"),
    "C012": (unit, fully_shard, "once"),
    "C013": lambda: unit(offload_policy=True),  # meant: CPUOffloadPolicy()
    "C014": (lambda: unit(layout="columns"), "layout", "'columns'", "rows", "flat"),
    "C015": (lambda: unit(prefetch=-1), "prefetch", "-1"),
    "C016": (lambda: unit(dp_mesh_dims=DataParallelMeshDims("dp")), "mesh="),
    "C017": (lambda: unit(reshard_after_forward="no"), "reshard_after_forward", "no"),
    "C018": lambda: sharded().set_reshard_after_forward(2),
    "C019": (sharded, lambda m: m.set_custom_reduce_scatter(lambda *_: None), "callable", "allocate"),
    "C023": (sharded, lambda m: m.set_post_optim_event(3), "torch.Event"),
    "C024": (sharded, run, lambda m: m[0].set_post_optim_event(torch.Event()), "root"),
    "C025": lambda: sharded().set_gradient_divide_factor(0),
    "C026": lambda: sharded().set_reduce_scatter_max_input_buffers(0),
    "C027": lambda: fullshard.share_comm_ctx([sharded(), nn.Linear(4, 4)]),
    "C028": (sharded, run, lambda m: fullshard.share_comm_ctx([m[0], m]), "takes roots"),
    "C029": (unit, lambda m: fullshard.register_fsdp_forward_method(m, "encode"), "Linear", "encode"),
    "C038": (lambda: unit(reduction="average"), "'average'"),
    "C039": lambda: unit(comm=HookComm(TorchComm(), None, print), reduction="sum"),
    "C040": (
        lambda: sharded(reduction="sum"),
        lambda m: m.set_gradient_divide_factor(8),
        "divide factor",
        "scale the loss",
    ),
    "C084": (lambda: unit(comm="nccl"), "comm", "nccl"),
    "C085": (sharded, lambda m: m.set_custom_all_gather(Own()), run, "allocate() of the custom collective Own"),
    "C086": lambda: sharded()[0].set_allocate_memory_from_process_group_for_comm(True),
    "C021": (
        unit,
        lambda m: m.set_custom_all_gather(Own()),
        lambda m: m.set_allocate_memory_from_process_group_for_comm(True),
    ),
    "C139": (lambda: unit(reshard_after_forward=3), "reshard_after_forward", "3"),
    "C164": lambda: MixedPrecisionPolicy(param_dtype=torch.int8),
    "C165": (
        two_layers,
        lambda m: fully_shard(m[0], reduction="sum"),
        fully_shard,
        run,
        "'sum' of '0'",
        "'mean' of '(root)'",
    ),
    "C166": (a_root_of_fewer_ranks, run, "unit '0' on 2 ranks", "at most 1 ranks"),
    "C167": (
        lambda: fully_shard(nn.Sequential(nn.Linear(4, 4, **META), nn.Linear(4, 4, **META))),
        lambda m: m[0].to_empty(device="cpu"),
        run,
    ),
    "C171": lambda: unit(shard_placement_fn=lambda _: "dim 0"),
    "C173": lambda: unit(shard_placement_fn=lambda _: Shard(2)),
    "C174": (lambda: fully_shard(nn.LazyLinear(4)), "no shape yet", "weight"),
    "C276": lambda: unit(ignored_params={"weight"}),
    "L002": (
        lambda: nn.Linear(4, 4),
        lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(1.0))),
        fully_shard,
        "scale",
        "flat",
    ),
    "L004": lambda: fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda _: Shard(1)),
    "L005": lambda: unit(layout=fullshard.Blocks(0)),
    "P003": (sharded, run, lambda m: m[0].reset_iter_state(), "root"),
    "P004": (sharded, run, lambda m: reduce_kept(m[0])),
    "P042": (sharded, lambda m: m[0].register_forward_hook(lambda *_: reduce_kept(m)), run),
    "P043": (sharded, lambda m: m[0](ONE), run),
    "P050": lambda: fully_shard(nn.Linear(4, 4, **META))(ONE),
    "W001": lambda: unit(reshard_after_forward=1),
    "W033": (lambda: nn.Sequential(unit(unused="zeros"), nn.Linear(4, 4)), fully_shard, run),
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])


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


@pytest.mark.parametrize(("ranks", "given", "told"), [(12, 5, "one of 2, 3, 4, 6"), (7, 3, "True or False")])
def test_the_divisors_are_told(ranks, given, told):
    axes: Any = SimpleNamespace(shard=SimpleNamespace(size=ranks))
    with pytest.raises(fullshard.ConfigError) as caught:
        subdivide(axes, given)
    assert caught.value.code == "C139" and caught.value.expected.startswith(told)


@pytest.mark.parametrize("number", [2.5, True])
def test_reductions_in_flight_that_are_no_count(number):
    with raises("C381"):
        sharded().set_reduce_scatter_max_input_buffers(number)


def test_a_unit_by_itself_after_its_root():
    """What P043 tells to do."""
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
    with raises("C092"):
        weight.add(1)
    with raises("C158", words=["optimizer", "after", "fully_shard"]):
        optimizer.step()
    other = nn.Linear(4, 4)
    other.__class__ = type(model)
    with raises("P002"):
        run(other)
