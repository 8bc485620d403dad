"""What the wrapper is told to leave alone, and what it takes as it is: ignored modules, DTensors, batch norms."""

from __future__ import annotations

import copy
import os
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
from fullshard.wrap import CustomPolicy
from ways import (
    WRAPPERS,
    adam,
    alone,
    differences,
    error_of,
    every_wrapper,
    named_error,
    on_ranks,
    shard,
    whole,
    wide_batch,
    wrap,
)

LIBRARIES = (torch_fsdp, fullshard)  # PyTorch's first: it says what is right


def mine() -> Tensor:
    return wide_batch(0, dist.get_rank())


def full_state(library: Any, model: Any) -> dict[str, Tensor]:
    with library.FullyShardedDataParallel.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict())


class Scaled(nn.Module):
    """A layer and a batch norm that is to be ignored, each with a buffer that bfloat16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ignored = nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6))
        self.ignored.register_buffer("scale", torch.tensor([4097.0]))
        self.register_buffer("scale", torch.tensor([4097.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.ignored(self.layer(x).float()) * self.ignored.scale


@every_wrapper
@on_ranks
def test_buffers_of_ignored_modules_stay(way: str) -> None:
    """They keep dtype and value, in training and in the state dict; those of the instance itself are cast."""
    for library in LIBRARIES:
        inner, low = Scaled(), torch.bfloat16
        given = {"use_orig_params": WRAPPERS[way], "mixed_precision": library.MixedPrecision(low, buffer_dtype=low)}
        model = wrap(inner, library, ignored_modules=[inner.ignored], **given)
        model = wrap(nn.Sequential(model), library, **given)
        model(mine()).float().sum().backward()
        assert (inner.ignored.scale.dtype, inner.ignored.scale.item()) == (torch.float32, 4097.0), library
        assert (inner.scale.dtype, inner.scale.item()) == (torch.bfloat16, 4096.0), library
        assert {b.dtype for b in inner.ignored[0].buffers() if b.is_floating_point()} == {torch.float32}, library
        assert {p.grad.dtype for p in inner.ignored.parameters()} == {torch.float32}, library
        assert full_state(library, model)["0.ignored.scale"].item() == 4097.0, library


# Ignored by an instance below.


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)), nn.Linear(6, 6))


@pytest.mark.parametrize(("way", "how"), [("wrapper", "states"), ("originals", "modules"), ("rows", "params")])
@on_ranks
def test_what_a_unit_below_ignores(way: str, how: str) -> list[str]:
    """Is ignored by those around it: whole, alive, trained beside the shards."""
    problems = []
    for library in LIBRARIES:
        model, reference = layers(), layers()
        norm, before = model[0][1], list(model[0][1].parameters())
        if way == "rows":
            library.fully_shard(model[0], ignored_params=set(before))
            wrapped = library.fully_shard(model)
        else:
            given = {"ignored_modules": [norm]} if how == "modules" else {"ignored_states": before}
            model[0] = wrap(model[0], library, use_orig_params=WRAPPERS[way], **given)
            wrapped = wrap(model, library, use_orig_params=WRAPPERS[way])
        optimizer, other = adam(wrapped.parameters()), adam(reference.parameters())
        for _ in range(2):
            wrapped(mine()).square().mean().backward()
            for parameter in before:  # what a program does itself with what nothing manages
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            reference(wide_batch(0)).square().mean().backward()
            for each in (optimizer, other):
                each.step(), each.zero_grad()
        assert all(a is b and a.shape == (6,) for a, b in zip(norm.parameters(), before, strict=True))
        assert all(type(parameter) is nn.Parameter for parameter in before)
        assert {id(p) for p in before} <= {id(p) for p in wrapped.parameters()}
        state = (
            {n: whole(v) for n, v in wrapped.state_dict().items()} if way == "rows" else full_state(library, wrapped)
        )
        problems += differences(library.__name__, state, dict(reference.state_dict()))
    return problems


@pytest.mark.parametrize("way", ["rows", "wrapper", "originals"])
@pytest.mark.parametrize("how", ["materialised", "replaced", "copied"])
@on_ranks
def test_ignored_parameters_that_become_other_objects(way: str, how: str) -> None:
    """What is ignored stays so."""
    inner = layers()
    norm = inner[0][1]
    if way == "rows":
        inner = inner.to("meta") if how == "materialised" else inner
        model: Any = fullshard.fully_shard(inner, ignored_params=set(norm.parameters()))
    else:  # materialises by itself
        model = wrap(inner, use_orig_params=WRAPPERS[way], ignored_modules=[norm])
    if how == "materialised" and way == "rows":
        model.to_empty(device="cpu")
        norm.reset_parameters()
    elif how == "replaced":
        norm.weight = nn.Parameter(torch.ones(6))
    elif how == "copied":
        model = copy.deepcopy(model)
        norm = (model if way == "rows" else model.module)[0][1]
    model(mine()).sum().backward()
    assert type(norm.weight) is nn.Parameter and norm.weight.shape == (6,) and norm.weight.grad is not None


@on_ranks
def test_full_precision_in_eval_beside_a_batch_norm() -> list[str]:
    """As PyTorch's with FSDP_USE_FULL_PREC_IN_EVAL=1: exact in eval, and training goes on in bfloat16 after it."""
    problems, outputs = [], {}
    for library in LIBRARIES:
        inner, reference = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)) for _ in range(2))
        given: dict[str, Any] = {"full_precision_in_eval": True} if library is fullshard else {}
        given["auto_wrap_policy"] = library.wrap.ModuleWrapPolicy({nn.Linear})
        with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
            model = wrap(inner, library, mixed_precision=library.MixedPrecision(torch.bfloat16), **given)
            reference.load_state_dict(full_state(library, model))
            out = model.eval()(mine())
            trained = model.train()(mine())
            trained.float().sum().backward()
            outputs[library] = (trained.dtype, model.eval()(mine()).dtype)
        want = reference.eval()(mine()).detach()
        problems += differences(library.__name__, {"out": out.detach()}, {"out": want})
    assert outputs[fullshard] == outputs[torch_fsdp], outputs
    return problems


