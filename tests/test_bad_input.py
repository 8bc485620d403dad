"""Mistakes of a user: one clear error from our tree, before any collective can hang, the model as it was."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.errors import CheckpointError, ConfigError, DivergenceError, FullshardError, LayoutError, PhaseError
from fullshard.shard import Bucket
from models import WIDTH, OddMLP, Scorer, Shapes
from training import LAYOUTS

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def look_at(model: nn.Module) -> dict[str, object]:
    """Everything of a model that a failed call could have changed."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if isinstance(value, OrderedDict)}
        found[f"module {name}"] = type(module), sorted(vars(module)), hooks
    for name, p in model.named_parameters():
        found[f"parameter {name}"] = id(p), p.device, p.dtype, p.requires_grad, p._version
    return found


def refuses(model: nn.Module, call: Callable[[nn.Module], object]) -> None:
    """`call` raises one of our errors, and leaves `model` alone. What the errors say: tests/errors."""
    before = look_at(model)
    with pytest.raises(FullshardError):
        call(model)
    assert look_at(model) == before


def linear() -> nn.Module:
    return nn.Linear(3, 3)


REFUSED: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], object]]] = [  # model, call
    (OddMLP, lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (2, 2, 2)))),
    (OddMLP, lambda m: fully_shard(m, mesh=4)),
    (lambda: nn.ModuleList([linear()]), fully_shard),
    (lambda: nn.ModuleDict({"layer": linear()}), fully_shard),
    (lambda: nn.ModuleList([linear(), nn.ModuleList([linear()])]), lambda m: fully_shard([m[0], m[1]])),
    (lambda: fully_shard(OddMLP()), fully_shard),
    (OddMLP, lambda m: fully_shard(m.scale)),
    (OddMLP, lambda m: fully_shard([])),
    (lambda: Shapes(scalar=True), fully_shard),  # the flat layout holds it
    (lambda: nn.Sequential(nn.LazyLinear(3)), fully_shard),
    *(
        (OddMLP, partial(fully_shard, **{name: value}))
        for name, value in (
            ("layout", "diagonal"),
            ("reshard_after_forward", 3),
            ("reshard_after_forward", "yes"),
            ("prefetch", -1),
            ("comm", "pigeon"),
            ("auto_wrap_policy", "wrong"),
            ("mp_policy", torch.bfloat16),
            ("offload_policy", "cpu"),
        )
    ),
]


