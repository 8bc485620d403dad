"""What the wrapper is told to leave alone, and what it takes as it is: ignored modules, DTensors, batch norms."""

from __future__ import annotations

import copy
import os
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import StateDictType
from training import assert_same
from ways import LAYOUTS, WAYS, WRAPPERS, adam, alone, differences, error_of, named_error, shard, whole, wrap

wrappers = pytest.mark.parametrize("way", WRAPPERS)
LIBRARIES = (torch_fsdp, fullshard)  # PyTorch's first: it says what is right


class Scaled(nn.Module):
    """A layer and one that is to be ignored, each with a buffer that bfloat16 cannot hold."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 6)
        self.ignored = nn.Sequential(nn.BatchNorm1d(6) if norm else nn.Linear(6, 6))
        self.ignored.register_buffer("scale", torch.tensor([4097.0]))
        self.register_buffer("scale", torch.tensor([4097.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.ignored(self.layer(x).float()) * self.ignored.scale


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))


def reduced(library: types.ModuleType) -> Any:
    return library.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def buffers_of_ignored(way: str, norm: bool, outer: bool) -> list[str]:
    """They keep dtype and value, in training and in the state dict; those of the instance itself are cast."""
    problems = []
    for library in LIBRARIES:
        inner = Scaled(norm)
        given = {"use_orig_params": way == "originals", "mixed_precision": reduced(library)}
        model = wrap(inner, library, ignored_modules=[inner.ignored], **given)
        if outer:
            model = wrap(nn.Sequential(model), library, **given)
        model(batch()).float().sum().backward()
        found = {
            "ignored": (inner.ignored.scale.dtype, inner.ignored.scale.item()),
            "own": (inner.scale.dtype, inner.scale.item()),
            "norm": {b.dtype for b in inner.ignored[0].buffers() if b.is_floating_point()},
            "grad": {p.grad.dtype for p in inner.ignored.parameters()},
        }
        want = {
            "ignored": (torch.float32, 4097.0),
            "own": (torch.bfloat16, 4096.0),
            "norm": {torch.float32} if norm else set(),
            "grad": {torch.float32},
        }
        problems += [f"{library.__name__}: {k} is {v}, not {want[k]}" for k, v in found.items() if v != want[k]]
        with library.FullyShardedDataParallel.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
            saved = {k.removeprefix("0."): v for k, v in model.state_dict().items()}
        if saved["ignored.scale"].item() != 4097.0:
            problems.append(f"{library.__name__}: saved as {saved['ignored.scale']}")
    return problems


@wrappers
@pytest.mark.parametrize("norm", [False, True], ids=["linear", "batch_norm"])
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "below_another"])
def test_buffers_of_ignored_modules_stay(run_ranks, way, norm, outer):
    assert_same(run_ranks(buffers_of_ignored, way, norm, outer, timeout=20))


# Ignored by an instance below.


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)), nn.Linear(6, 6))


def average_gradients(parameters: Any) -> None:
    """What a program does itself with the gradients of parameters that nothing manages."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def ignored_below(way: str, how: str) -> list[str]:
    """An instance's ignored modules are ignored by those around it: whole, alive, trained beside the shards."""
    problems = []
    for library in LIBRARIES:
        where, model = library.__name__, layers()
        norm = model[0][1]
        before = list(norm.parameters())
        given: dict[str, Any] = {"ignored_modules": [norm]} if how == "modules" else {"ignored_states": before}
        model[0] = wrap(model[0], library, use_orig_params=way == "originals", **given)
        wrapped = wrap(model, library, use_orig_params=way == "originals")
        optimizer = adam(wrapped.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(batch()).square().mean().backward()
            average_gradients(before)
            optimizer.step()
        if not all(a is b and a.shape == (6,) for a, b in zip(norm.parameters(), before, strict=True)):
            problems.append(f"{where}: parameters {[tuple(p.shape) for p in norm.parameters()]}")
        if {id(p) for p in before} - {id(p) for p in wrapped.parameters()}:
            problems.append(f"{where}: model.parameters() gives others")
        reference = layers()
        other = adam(reference.parameters())
        whole_batch = torch.cat([torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)])
        for _ in range(2):
            other.zero_grad()
            reference(whole_batch).square().mean().backward()
            other.step()
        with library.FullyShardedDataParallel.state_dict_type(wrapped, library.StateDictType.FULL_STATE_DICT):
            problems += differences(where, wrapped.state_dict(), dict(reference.state_dict()))
    return problems


@wrappers
@pytest.mark.parametrize("how", ["modules", "states"])
def test_modules_ignored_by_an_instance_below(run_ranks, way, how):
    assert_same(run_ranks(ignored_below, way, how, timeout=20))