# Rank 0's values, also of tensor-parallel parameters and buffers.


@pytest.mark.parametrize(("way", "buffers"), [("wrapper", True), ("originals", False)])
@on_ranks(world=4)
def test_sync_module_states_of_tensor_parallel_modules(way: str, buffers: bool) -> list[str]:
    """Every rank has the values of the first rank of its data-parallel group, in the form that they had."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
        made.register_buffer("table", torch.randn(4))
        return made

    model = make(10 + mesh["dp"].get_local_rank())
    for layer, key, dim in ((model[0], "weight", 0), (model[0], "bias", 0), (model[1], "weight", 1)):
        value = getattr(layer, key).detach()
        setattr(layer, key, nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(dim)], src_data_rank=None)))
    if buffers:
        model.table = distribute_tensor(model.table, mesh["tp"], [Shard(0)], src_data_rank=None)
    wrapped = FSDP(model, device_mesh=mesh["dp"], use_orig_params=WRAPPERS[way], sync_module_states=True)
    got = {name: whole(value) for name, value in full_state(fullshard, wrapped).items()}
    assert isinstance(model.table, DTensor) == buffers
    return differences("", got, dict(make(10).state_dict()))


@on_ranks
def test_sync_module_states_of_a_tensor_split_over_the_same_ranks() -> list[str]:
    """A buffer of which every rank has another part cannot be rank 0's on all: refused by name, and kept."""
    model = nn.Linear(6, 6)
    mesh = init_device_mesh("cpu", (2,))
    model.register_buffer("table", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None))
    error = error_of(lambda: FSDP(model, device_mesh=mesh, sync_module_states=True))
    problems = named_error(error, "table", kinds=fullshard.ConfigError, where="split")
    return problems + differences("kept", {"": whole(model.table)}, {"": torch.arange(4.0)})


@on_ranks
def test_a_flat_parameter_of_padding_only_has_a_gradient() -> list[str]:
    """A rank that holds only padding has a gradient of zeros, as PyTorch's: its optimizer steps as others' do."""
    problems = []
    for library in LIBRARIES:
        model = wrap(nn.Linear(1, 1, bias=False), library, use_orig_params=False)
        (parameter,) = model.parameters()
        optimizer = adam([parameter])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 1), 3.0)).sum().backward()
            want = torch.zeros_like(parameter)
            want[:1] = 6.0 if dist.get_rank() == 0 else 0.0
            problems += differences(library.__name__, {"grad": parameter.grad}, {"grad": want})
            optimizer.step()
        assert [float(state["step"]) for state in optimizer.state.values()] == [2.0], library
        assert model.clip_grad_norm_(1.0).item() == pytest.approx(6.0), library
    return problems


@every_wrapper
@on_ranks
def test_state_dicts_of_pinned_shards(way: str) -> None:
    """They say that memory is pinned. Pinning takes an accelerator: here all tensors claim it."""
    model = shard(layers(), way, alone, cpu_offload=fullshard.CPUOffload(offload_params=True))
    optimizer = adam(model.parameters())
    model(mine()).sum().backward()
    optimizer.step()
    with mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, device=None: tensor.device.type == "cpu"):
        for kind in ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT"):
            with FSDP.state_dict_type(model, StateDictType[kind]):
                states = [model.state_dict()]
                if kind == "SHARDED_STATE_DICT":
                    state = FSDP.optim_state_dict(model, optimizer)["state"]
                    states.append({name: own["exp_avg"] for name, own in state.items()})
            for each in states:
                assert each and all(value.metadata().tensor_properties.pin_memory for value in each.values()), kind


@pytest.mark.parametrize("argument", ("ignored_states", "ignored_modules"))
def test_an_iterator_of_what_to_ignore_is_read_once(fake_world, argument: str) -> None:
    """The instances that a policy makes ignore the same as the root."""
    fake_world(2)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    ignored = model[0][0]
    items = ignored.parameters() if argument == "ignored_states" else (module for module in [ignored])
    FSDP(model, auto_wrap_policy={nn.Sequential}, use_orig_params=True, device_id="cpu", **{argument: items})
    assert [tuple(parameter.shape) for parameter in ignored.parameters()] == [(4, 4), (4,)]


def test_an_iterator_that_a_policy_returns_for_a_block(fake_world) -> None:
    fake_world(2)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    block, ignored = model[0], model[0][0]
    policy = CustomPolicy(lambda module: {"ignored_states": ignored.parameters()} if module is block else False)
    FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id="cpu", ignored_states=[*ignored.parameters()])
    assert [tuple(parameter.shape) for parameter in ignored.parameters()] == [(4, 4), (4,)]
