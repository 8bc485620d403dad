"""Optimizer state where ranks' optimizers do not list the same parameters in the same order and groups."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import StateDictType, state_dict
from training import assert_same
from ways import (
    WAYS,
    WRAPPERS,
    adam,
    alone,
    children,
    differences,
    error_of,
    named_error,
    one_process,
    shard,
    train,
    whole,
    whole_state,
)

ORDERS = ("same", "reversed", "groups")
MEMBERS = ("a parameter less", "other groups", "groups in another order")


def optimizer_of(model: nn.Module, order: str) -> torch.optim.Optimizer:
    """Of all parameters; rank 1's lists them the other way round, in one group or ("groups") in two."""
    turned = dist.get_rank() == 1 and order != "same"
    return adam([{"params": half[::-1] if turned else half} for half in groups_of(model, order)])


def groups_of(model: nn.Module, order: str) -> list[list[nn.Parameter]]:
    parameters = list(model.parameters())
    halves = [parameters[1:], parameters[:1]] if order == "groups" else [parameters]
    return [half for half in halves if half]


def four_layers() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {f"{n} {k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """`{"NAME KEY": whole value}`, gathered in an order that is the same on all ranks."""
    return {f"{n} {k}": whole(v) for n, own in sorted(state["state"].items()) for k, v in sorted(own.items())}


def wrapper_saves(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    saved = {}
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        with FSDP.state_dict_type(model, StateDictType[kind]):
            saved[kind] = FSDP.optim_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved["legacy full"] = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        saved["legacy sharded"] = FSDP.sharded_optim_state_dict(model, optimizer)
    return saved


def saves(way: str, order: str, units: bool) -> list[str]:
    model = shard(four_layers(), way, children if units else alone)
    optimizer = optimizer_of(model, order)
    train(model, optimizer, range(2))
    reference, other = one_process(2, four_layers)
    saved = wrapper_saves(model, optimizer) if way in WRAPPERS else {}
    for full in (False, True):
        options = state_dict.StateDictOptions(full_state_dict=full)
        saved[f"full={full}"] = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    problems = []
    for name, state in saved.items():
        problems += differences(name, flattened(state), by_name(reference, other))
        names = sorted(n for group in state["param_groups"] for n in group["params"])
        if names != sorted(n for n, _ in reference.named_parameters()):
            problems.append(f"{name}: groups of {names}")
    return problems


@pytest.mark.parametrize("units", [False, True], ids=["one_unit", "units"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_state_is_collected_in_the_models_order(run_ranks, way, order, units):
    assert_same(run_ranks(saves, way, order, units, timeout=20))


def loads(way: str, order: str, units: bool) -> list[str]:
    """State from optimizers in one order into optimizers in two; training goes on as one process does."""
    reference, _ = one_process(3, four_layers)
    problems = []
    for full in (False, True):  # each with a source of its own: state dicts share memory with their optimizer
        source = shard(four_layers(), way, children if units else alone)
        optimizer = adam([{"params": half} for half in groups_of(source, order)])
        train(source, optimizer, range(2))
        options = state_dict.StateDictOptions(full_state_dict=full)
        saved = state_dict.get_state_dict(source, optimizer, options=options)
        model = shard(four_layers(), way, children if units else alone)
        loaded = optimizer_of(model, order)
        state_dict.set_state_dict(model, loaded, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
        train(model, loaded, range(2, 3))
        problems += differences(f"full={full}", whole_state(model), whole_state(reference))
    return problems


@pytest.mark.parametrize("units", [False, True], ids=["one_unit", "units"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_state_is_loaded_in_the_models_order(run_ranks, way, order, units):
    assert_same(run_ranks(loads, way, order, units, timeout=20))


def other_members(model: nn.Module, how: str) -> torch.optim.Optimizer:
    """Of the same parameters on rank 0; on rank 1 not the same ones, or not in the same groups."""
    first, *rest = model.parameters()
    if dist.get_rank() == 0:
        return adam([{"params": [first]}, {"params": rest, "lr": 0.2}])
    if how == "a parameter less":
        return adam([{"params": [first]}, {"params": rest[:-1], "lr": 0.2}])
    if how == "groups in another order":
        return adam([{"params": rest, "lr": 0.2}, {"params": [first]}])
    return adam([{"params": [first, rest[-1]]}, {"params": rest[:-1], "lr": 0.2}])


def refuses(way: str) -> list[str]:
    return [f"{how}: {problem}" for how in MEMBERS for problem in refuses_members(way, how)]


def refuses_members(way: str, how: str) -> list[str]:
    """Every function that collects names a parameter that is not in the same group, on all ranks."""
    model = shard(four_layers(), way)
    good = adam(model.parameters())
    train(model, good, range(1))
    bad = other_members(model, how)
    train(model, bad, range(1))
    named = "6.weight" if how != "groups in another order" else "0.weight"
    full = state_dict.StateDictOptions(full_state_dict=True)
    calls = {"get_optimizer_state_dict": lambda: state_dict.get_optimizer_state_dict(model, bad, options=full)}
    kinds = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT] if way in WRAPPERS else []
    for kind in kinds:
        with FSDP.state_dict_type(model, kind):
            saved = FSDP.optim_state_dict(model, good)

        def save(kind: StateDictType = kind) -> None:
            with FSDP.state_dict_type(model, kind):
                FSDP.optim_state_dict(model, bad)

        def load(kind: StateDictType = kind, saved: dict[str, Any] = saved) -> None:
            with FSDP.state_dict_type(model, kind):
                FSDP.optim_state_dict_to_load(model, bad, saved)

        calls |= {f"save {kind.name}": save, f"load {kind.name}": load}
    problems = []
    for name, call in calls.items():
        problems += named_error(error_of(call), named, kinds=fullshard.DivergenceError, where=name)
    return problems


@pytest.mark.parametrize("way", WAYS)
def test_ranks_whose_optimizers_hold_other_parameters_are_told_so(run_ranks, way):
    assert_same(run_ranks(refuses, way, timeout=20))
