"""What libraries read and set on instances of PyTorch's FSDP1, which is private there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from drop_in import WRAPPERS, batch, layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, MixedPrecision, StateDictType
from ways import on_ranks, wrap


def cast_up(model: nn.Module) -> list[str]:
    """As Accelerate does with weights in 16 bits and mixed precision; the names."""
    names: list[str] = []
    for module in FullyShardedDataParallel.fsdp_modules(model):
        instance: Any = module
        if not instance._has_params:
            continue
        flat = instance._flat_param
        if flat.dtype != torch.float32 and flat.device != torch.device("meta") and flat.requires_grad:
            names += flat._fqns
            flat.data = flat.data.to(torch.float32)
            instance._handle._orig_param_dtype = torch.float32
    return names


class Rounded(nn.Module):
    """Computes as mixed precision does: weights and inputs in bfloat16, gradients back in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        rounded = {name: p.to(torch.bfloat16) for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, rounded, (x.to(torch.bfloat16),))


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("originals", WRAPPERS)
@on_ranks
def test_weights_in_16_bits_are_cast_up(originals: bool, trained_before: bool) -> None:
    """Parameters and optimizer state are float32 then, computation is in bfloat16."""
    parts, reference = layers().to(torch.bfloat16), layers().to(torch.bfloat16).float()
    parts[1] = wrap(nn.GELU(), use_orig_params=originals)
    parts[2] = wrap(parts[2], use_orig_params=originals, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    mixed = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    model: Any = wrap(parts, use_orig_params=originals, mixed_precision=mixed)
    assert not parts[1]._has_params and parts[1]._handle is None and parts[1]._flat_param is None
    parameters = list(model.parameters())
    if trained_before:
        model(batch(0, 0)).float().sum().backward()
    assert cast_up(model) == (["0.weight", "0.bias", "weight", "bias"])
    assert cast_up(model) == [] and model._handle._orig_param_dtype is torch.float32
    model.zero_grad()
    assert all(mine is other for mine, other in zip(parameters, model.parameters(), strict=True))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    rounded = Rounded(reference)
    for step in range(3):
        model(batch(step, dist.get_rank())).float().square().mean().backward()
        for rank in range(dist.get_world_size()):
            (rounded(batch(step, rank)).float().square().mean() / dist.get_world_size()).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert all(ours.state[p]["exp_avg"].dtype is torch.float32 for p in model.parameters() if p in ours.state)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found = [model.module[0].weight, model.module[0].bias, parts[2].module.weight, parts[2].module.bias]
        for mine, other in zip(found, reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@on_ranks
def test_what_does_not_train_is_left_alone() -> None:
    """Frozen weights in 16 bits, with which Accelerate leaves an instance alone; and integers."""
    parts = layers().to(torch.bfloat16)
    parts[0].requires_grad_(False)
    parts[2].register_parameter("steps", nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False))
    model: Any = wrap(parts, use_orig_params=True)
    model._handle._orig_param_dtype = torch.float32
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["_fsdp_wrapped_module.2.steps"] is torch.int32
    inner: Any = wrap(layers().to(torch.bfloat16).requires_grad_(False), use_orig_params=False)
    inner._handle._orig_param_dtype = torch.float32
    assert cast_up(inner) == [] and inner._flat_param.dtype is torch.bfloat16


@pytest.mark.parametrize("originals", WRAPPERS)
@on_ranks
def test_what_an_instance_says_of_itself(originals: bool) -> None:
    parts = layers()
    parts[0] = wrap(parts[0], use_orig_params=originals)
    model: Any = wrap(parts, use_orig_params=originals)
    inner: Any = parts[0]
    for module in (parts, parts[2], inner.module):
        assert module._is_fsdp_managed_module and module._fsdp_use_orig_params is originals
    assert model._is_root is None and model._use_orig_params is originals and model._device_mesh is None
    states = []
    inner.module.register_forward_pre_hook(lambda *_: states.append(model.training_state.name))
    model(batch(0, 0))
    with FullyShardedDataParallel.summon_full_params(inner):
        states += [inner.training_state.name, model.training_state.name]
    assert states == ["FORWARD_BACKWARD", "SUMMON_FULL_PARAMS", "IDLE"]
    assert model._is_root is True and inner._is_root is False
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert inner._state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert model._state_dict_type is StateDictType.FULL_STATE_DICT
    mesh = init_device_mesh("cpu", (2,))
    assert wrap(layers(), use_orig_params=originals, device_mesh=mesh)._device_mesh == mesh


@on_ranks
def test_flat_parameters_are_told() -> None:
    """Also original parameters, trained and summoned: as PyTorch's."""
    found = []
    for library in (None, torch_fsdp):
        for originals in (False, True):
            parts = layers()
            model: Any = wrap(parts, *([] if library is None else [library]), use_orig_params=originals)
            marks = [marks_of(model)]
            model(batch(0, 0)).sum().backward()
            marks.append(marks_of(model))
            with type(model).summon_full_params(model):
                marks += [marks_of(model)] if originals else []
            found.append(marks)
    assert found[:2] == found[2:] and all(all(one) for marks in found for one in marks)


def marks_of(model: nn.Module) -> list[bool]:
    return [getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters()]


def test_a_handle_says_what_each_rank_holds(run_ranks):
    """By PyTorch's names; ranks' parts of each parameter are all of it, once."""
    held = run_ranks(metadata)
    names = {name for ours, _ in held for name in ours.param_names}
    assert names == {"weight", "bias"}
    for name, numel in (("weight", 15), ("bias", 3)):
        covered = []
        for ours, theirs in held:
            assert list(ours.__dataclass_fields__) == list(theirs)
            if name in ours.param_names:
                at = ours.param_names.index(name)
                assert ours.param_numels[at] == numel and ours.param_contiguities[at]
                first, last = ours.param_offsets[at]
                covered.append(last - first + 1)
        assert sum(covered) == numel


def metadata() -> tuple[Any, tuple[str, ...]]:
    ours: Any = wrap(nn.Linear(5, 3), use_orig_params=False)
    theirs: Any = wrap(nn.Linear(5, 3), torch_fsdp, use_orig_params=False)
    found = theirs._handle.shard_metadata()
    return ours._handle.shard_metadata(), getattr(found, "_fields", None) or tuple(found.__dataclass_fields__)
