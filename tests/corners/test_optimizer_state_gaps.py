"""Optimizer state dicts that lack something, count steps wrongly, or go to optimizers with named parameters."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.optim import _NamedOptimizer

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, StateDictType, state_dict
from fullshard.state_dict import StateDictOptions
from ways import (
    WRAPPERS,
    adam,
    alone,
    children,
    differences,
    error_of,
    every_wrapper,
    inner,
    named_error,
    on_ranks,
    one_process,
    shard,
    train,
    two_layers,
    whole,
    whole_state,
)

three_ways = pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
FULL = StateDictOptions(full_state_dict=True)
NAMES = ["0.weight", "2.weight"]


def trained(way: str, steps: int = 2, library: Any = fullshard, **units: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(two_layers(), way, library=library, **units)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(steps))
    return model, optimizer


def saved_by(model: Any, optimizer: Any, kind: str = "FULL_STATE_DICT") -> Any:
    with FSDP.state_dict_type(model, StateDictType[kind]):
        return FSDP.optim_state_dict(model, optimizer)


def step_counts(state: dict[str, Any]) -> dict[str, float]:
    return {name: float(own["step"]) for name, own in sorted(state["state"].items())}


# Named optimizers.


@every_wrapper
@on_ranks
def test_named_optimizers_find_their_keys(way: str) -> list[str]:
    """It resumes: its keys are those of the wrapped model."""
    problems = []
    for library in (torch_fsdp, fullshard):
        wrapper, full = library.FullyShardedDataParallel, library.StateDictType.FULL_STATE_DICT
        source, optimizer = trained(way, library=library, units=alone)
        with warnings.catch_warnings(), wrapper.state_dict_type(source, full):
            warnings.simplefilter("ignore")
            weights, saved = source.state_dict(), wrapper.optim_state_dict(source, optimizer)
        model = shard(two_layers(), way, alone, library=library)
        names = [name for name, _ in model.named_parameters()]
        groups = [{"params": list(model.parameters())}]
        loaded: Any = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, lr=0.1, eps=1e-3)
        loaded.init_state()
        with wrapper.state_dict_type(model, full):
            model.load_state_dict(weights)
            given = {"is_named_optimizer": True, "load_directly": way == "wrapper"}
            state = wrapper.optim_state_dict_to_load(model, loaded, saved, **given)
        held = {name for name, p in model.named_parameters() if p.numel()}
        assert (state["state"].keys() == held or library is torch_fsdp) and state["state"].keys() <= set(names)
        assert [group["params"] for group in state["param_groups"]] == [names], library
        if way != "wrapper":
            loaded.load_state_dict(state)
        train(model, loaded, range(2, 3))
        if library is torch_fsdp and way == "originals":
            continue  # its keys are right, and what it trains is not
        with wrapper.state_dict_type(model, full):
            problems += differences(library.__name__, model.state_dict(), dict(one_process(3)[0].state_dict()))
    return problems


@every_wrapper
@on_ranks
def test_names_of_an_optimizers_parameters_stay(way: str) -> None:
    """`torch.optim` with names: what it is given to load lists them, as PyTorch's does."""
    model = shard(two_layers(), way, alone)
    optimizer = adam(model.named_parameters())
    train(model, optimizer, range(1))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
    assert state["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]


# Steps.


@pytest.mark.parametrize("way", ["rows", "flat", "originals"])
@on_ranks
def test_steps_are_those_of_a_rank_that_owns_something(way: str) -> None:
    """State made for all parameters beforehand (to load into), also on ranks that own nothing of some."""
    model = shard(two_layers(), way, alone)
    optimizer = adam(model.parameters())
    state_dict.get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, range(2))
    found = [state_dict.get_optimizer_state_dict(model, optimizer, options=FULL)]
    if way in WRAPPERS:
        found += [saved_by(model, optimizer, kind) for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")]
        for parameter in model.parameters():  # and where it was made by hand
            if not parameter.numel():
                optimizer.state[parameter] = {"step": torch.tensor(77.0), "exp_avg": torch.empty(0)}
                optimizer.state[parameter]["exp_avg_sq"] = torch.empty(0)
        found.append(saved_by(model, optimizer))
    for state in found:
        assert step_counts(state) == dict.fromkeys(NAMES, 2.0)


# State missing for a part of what one optimizer tensor holds.


def lacking(saved: dict[str, Any], missing: str) -> dict[str, Any]:
    """Without the second weight's whole state, or one key of it."""
    states = saved["state"] if missing == "parameter" else saved["state"]["2.weight"]
    del states["2.weight" if missing == "parameter" else missing]
    return saved


@pytest.mark.parametrize("missing", ["parameter", "exp_avg", "step"])
@on_ranks
def test_state_missing_for_a_part_of_one_tensor(missing: str) -> list[str]:
    """A flat parameter's raises a ValueError on every rank, as PyTorch's; so does an optimizer view's."""
    for library in (torch_fsdp, fullshard):
        model, optimizer = trained("wrapper", library=library, units=alone)
        wrapper = library.FullyShardedDataParallel
        with wrapper.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
            saved = lacking(wrapper.optim_state_dict(model, optimizer), missing)
            before = copy.deepcopy(optimizer.state_dict()["state"])
            load = wrapper.optim_state_dict_to_load
            with pytest.raises(ValueError, match=None if library is torch_fsdp else r"2\.weight"):
                load(model, optimizer, saved, load_directly=True)
    problems = differences("left as it was", optimizer.state_dict()["state"][0], before[0])
    error = error_of(lambda: state_dict.set_optimizer_state_dict(model, optimizer, saved, options=FULL))
    problems += named_error(error, "2.weight", kinds=ValueError, where="set_optimizer_state_dict")
    model = shard(two_layers(), "flat", alone)
    optimizer = adam(fullshard.optimizer_view(model))
    train(model, optimizer, range(2))
    saved = lacking(fullshard.optimizer_state_dict(model, optimizer), missing)
    error = error_of(lambda: fullshard.load_optimizer_state_dict(model, optimizer, saved))
    return problems + named_error(error, "2.weight", kinds=fullshard.CheckpointError, where="a view")


# State dicts without groups, and without the state of some parameters.


def loaded_problems(where: str, optimizer: Any, state: dict[str, Any], kept: list[int]) -> list[str]:
    """That what is to be loaded is the optimizer's own state, of the parameters in `kept` that have elements here."""
    own, parameters = optimizer.state_dict()["state"], optimizer.param_groups[0]["params"]
    want = {number: own[number] for number in kept if parameters[number].numel()}
    if not want.keys() <= state["state"].keys() <= set(kept):
        return [f"{where}: state of {[*state['state']]} where {[*want]} is wanted"]
    return [p for number in want for p in differences(f"{where} {number}", state["state"][number], want[number])]


@every_wrapper
@on_ranks
def test_state_dicts_that_lack_groups_or_state(way: str) -> list[str]:
    """Every function takes them, rank 0's alone too: values are loaded, settings stay the optimizer's."""
    model, optimizer = trained(way)
    saved = saved_by(model, optimizer)
    groupless, stateless = {"state": saved["state"]}, lacking(copy.deepcopy(saved), "parameter")
    config = fullshard.FullStateDictConfig(rank0_only=True), fullshard.FullOptimStateDictConfig(rank0_only=True)
    fresh, problems = adam(model.parameters()), []
    with warnings.catch_warnings(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        warnings.simplefilter("ignore")
        collected = FSDP.optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
        numbered = FSDP.rekey_optim_state_dict(groupless, OptimStateKeyType.PARAM_ID, two_layers())
        FSDP.optim_state_dict_to_load(model, fresh, groupless, load_directly=True)
        loaded = {
            "loaded directly": fresh.state_dict(),
            "optim_state_dict_to_load": FSDP.optim_state_dict_to_load(model, optimizer, groupless),
            "shard_full": FSDP.shard_full_optim_state_dict(groupless, model, optim=optimizer),
            "flatten_sharded": FSDP.flatten_sharded_optim_state_dict(groupless, model, optimizer),
        }
        assert collected.keys() == numbered.keys() == {"state"}
        assert collected["state"].keys() == set(NAMES) and numbered["state"].keys() == {0, 1}
        for where, state in loaded.items():
            problems += loaded_problems(where, optimizer, state, [0, 1])
        for given, kept in ((groupless, [0, 1]), (stateless, [0])):
            of_0 = given if dist.get_rank() == 0 else None
            scattered = FSDP.scatter_full_optim_state_dict(of_0, model, optim=optimizer)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *config):
                sent = FSDP.optim_state_dict_to_load(model, optimizer, of_0 or {})
            problems += loaded_problems(f"scatter {kept}", optimizer, scattered, kept)
            problems += loaded_problems(f"rank0_only {kept}", optimizer, sent, kept)
    return problems


@three_ways
@on_ranks
def test_setting_state_without_groups_and_of_frozen_parameters(way: str) -> list[str]:
    """`set_state_dict` takes both; training goes on as one process does."""
    problems = []
    for freezes, flatten in ((False, False), (True, False), (True, True)):
        for full in (False, True):

            def make(freezes: bool = freezes) -> Any:
                model = two_layers()
                model[2].requires_grad_(not freezes)
                return model

            def sharded(freezes: bool = freezes) -> Any:
                model = shard(two_layers(), way)
                inner(model)[2].requires_grad_(not freezes)
                return model

            options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flatten)
            source, model = sharded(), sharded()
            optimizer, loaded = adam(source.parameters()), adam(model.parameters())
            train(source, optimizer, range(2))
            weights, saved = state_dict.get_state_dict(source, optimizer, options=options)
            if not freezes:
                del saved["param_groups"]
            state_dict.set_state_dict(model, loaded, model_state_dict=weights, optim_state_dict=saved, options=options)
            train(model, loaded, range(2, 3))
            where = f"frozen {freezes}, flat {flatten}, full {full}"
            problems += differences(where, whole_state(model), whole_state(one_process(3, make)[0]))
    return problems