@pytest.mark.parametrize(("make", "call"), REFUSED)
def test_what_is_refused_changes_nothing(fake_world, make, call):
    fake_world(8)
    refuses(make(), call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA mesh is no mistake where there is CUDA")
def test_parameters_on_another_device_than_the_mesh(fake_world):
    fake_world(4)
    model, mesh = OddMLP(), init_device_mesh("cuda", (4,))
    refuses(model, lambda m: fully_shard(m, mesh=mesh))


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_shards_that_were_moved_away_from_their_mesh(fake_world, layout):
    """On a GPU, `to_empty(device="cuda")` after sharding over a mesh of CPUs, or under another index."""
    fake_world(4)
    model = linear()
    fully_shard(model, layout=layout)
    with mock.patch.object(Bucket, "device", torch.device("cuda", 1)), pytest.raises(ConfigError) as raised:
        model(torch.ones(2, 3))
    says(raised.value, "not its mesh's", "expected:  cpu", "got:       cuda:1", "init_device_mesh('cuda'")


def test_a_scalar_is_held_by_the_flat_layout(fake_world):
    fake_world(4)
    fully_shard(Shapes(scalar=True), layout="flat")


def test_errors_are_the_builtin_kinds_too():
    """Code written for PyTorch's errors still catches ours."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(LayoutError, ValueError)
    for error in (DivergenceError, CheckpointError, PhaseError):
        assert issubclass(error, RuntimeError)


def says(error: BaseException, *words: str) -> None:
    """It names all of them."""
    assert [word for word in words if word not in str(error)] == [], error


@both_layouts
def test_forward_while_parameters_are_on_meta(fake_world, layout):
    fake_world(4)
    with torch.device("meta"):
        model = OddMLP()
    for unit in [*model.layers, model]:
        fully_shard(unit, layout=layout)
    with pytest.raises(FullshardError) as caught:
        model(torch.ones(2, 7))
    assert isinstance(caught.value, RuntimeError)  # as PyTorch's is
    says(caught.value, "meta", "scale", "layers.0.weight", "to_empty")
    model.to_empty(device="cpu")
    model(torch.ones(2, 7))  # and now it works


@both_layouts
def test_one_parameter_left_on_meta_is_named(fake_world, layout):
    fake_world(4)
    model = OddMLP()
    model.layers[1].bias = nn.Parameter(torch.empty(1023, device="meta"))
    with pytest.raises(FullshardError, match=r"layers\.1\.bias") as caught:  # when sharded, or when called
        fully_shard(model, layout=layout)
        model(torch.ones(2, 7))
    assert "layers.1.weight" not in str(caught.value)


@both_layouts
def test_method_that_was_not_registered(fake_world, layout):
    """Called while the unit is freed, it would compute with a slice; the remedy is in the message."""
    fake_world(4)
    model = Scorer()
    for block in model.blocks:
        fully_shard(block, layout=layout)
    fully_shard(model, layout=layout)
    x = torch.ones(2, WIDTH)
    model(x)
    before = look_at(model)
    with pytest.raises(PhaseError) as caught:
        model.blocks[1].project(x, gain=1.0)
    says(caught.value, "blocks.1", "register_fsdp_forward_method")
    assert look_at(model) == before
    signature = inspect.signature(model.blocks[1].project)
    fullshard.register_fsdp_forward_method(model.blocks[1], "project")
    once = model.blocks[1].project
    fullshard.register_fsdp_forward_method(model.blocks[1], "project")
    assert model.blocks[1].project is once and inspect.signature(once) == signature
    assert once(x, gain=1.0).shape == (2, WIDTH)


@both_layouts
def test_state_dict_with_wrong_shapes(fake_world, layout):
    fake_world(4)
    model, other = OddMLP(), OddMLP()
    other.layers[2] = nn.Linear(1023, 5)
    for one in (model, other):
        fully_shard(one, layout=layout)
    state = other.state_dict()
    before = {name: (p, p._local_tensor.clone()) for name, p in model.named_parameters()}
    with pytest.raises(FullshardError) as caught:
        model.load_state_dict(state)
    assert isinstance(caught.value, RuntimeError)  # as PyTorch's is
    says(caught.value, "layers.2.weight", "3, 1023", "5, 1023")
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p._local_tensor, before[name][1]), f"{name} was loaded, though the whole was refused"


VALUES = {
    "meta": lambda value: value.to("meta"),  # it was loaded as whatever the memory held
    "sparse": torch.Tensor.to_sparse,  # ranks that own nothing of it loaded it
    "array": torch.Tensor.numpy,
    "list": torch.Tensor.tolist,
    "none": lambda value: None,
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", [*LAYOUTS, "flat parameter", "original parameters"])
def test_state_dict_with_values_that_are_not_dense_tensors(fake_world, layout, rank, kind):
    fake_world(2, rank)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state["1.weight"] = VALUES[kind](state["1.weight"])
    if layout in LAYOUTS:
        fully_shard(model, layout=layout)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=layout == "original parameters")
    before = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        model.load_state_dict(state)
    says(caught.value, "1.weight", "dense tensor")
    after = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    assert all(map(torch.equal, after, before))


class Scaled(torch.Tensor):
    """A weight of int8 with one scale: what quantisation libraries make of parameters."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale)
        raise NotImplementedError(func)


@both_layouts
def test_quantised_weights_are_not_cut(fake_world, layout):
    fake_world(2)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Scaled(torch.ones(4, 4, dtype=torch.int8), torch.ones(1)))
    with pytest.raises(ConfigError, match="Scaled") as caught:
        fully_shard(model, layout=layout)
    assert "weight" in str(caught.value) and type(model) is nn.Linear
    fully_shard(model, layout=layout, ignored_params={model.weight})
    assert isinstance(model.weight, Scaled)
