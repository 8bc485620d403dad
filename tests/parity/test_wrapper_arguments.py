"""The wrapper's arguments: PyTorch's signatures, devices, and what cannot work."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from wrapped import CPU, mlp, same, train


def device_ids() -> None:
    for device in (None, CPU, torch.device("cpu", 0)):
        model = FSDP(nn.Linear(6, 6), device_id=device)
        assert model.compute_device.type == "cpu"
        train(model, steps=1)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="device_id"):
            FSDP(nn.Linear(6, 6), device_id=0)
    with pytest.raises(ValueError, match="device_id"):
        FSDP(nn.Linear(6, 6), device_id="gpu")


def test_device_ids(run_ranks) -> None:
    run_ranks(device_ids)


# Arguments that cannot work.


def bad_arguments() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    kinds = {name: type(child) for name, child in model.named_modules()}
    mesh = init_device_mesh("cpu", (2,))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"sharding_strategy": "FULL"}, ValueError, "sharding_strategy"),
        ({"process_group": dist.group.WORLD, "device_mesh": mesh}, ValueError, "device_mesh"),
        ({"process_group": (dist.group.WORLD, dist.group.WORLD)}, ValueError, "hybrid"),
        (
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": dist.group.WORLD},
            ValueError,
            "replicates over",
        ),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}, ValueError, "2-D"),
        ({"ignored_modules": [model[0]], "ignored_states": [model[1]]}, ValueError, "ignored_states"),
        ({"ignored_states": [model[0], model[1][0].weight]}, ValueError, "not both"),
        ({"ignored_modules": [3]}, ValueError, "ignored"),
        ({"ignored_modules": 3}, TypeError, "ignored"),
        ({"mixed_precision": torch.bfloat16}, ValueError, "mixed_precision"),
        ({"backward_prefetch": "pre"}, ValueError, "backward_prefetch"),
        ({"cpu_offload": True}, ValueError, "cpu_offload"),
        ({"auto_wrap_policy": 3}, TypeError, "auto_wrap_policy"),
        ({"param_init_fn": 3}, ValueError, "param_init_fn"),
        ({"param_init_fn": 3, "auto_wrap_policy": {nn.Linear}}, ValueError, "param_init_fn"),
        ({"device_id": "gpu"}, ValueError, "device_id"),
        ({"process_group": 3}, ValueError, "process_group"),
        ({"device_mesh": 3}, ValueError, "mesh"),
        ({"comm": "fast"}, ValueError, "comm"),
    ]
    for arguments, kind, said in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(kind, match=said) as caught:
                FSDP(model, **arguments)
        assert isinstance(caught.value, fullshard.FullshardError), arguments
        assert {name: type(child) for name, child in model.named_modules()} == kinds, arguments
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), arguments
        same(dict(model.state_dict()), before)
    with pytest.raises(ValueError, match="takes an nn"):
        FSDP(3)
    mixed = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).double())
    with pytest.raises(ValueError, match=r"uniform dtype.*(?s:.*)use_orig_params"):
        FSDP(mixed)
    frozen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False))
    with pytest.raises(ValueError, match=r"uniform.*requires_grad.*(?s:.*)use_orig_params"):
        FSDP(frozen)
    assert type(mixed[0]) is nn.Linear and mixed[0].weight.shape == (6, 6)
    twice = FSDP(mlp())
    with pytest.raises(ValueError, match="already"):
        FSDP(twice, auto_wrap_policy={nn.Linear})
    partly = mlp()
    partly[0] = FSDP(partly[0])
    with pytest.raises(ValueError, match="already"):
        FSDP(partly, auto_wrap_policy={nn.Linear})
    assert type(partly[1][0]) is nn.Linear
    FSDP(mixed, use_orig_params=True), FSDP(frozen, use_orig_params=True)


def test_bad_arguments_have_one_clear_error_and_change_nothing(run_ranks) -> None:
    run_ranks(bad_arguments)


def test_signatures_are_pytorchs() -> None:
    theirs = torch_fsdp.FullyShardedDataParallel
    checked = 0
    for name in dir(theirs):
        if name != "__init__" and (name.startswith("_") or (hasattr(nn.Module, name) and name not in vars(theirs))):
            continue
        expected = getattr(theirs, name)
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