def ignored_by_a_unit(layout: str) -> list[str]:
    """The same of `fully_shard`: parameters ignored by a unit stay plain and whole when the root is made."""
    problems = []
    for library in LIBRARIES:
        model = layers()
        norm, before = model[0][1], list(model[0][1].parameters())
        given: dict[str, Any] = {"layout": LAYOUTS[layout]} if library is fullshard else {}
        library.fully_shard(model[0], ignored_params=set(before), **given)
        library.fully_shard(model, **given)
        model(batch()).square().mean().backward()
        if not all(a is b and type(a) is nn.Parameter for a, b in zip(norm.parameters(), before, strict=True)):
            problems.append(f"{library.__name__}: {[type(p).__name__ for p in norm.parameters()]}")
        average_gradients(before)
        reference = layers()
        together = torch.cat([torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)])
        reference(together).square().mean().backward()
        got = {name: whole(p.grad) for name, p in model.named_parameters()}
        problems += differences(library.__name__, got, {name: p.grad for name, p in reference.named_parameters()})
    return problems


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_ignored_by_a_unit_below(run_ranks, layout):
    assert_same(run_ranks(ignored_by_a_unit, layout, timeout=20))


def ignored_and_remade(way: str) -> list[str]:
    """What is ignored stays so where its Parameters become other objects: materialised, replaced, deep-copied."""
    problems = []
    for how in ("materialised", "replaced", "copied"):
        inner = layers()
        norm = inner[0][1]
        if way in LAYOUTS:
            inner = inner.to("meta") if how == "materialised" else inner
            model: Any = fullshard.fully_shard(inner, layout=LAYOUTS[way], ignored_params=set(norm.parameters()))
        else:  # materialises by itself
            model = wrap(inner, use_orig_params=way == "originals", ignored_modules=[norm])
        if how == "materialised" and way in LAYOUTS:
            model.to_empty(device="cpu")
            norm.reset_parameters()
        elif how == "replaced":
            norm.weight = nn.Parameter(torch.ones(6))
        elif how == "copied":
            model = copy.deepcopy(model)
            norm = (model if way in LAYOUTS else model.module)[0][1]
        model(batch()).sum().backward()
        if type(norm.weight) is not nn.Parameter or norm.weight.shape != (6,) or norm.weight.grad is None:
            problems.append(f"{how}: {norm.weight}")
    return problems


@pytest.mark.parametrize("way", WAYS)
def test_ignored_parameters_that_become_other_objects(run_ranks, way):
    assert_same(run_ranks(ignored_and_remade, way, timeout=20))


def added_to_ignored(way: str) -> list[str]:
    """Modules that are ignored may gain parameters later, as adapters do."""
    model = layers()
    norm = model[0][1]
    wrapped = wrap(model, use_orig_params=way == "originals", ignored_modules=[norm])
    wrapped(batch())
    norm.adapter = nn.Linear(6, 6)
    wrapped(batch()).sum().backward()
    return [] if norm.weight.grad is not None else ["the ignored module has no gradient"]


@wrappers
def test_parameters_added_to_ignored_modules(run_ranks, way):
    assert_same(run_ranks(added_to_ignored, way, timeout=20))


# Full precision in eval, with a batch norm that mixed precision leaves alone.


def evaluated(way: str) -> list[str]:
    """As PyTorch's with FSDP_USE_FULL_PREC_IN_EVAL=1: exact in eval, and training goes on in bfloat16 after it."""
    problems, outputs = [], {}
    for library in LIBRARIES:
        torch.manual_seed(3)
        inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        more = {"full_precision_in_eval": True} if library is fullshard else {}
        with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
            model = shard_by_policy(library, inner, way, more)
            plain = {name: value.clone() for name, value in inner_state(library, model).items()}
            model.eval()
            out = model(batch())
            trained = model.train()(batch())
            trained.float().sum().backward()
            outputs[library] = (trained.dtype, model.eval()(batch()).dtype)
        reference = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        reference.load_state_dict(plain)
        problems += differences(library.__name__, {"out": out.detach()}, {"out": reference.eval()(batch()).detach()})
    if outputs[fullshard] != outputs[torch_fsdp]:
        problems.append(f"dtypes of outputs (train, eval) {outputs}")
    return problems


def shard_by_policy(library: types.ModuleType, inner: nn.Module, way: str, more: dict[str, Any]) -> Any:
    policy = library.wrap.ModuleWrapPolicy({nn.Linear})
    mixed = library.MixedPrecision(param_dtype=torch.bfloat16)
    given = {"use_orig_params": way == "originals", "mixed_precision": mixed, "auto_wrap_policy": policy}
    return wrap(inner, library, **given, **more)


def inner_state(library: types.ModuleType, model: Any) -> dict[str, Tensor]:
    with library.FullyShardedDataParallel.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict())


@wrappers
def test_full_precision_in_eval_beside_a_batch_norm(run_ranks, way):
    assert_same(run_ranks(evaluated, way, timeout=20))


# Rank 0's values, also of tensor-parallel parameters and buffers.


