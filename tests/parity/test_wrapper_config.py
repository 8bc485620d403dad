"""Settings of the wrapper front-end against PyTorch's: members, signatures, defaults, translation, checks."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.api as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.api.wrapper.configs import accept
from wrapped import mlp

ENUMS = ["ShardingStrategy", "BackwardPrefetch", "StateDictType"]
CONFIGS = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
]


def their(name: str) -> type:
    import torch.distributed.fsdp as package

    return getattr(theirs, name, None) or getattr(package, name)


@pytest.mark.parametrize("name", [*ENUMS, "OptimStateKeyType"])
def test_enumerations_have_pytorchs_members_and_translate(name: str) -> None:
    ours = getattr(fullshard, name)
    assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in their(name)]
    for member in their(name):
        assert accept(member, ours, "x") is ours[member.name]
    for member in ours:
        assert accept(member, ours, "x") is member


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_have_pytorchs_fields_and_defaults(name: str) -> None:
    ours, other = getattr(fullshard, name), their(name)
    mine, expected = inspect.signature(ours).parameters, inspect.signature(other).parameters
    assert list(mine) == list(expected)
    assert [p.default for p in mine.values()] == [p.default for p in expected.values()]
    assert [b.__name__ for b in other.__mro__[1:-1]] == [b.__name__ for b in ours.__mro__[1:-2]]
    for field in fields(ours):
        assert f"{field.name}:" in ours.__doc__


@pytest.mark.parametrize("name", CONFIGS)
def test_pytorchs_instances_are_taken_for_ours(name: str) -> None:
    ours = getattr(fullshard, name)
    flipped = {f.name: not f.default for f in fields(ours) if isinstance(f.default, bool)}
    given = their(name)(**flipped)
    got = accept(given, ours, "x")
    assert type(got) is ours
    assert {f.name: getattr(got, f.name) for f in fields(ours)} == {
        f.name: getattr(given, f.name) for f in fields(ours)
    }


def test_a_subclass_is_taken_for_its_base_and_settings_hold_all_three() -> None:
    got = accept(theirs.FullStateDictConfig(rank0_only=True), fullshard.StateDictConfig, "x")
    assert got == fullshard.FullStateDictConfig(rank0_only=True)
    settings = accept(
        theirs.StateDictSettings(
            theirs.StateDictType.SHARDED_STATE_DICT,
            theirs.ShardedStateDictConfig(offload_to_cpu=True),
            theirs.ShardedOptimStateDictConfig(),
        ),
        fullshard.StateDictSettings,
        "x",
    )
    assert settings == fullshard.StateDictSettings(
        fullshard.StateDictType.SHARDED_STATE_DICT,
        fullshard.ShardedStateDictConfig(offload_to_cpu=True),
        fullshard.ShardedOptimStateDictConfig(),
    )


def test_fields_can_be_assigned_to_and_are_checked_then_too() -> None:
    precision = fullshard.MixedPrecision(torch.bfloat16)
    precision.reduce_dtype = torch.float32
    with pytest.raises(fullshard.ConfigError, match="reduce_dtype"):
        precision.reduce_dtype = torch.int32
    assert precision == fullshard.MixedPrecision(torch.bfloat16, torch.float32)
    assert copy.deepcopy(precision) == precision
    with pytest.raises(fullshard.ConfigError, match="no field 'parm_dtype'"):
        precision.parm_dtype = torch.float16


def test_signatures_are_pytorchs() -> None:
    wrapper = torch_fsdp.FullyShardedDataParallel
    checked = 0
    for name in dir(wrapper):
        if name != "__init__" and (name.startswith("_") or (hasattr(nn.Module, name) and name not in vars(wrapper))):
            continue
        expected = getattr(wrapper, name)
        ours = getattr(FSDP, name)
        if not callable(expected):
            continue
        mine, other = inspect.signature(ours).parameters, inspect.signature(expected).parameters
        assert list(mine)[: len(other)] == list(other), name
        assert [p.kind for p in mine.values()][: len(other)] == [p.kind for p in other.values()], name
        for key, value in other.items():
            given = mine[key].default
            assert given == value.default or getattr(given, "name", 0) == getattr(value.default, "name", 1), (name, key)
        assert all(p.kind is p.KEYWORD_ONLY for p in list(mine.values())[len(other) :]), name
        checked += 1
    assert checked > 15


REFUSED = {
    "process_group": {"process_group": 3},
    "param_init_fn": {"param_init_fn": 3, "auto_wrap_policy": {nn.Linear}},
    "2-D": {"sharding_strategy": fullshard.ShardingStrategy.HYBRID_SHARD, "device_mesh": "mesh"},
    "not both": {"ignored_states": "mixed"},
    "already": {"auto_wrap_policy": {nn.Linear}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_arguments_that_are_refused_change_nothing(fake_world, said: str) -> None:
    fake_world(2)
    model = mlp()
    given: dict[str, Any] = dict(REFUSED[said])
    if said == "2-D":
        given["device_mesh"] = init_device_mesh("cpu", (2,))
    elif said == "not both":
        given["ignored_states"] = [model[0], model[1][0].weight]
    elif said == "already":
        model[1] = FSDP(model[1])
    kinds, parameters = [type(module) for module in model.modules()], list(model.parameters())
    with pytest.raises(fullshard.ConfigError, match=said):
        FSDP(model, **given)
    assert [type(module) for module in model.modules()] == kinds
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