@three_ways
@on_ranks
def test_state_that_lacks_a_trained_parameter(way: str) -> list[str]:
    """Refused by name where strict, as PyTorch does; else it begins anew."""
    model, optimizer = trained(way)
    saved = lacking(state_dict.get_optimizer_state_dict(model, optimizer, options=FULL), "parameter")
    with pytest.raises(RuntimeError, match=r"2\.weight"):
        state_dict.set_optimizer_state_dict(model, adam(model.parameters()), saved, options=FULL)
    loose, fresh = StateDictOptions(full_state_dict=True, strict=False), adam(model.parameters())
    state_dict.set_optimizer_state_dict(model, fresh, saved, options=loose)
    again = state_dict.get_optimizer_state_dict(model, fresh, options=FULL)
    got = {key: whole(value) for key, value in again["state"]["0.weight"].items()}
    return differences("loose", got, saved["state"]["0.weight"])


# Time.


def calls_to_match(modules: int, orig: bool) -> int:
    """Python calls that the optimizer's state takes to be matched, with that many wrapped modules."""
    model = nn.Sequential(*(FSDP(nn.Linear(2, 2), use_orig_params=orig) for _ in range(modules)))
    root, calls = FSDP(model, use_orig_params=orig), 0
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    saved = saved_by(root, optimizer, "SHARDED_STATE_DICT")
    sys.setprofile(count)
    try:
        saved_by(root, optimizer, "SHARDED_STATE_DICT")
        FSDP.optim_state_dict_to_load(root, optimizer, saved)
    finally:
        sys.setprofile(None)
    return calls