def synchronised(way: str, parameters: bool, buffers: bool) -> list[str]:
    """Every rank has the values of the first rank of its data-parallel group, in the form that they had."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(10 + mesh["dp"].get_local_rank())
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    model.register_buffer("table", torch.randn(4))
    if parameters:
        for parameter, placement in (
            (model[0].weight, Shard(0)),
            (model[0].bias, Shard(0)),
            (model[1].weight, Shard(1)),
        ):
            owner = model[1] if parameter is model[1].weight else model[0]
            key = "bias" if parameter is model[0].bias else "weight"
            made = distribute_tensor(parameter.detach(), mesh["tp"], [placement], src_data_rank=None)
            setattr(owner, key, nn.Parameter(made))
    if buffers:
        model.table = distribute_tensor(model.table, mesh["tp"], [Shard(0)], src_data_rank=None)
    wrapped = FSDP(model, device_mesh=mesh["dp"], use_orig_params=way == "originals", sync_module_states=True)
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        got = {name: whole(value) for name, value in wrapped.state_dict().items()}
    torch.manual_seed(10)
    first = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    first.register_buffer("table", torch.randn(4))
    problems = differences("", got, dict(first.state_dict()))
    if isinstance(model.table, DTensor) != buffers:
        problems.append(f"the buffer became a {type(model.table).__name__}")
    return problems


@wrappers
@pytest.mark.parametrize(("parameters", "buffers"), [(False, False), (True, False), (False, True), (True, True)])
def test_sync_module_states_of_tensor_parallel_modules(run_ranks, way, parameters, buffers):
    assert_same(run_ranks(synchronised, way, parameters, buffers, world=4, timeout=30))


def split_over_data_ranks() -> list[str]:
    """A buffer of which every rank has another part cannot be rank 0's on all: refused by name, and kept."""
    model = nn.Linear(6, 6)
    mesh = init_device_mesh("cpu", (2,))
    model.register_buffer("table", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None))
    error = error_of(lambda: FSDP(model, device_mesh=mesh, sync_module_states=True))
    problems = named_error(error, "table", kinds=fullshard.ConfigError, where="split")
    return problems + differences("kept", {"": whole(model.table)}, {"": torch.arange(4.0)})


def test_sync_module_states_of_a_tensor_split_over_the_same_ranks(run_ranks):
    assert_same(run_ranks(split_over_data_ranks, timeout=20))


# Padding.


def padded(world: int) -> list[str]:
    """A rank that holds only padding has a gradient of zeros, as PyTorch's: its optimizer steps as others' do."""
    problems = []
    for library in LIBRARIES:
        model = wrap(nn.Linear(1, 1, bias=False), library, use_orig_params=False)
        (parameter,) = model.parameters()
        optimizer = adam([parameter])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 1), 3.0)).sum().backward()
            if parameter.grad is None:
                problems.append(f"{library.__name__}: the gradient is None")
                continue
            want = torch.zeros_like(parameter)
            want[:1] = 6.0 if dist.get_rank() == 0 else 0.0
            problems += differences(library.__name__, {"grad": parameter.grad}, {"grad": want})
            optimizer.step()
        steps = [float(state["step"]) for state in optimizer.state.values()]
        if steps != [2.0]:
            problems.append(f"{library.__name__}: steps {steps}")
        norm = model.clip_grad_norm_(1.0).item()
        if abs(norm - 6.0) > 1e-5:
            problems.append(f"{library.__name__}: norm {norm}")
    return problems


@pytest.mark.parametrize("world", [2, 4])
def test_a_flat_parameter_of_padding_only_has_a_gradient(run_ranks, world):
    assert_same(run_ranks(padded, world, world=world, timeout=20))


# Pinned shards.


def pinned(way: str, kind: str, optimizer_state: bool) -> list[str]:
    """State dicts of shards in pinned memory say so. Pinning takes an accelerator: here all tensors claim it."""
    model = shard(layers(), way, alone, cpu_offload=fullshard.CPUOffload(offload_params=True))
    optimizer = adam(model.parameters())
    model(batch()).sum().backward()
    optimizer.step()
    with (
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, device=None: tensor.device.type == "cpu"),
        FSDP.state_dict_type(model, StateDictType[kind]),
    ):
        state = model.state_dict()
        if optimizer_state:
            state = {n: own["exp_avg"] for n, own in FSDP.optim_state_dict(model, optimizer)["state"].items()}
        found = {name: value.metadata().tensor_properties.pin_memory for name, value in state.items()}
    return [] if found and all(found.values()) else [f"pin_memory {found}"]


@pytest.mark.parametrize(
    ("kind", "optimizer_state"),
    [("LOCAL_STATE_DICT", False), ("SHARDED_STATE_DICT", False), ("SHARDED_STATE_DICT", True)],
)
@wrappers
def test_state_dicts_of_pinned_shards(run_ranks, way, kind, optimizer_state):
    assert_same(run_ranks(pinned, way, kind, optimizer_state, timeout=20))
