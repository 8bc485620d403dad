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
from ways import (
    WRAPPERS,
    adam,
    alone,
    children,
    differences,
    error_of,
    named_error,
    on_ranks,
    one_process,
    shard,
    train,
    whole,
    whole_state,
)

orders = pytest.mark.parametrize("order", ["reversed", "groups"])
WHOLE = [state_dict.StateDictOptions(full_state_dict=full) for full in (False, True)]
FROM_RANK_0 = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def optimizer_of(model: nn.Module, order: str, turns: bool = True) -> torch.optim.Optimizer:
    """Of all parameters; rank 1's lists them the other way round, in one group or ("groups") in two."""
    parameters = list(model.parameters())
    halves = [parameters[1:], parameters[:1]] if order == "groups" else [parameters]
    return adam([{"params": half[::-1] if turns and dist.get_rank() == 1 else half} for half in halves if half])


def four_layers() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """`{"NAME KEY": whole value}`, gathered in an order that is the same on all ranks."""
    return {f"{n} {k}": whole(v) for n, own in sorted(state["state"].items()) for k, v in sorted(own.items())}


@pytest.mark.parametrize("units", [alone, children])
@orders
@pytest.mark.parametrize("way", ["rows", "wrapper", "originals"])
@on_ranks
def test_state_is_collected_in_the_models_order(way: str, order: str, units: Any) -> list[str]:
    model = shard(four_layers(), way, units)
    optimizer = optimizer_of(model, order)
    train(model, optimizer, range(2))
    saved = [state_dict.get_optimizer_state_dict(model, optimizer, options=options) for options in WHOLE]
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT") if way in WRAPPERS else ():
        with FSDP.state_dict_type(model, StateDictType[kind]):
            saved.append(FSDP.optim_state_dict(model, optimizer))
    if way in WRAPPERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved.append(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False))
            saved.append(FSDP.sharded_optim_state_dict(model, optimizer))
    problems = []
    reference, other = one_process(2, four_layers)
    want = {f"{n} {k}": v for n, p in reference.named_parameters() for k, v in other.state[p].items()}
    for number, state in enumerate(saved):
        problems += differences(f"state dict {number}", flattened(state), want)
        names = sorted(n for group in state["param_groups"] for n in group["params"])
        assert names == sorted(n for n, _ in reference.named_parameters())
    return problems


@orders
@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_state_is_loaded_in_the_models_order(way: str, order: str) -> list[str]:
    """State from optimizers in one order into optimizers in two; training goes on as one process does."""
    reference, _ = one_process(3, four_layers)
    problems = []
    for options in WHOLE:  # each with a source of its own: state dicts share memory with their optimizer
        source, model = shard(four_layers(), way), shard(four_layers(), way)
        optimizer, loaded = optimizer_of(source, order, turns=False), optimizer_of(model, order)
        train(source, optimizer, range(2))
        saved = state_dict.get_state_dict(source, optimizer, options=options)
        if options.full_state_dict:  # and sent by rank 0, whose order is another one
            options, saved = FROM_RANK_0, saved if dist.get_rank() == 0 else ({}, {})
        state_dict.set_state_dict(model, loaded, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
        train(model, loaded, range(2, 3))
        problems += differences(f"{options.full_state_dict}", whole_state(model), whole_state(reference))
    return problems


@pytest.mark.parametrize("way", ["flat", "originals"])
@pytest.mark.parametrize("how", ["a parameter less", "other groups", "groups in another order"])
@on_ranks
def test_ranks_whose_optimizers_hold_other_parameters_are_told_so(way: str, how: str) -> list[str]:
    """Every function that collects names a parameter that is not in the same group, on all ranks."""
    model = shard(four_layers(), way)
    good = adam(model.parameters())
    train(model, good, range(1))
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "lr": 0.2}]
    if dist.get_rank() == 1 and how == "groups in another order":
        groups.reverse()
    elif dist.get_rank() == 1:
        moved = [first] if how == "a parameter less" else [first, rest[-1]]
        groups = [{"params": moved}, {"params": rest[:-1], "lr": 0.2}]
    bad = adam(groups)
    train(model, bad, range(1))
    name = "6.weight" if how != "groups in another order" else "0.weight"
    error = error_of(lambda: state_dict.get_optimizer_state_dict(model, bad, options=WHOLE[True]))
    problems = named_error(error, name, kinds=fullshard.DivergenceError, where="get")
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT") if way in WRAPPERS else ():
        with FSDP.state_dict_type(model, StateDictType[kind]):
            saved = FSDP.optim_state_dict(model, good)
            errors = [error_of(lambda: FSDP.optim_state_dict(model, bad))]
            errors.append(error_of(lambda saved=saved: FSDP.optim_state_dict_to_load(model, bad, saved)))
        for error in errors:
            problems += named_error(error, name, kinds=fullshard.DivergenceError, where=kind)
    return problems