@every_wrapper
def test_optimizer_state_is_matched_in_linear_time(fake_world, way):
    fake_world(2)
    assert calls_to_match(160, WRAPPERS[way]) < 2.5 * calls_to_match(80, WRAPPERS[way])


# Ranks whose optimizers do not list the same parameters in the same order and groups.


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


# State in containers.


@three_ways
@on_ranks
def test_parts_of_tensors_in_containers(tmp_path: Any, way: str) -> None:
    """Refused by all that collect state: each rank has a part of them, and none knows how to put these together."""
    model, optimizer = trained(way)
    state = optimizer.state[next(p for p in model.parameters() if p.numel())]
    state["history"] = [state["exp_avg"].clone()]
    calls = [
        lambda: fullshard.save(tmp_path, model, optimizer),
        lambda: state_dict.get_optimizer_state_dict(model, optimizer, options=FULL),
        *([lambda: saved_by(model, optimizer)] if way == "wrapper" else []),
    ]
    for call in calls:
        error = error_of(call)
        assert isinstance(error, fullshard.CheckpointError), error
        assert "'history'" in str(error) and "keep each under a key of its own" in str(error)
    if way != "wrapper":  # sharded tensors describe themselves
        shown = state_dict.get_optimizer_state_dict(model, optimizer)["state"]
        (history,) = next(entry["history"] for entry in shown.values() if "history" in entry)
        assert type(history) is type(state["exp_avg"])
    if way != "wrapper":
        state["history"] = state["exp_avg"].to_local().clone()
        assert "each rank has a part of its own" in str(error_of(lambda: fullshard.save(tmp_path, model, optimizer)))
    state["history"] = [torch.ones(3, 1), 2.0]  # whole values, the same on every rank
    fullshard.save(tmp_path, model, optimizer)


class Scaled(nn.Module):
    """Has a 0-d parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.empty.sum()


@pytest.mark.parametrize("way", ["flat", "wrapper"])
@on_ranks
def test_an_optimizer_of_a_scalar_or_an_empty_parameter(way: str) -> None:
    """Nothing but the optimizer's own state shows which keys have one value per element."""
    torch.manual_seed(0)
    model: Any = Scaled()
    model = FSDP(model, use_orig_params=True) if way == "wrapper" else fullshard.fully_shard(model, layout="flat")
    named = {name.rpartition(".")[2]: parameter for name, parameter in model.named_parameters()}
    for name in ("scale", "empty"):
        optimizer = torch.optim.AdamW([named[name]], lr=0.1)
        for stepped in (False, True):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state = state_dict.get_optimizer_state_dict(model, optimizer, options=FULL)
            loading = optimizer if stepped else torch.optim.AdamW([named[name]], lr=0.1)
            before = {key: type(value) for key, value in optimizer.state.get(named[name], {}).items()}
            state_dict.set_optimizer_state_dict(model, loading, state, options=FULL)
            if name == "scale" and named[name].numel():
                assert {key: type(value) for key, value in loading.state[named[name]].items()} == before
            model(torch.ones(2, 4)).sum().backward()
            loading.step()
