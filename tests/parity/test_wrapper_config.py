"""Settings of the wrapper front-end against PyTorch's: members, signatures, defaults, translation, checks."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from enum import Enum

import pytest
import torch
import torch.distributed.fsdp.api as theirs
from torch import nn

import fullshard
from fullshard.api.wrapper.settings import accept

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


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: fullshard.MixedPrecision(param_dtype=torch.int8), "param_dtype"),
        (lambda: fullshard.MixedPrecision(buffer_dtype="bf16"), "buffer_dtype"),
        (lambda: fullshard.MixedPrecision(cast_forward_inputs=1), "cast_forward_inputs"),
        (lambda: fullshard.MixedPrecision(_module_classes_to_ignore=[nn.Linear(1, 1)]), "_module_classes_to_ignore"),
        (lambda: fullshard.CPUOffload("yes"), "offload_params"),
        (lambda: fullshard.FullStateDictConfig(rank0_only=0), "rank0_only"),
        (lambda: fullshard.FullOptimStateDictConfig(offload_to_cpu=None), "offload_to_cpu"),
    ],
)
def test_values_that_do_not_fit_are_refused(make, field: str) -> None:
    with pytest.raises(fullshard.ConfigError, match=rf"\.{field} does not fit"):
        make()


def test_what_is_neither_ours_nor_pytorchs_is_refused() -> None:
    class ShardingStrategy(Enum):
        SOME_SHARD = 1

    for value, kind in [
        ("FULL_SHARD", fullshard.ShardingStrategy),
        (ShardingStrategy.SOME_SHARD, fullshard.ShardingStrategy),
        (True, fullshard.CPUOffload),
        (fullshard.FullStateDictConfig(), fullshard.OptimStateDictConfig),
        (fullshard.FullStateDictConfig, fullshard.StateDictConfig),
    ]:
        with pytest.raises(fullshard.ConfigError, match="argument_name"):
            accept(value, kind, "argument_name")
