"""Optimizer state dicts that lack something, count steps wrongly, or go to optimizers with named parameters."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.optim import _NamedOptimizer

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, StateDictType, state_dict
from training import assert_same
from ways import (
    LAYOUTS,
    WAYS,
    WRAPPERS,
    adam,
    alone,
    differences,
    error_of,
    named_error,
    one_process,
    shard,
    train,
    two_layers,
    whole,
    whole_state,
)

fronts = pytest.mark.parametrize("way", WAYS)
wrappers = pytest.mark.parametrize("way", WRAPPERS)
FULL = state_dict.StateDictOptions(full_state_dict=True)


def trained(way: str, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(two_layers(), way)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(steps))
    return model, optimizer


def saved_by(model: Any, optimizer: Any, kind: str = "FULL_STATE_DICT", **config: Any) -> Any:
    configs = (fullshard.FullStateDictConfig(**config), fullshard.FullOptimStateDictConfig(**config))
    with FSDP.state_dict_type(model, StateDictType[kind], *(configs if config else ())):
        return FSDP.optim_state_dict(model, optimizer)


def loads_of(model: Any, optimizer: Any, saved: Any, kind: str = "FULL_STATE_DICT", **more: Any) -> Any:
    with FSDP.state_dict_type(model, StateDictType[kind]):
        return FSDP.optim_state_dict_to_load(model, optimizer, saved, **more)


def step_counts(state: dict[str, Any]) -> dict[str, float]:
    return {name: float(own["step"]) for name, own in sorted(state["state"].items())}


# Named optimizers.


def named(way: str, load_directly: bool) -> list[str]:
    """A named optimizer resumes: it finds its keys, which are those of the wrapped model, and goes on."""
    problems = []
    for library in (torch_fsdp, fullshard):
        where = library.__name__
        source = shard(two_layers(), way, alone, library=library)
        optimizer = adam(source.parameters())
        train(source, optimizer, range(2))
        wrapper = library.FullyShardedDataParallel
        with warnings.catch_warnings(), wrapper.state_dict_type(source, library.StateDictType.FULL_STATE_DICT):
            warnings.simplefilter("ignore")
            weights, saved = source.state_dict(), wrapper.optim_state_dict(source, optimizer)
        model = shard(two_layers(), way, alone, library=library)
        with wrapper.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
            model.load_state_dict(weights)
        groups = [{"params": list(model.parameters())}]
        loaded: Any = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, lr=0.1, eps=1e-3)
        loaded.init_state()
        with wrapper.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
            state = wrapper.optim_state_dict_to_load(
                model, loaded, saved, is_named_optimizer=True, load_directly=load_directly
            )
        names = [name for name, _ in model.named_parameters()]
        if not state["state"].keys() <= set(names) or [g["params"] for g in state["param_groups"]] != [names]:
            problems.append(f"{where}: keys {[*state['state']]} where {names} are the optimizer's")
        if not load_directly:
            loaded.load_state_dict(state)
        train(model, loaded, range(2, 3))
        if library is torch_fsdp and way == "originals":
            continue  # its keys are right, and what it trains is not
        reference, _ = one_process(3)
        with wrapper.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
            problems += differences(where, model.state_dict(), dict(reference.state_dict()))
    return problems


@wrappers
@pytest.mark.parametrize("load_directly", [False, True])
def test_a_named_optimizer_finds_its_keys(run_ranks, way, load_directly):
    assert_same(run_ranks(named, way, load_directly, timeout=20))


def names_kept(way: str) -> list[str]:
    """`torch.optim` with names: what it is given to load lists them, as PyTorch's does."""
    model = shard(two_layers(), way, alone)
    optimizer = adam(model.named_parameters())
    train(model, optimizer, range(1))
    state = loads_of(model, optimizer, saved_by(model, optimizer))
    got, want = state["param_groups"][0].get("param_names"), [name for name, _ in model.named_parameters()]
    return [] if got == want else [f"param_names {got} where {want} are wanted"]


@wrappers
def test_names_of_an_optimizers_parameters_stay(run_ranks, way):
    assert_same(run_ranks(names_kept, way, timeout=20))


# Steps.


def counts(way: str) -> list[str]:
    """State made for all parameters beforehand (to load into), also on ranks that own nothing of some."""
    model = shard(two_layers(), way, alone)
    optimizer = adam(model.parameters())
    state_dict.get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, range(2))
    want = dict.fromkeys(["0.weight", "2.weight"], 2.0)
    found = {"get_optimizer_state_dict": state_dict.get_optimizer_state_dict(model, optimizer, options=FULL)}
    if way in WRAPPERS:
        found |= {kind: saved_by(model, optimizer, kind) for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")}
    return [f"{name}: {step_counts(s)}" for name, s in found.items() if step_counts(s) != want]


@fronts
def test_steps_are_those_of_a_rank_that_owns_something(run_ranks, way):
    assert_same(run_ranks(counts, way, timeout=20))


def stale_counts() -> list[str]:
    """The same with state by hand: a rank's state of a parameter of which it holds nothing counts for nothing."""
    model, optimizer = trained("originals")
    model = shard(two_layers(), "originals", alone)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(2))
    for parameter in model.parameters():
        if not parameter.numel():
            optimizer.state[parameter] = {
                "step": torch.tensor(77.0),
                "exp_avg": torch.empty(0),
                "exp_avg_sq": torch.empty(0),
            }
    got = step_counts(saved_by(model, optimizer))
    return [] if set(got.values()) == {2.0} else [f"steps {got}"]


def test_state_of_a_parameter_without_elements_counts_for_nothing(run_ranks):
    assert_same(run_ranks(stale_counts, timeout=20))


# State missing for a part of what one optimizer tensor holds.


def missing_part(missing: str) -> list[str]:
    """`missing`: a parameter's whole state, or one key of it; PyTorch raises a ValueError, on every rank."""
    problems = []
    for library in (torch_fsdp, fullshard):
        model = shard(two_layers(), "wrapper", alone, library=library)
        optimizer = adam(model.parameters())
        train(model, optimizer, range(2))
        wrapper = library.FullyShardedDataParallel
        with wrapper.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
            saved = wrapper.optim_state_dict(model, optimizer)
            if missing == "parameter":
                del saved["state"]["2.weight"]
            else:
                del saved["state"]["2.weight"][missing]
            before = copy.deepcopy(optimizer.state_dict()["state"])
            error = error_of(
                lambda w=wrapper, m=model, o=optimizer, s=saved: w.optim_state_dict_to_load(m, o, s, load_directly=True)
            )
        if library is torch_fsdp:
            if not isinstance(error, ValueError):
                problems.append(f"PyTorch's: {error!r}")
            continue
        problems += named_error(error, "2.weight", kinds=ValueError, where="ours")
        problems += differences("left as it was", optimizer.state_dict()["state"][0], before[0])
        error = error_of(
            lambda m=model, o=optimizer, s=saved: state_dict.set_optimizer_state_dict(m, o, s, options=FULL)
        )
        problems += named_error(error, "2.weight", kinds=ValueError, where="set_optimizer_state_dict")
    return problems


@pytest.mark.parametrize("missing", ["parameter", "exp_avg", "step"])
def test_state_missing_for_a_part_of_a_flat_parameter(run_ranks, missing):
    assert_same(run_ranks(missing_part, missing, timeout=20))


def missing_part_of_view(missing: str) -> list[str]:
    """The same for an `optimizer_view`, which covers several parameters as well."""
    model = shard(two_layers(), "flat", alone)
    optimizer = adam(fullshard.optimizer_view(model))
    train(model, optimizer, range(2))
    saved = fullshard.optimizer_state_dict(model, optimizer)
    if missing == "parameter":
        del saved["state"]["2.weight"]
    else:
        del saved["state"]["2.weight"][missing]
    error = error_of(lambda: fullshard.load_optimizer_state_dict(model, optimizer, saved))
    return named_error(error, "2.weight", kinds=fullshard.CheckpointError, where=missing)


@pytest.mark.parametrize("missing", ["parameter", "exp_avg", "step"])
def test_state_missing_for_a_part_of_an_optimizer_view(run_ranks, missing):
    assert_same(run_ranks(missing_part_of_view, missing, timeout=20))


# State dicts without groups, and without the state of some parameters.


def without_groups(way: str) -> list[str]:
    """Every function takes them: values are loaded, settings stay the optimizer's."""
    model, optimizer = trained(way)
    groupless = {"state": saved_by(model, optimizer)["state"]}
    names = {"0.weight", "2.weight"}
    own = {"state": optimizer.state_dict()["state"]}
    with warnings.catch_warnings(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        warnings.simplefilter("ignore")
        collected = FSDP.optim_state_dict(model, optimizer, own)
        numbered = FSDP.rekey_optim_state_dict(groupless, OptimStateKeyType.PARAM_ID, two_layers())
        loaded = {
            "optim_state_dict_to_load": FSDP.optim_state_dict_to_load(model, optimizer, groupless),
            "shard_full": FSDP.shard_full_optim_state_dict(groupless, model, optim=optimizer),
            "flatten_sharded": FSDP.flatten_sharded_optim_state_dict(groupless, model, optimizer),
        }
    problems = [] if collected["state"].keys() == names else [f"collected {[*collected['state']]}"]
    problems += [] if numbered["state"].keys() == {0, 1} else [f"numbered {[*numbered['state']]}"]
    want = optimizer.state_dict()["state"]
    for where, state in loaded.items():
        for number, own in want.items():
            if optimizer.param_groups[0]["params"][number].numel():
                problems += differences(f"{where} {number}", state["state"].get(number, {}), own)
    return problems


@wrappers
def test_state_dicts_without_groups(run_ranks, way):
    assert_same(run_ranks(without_groups, way, timeout=20))


def sent_from_rank0(way: str, how: str) -> list[str]:
    """State dicts that only rank 0 has, without groups or without the state of a parameter."""
    model, optimizer = trained(way)
    saved = saved_by(model, optimizer)
    if how == "groups":
        del saved["param_groups"]
    else:
        del saved["state"]["2.weight"]
    mine = saved if dist.get_rank() == 0 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scattered = FSDP.scatter_full_optim_state_dict(mine, model, optim=optimizer)
    config = fullshard.FullStateDictConfig(rank0_only=True), fullshard.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *config):
        sent = FSDP.optim_state_dict_to_load(model, optimizer, mine or {})
    problems, want = [], optimizer.state_dict()["state"]
    kept = [0, 1] if how == "groups" else [0]
    for where, state in (("scatter", scattered), ("rank0_only", sent)):
        expected = {i: want[i] for i in kept if optimizer.param_groups[0]["params"][i].numel()}
        if state["state"].keys() != expected.keys():
            problems.append(f"{where}: state of {[*state['state']]} where {[*expected]} is wanted")
            continue
        for number, own in expected.items():
            problems += differences(f"{where} {number}", state["state"][number], own)
    return problems


@wrappers
@pytest.mark.parametrize("how", ["groups", "state"])
def test_state_dicts_of_rank_0_that_lack_something(run_ranks, way, how):
    assert_same(run_ranks(sent_from_rank0, way, how, timeout=20))


def set_without_groups(way: str, full: bool) -> list[str]:
    """`set_optimizer_state_dict` takes them too; training goes on as one process does."""
    source, optimizer = trained(way)
    options = state_dict.StateDictOptions(full_state_dict=full)
    weights, saved = state_dict.get_state_dict(source, optimizer, options=options)
    del saved["param_groups"]
    model = shard(two_layers(), way)
    loaded = adam(model.parameters())
    state_dict.set_state_dict(model, loaded, model_state_dict=weights, optim_state_dict=saved, options=options)
    train(model, loaded, range(2, 3))
    return differences("", whole_state(model), whole_state(one_process(3)[0]))


@fronts
@pytest.mark.parametrize("full", [False, True])
def test_setting_state_without_groups(run_ranks, way, full):
    assert_same(run_ranks(set_without_groups, way, full, timeout=20))


def frozen(way: str, flatten: bool, full: bool) -> list[str]:
    """A frozen parameter is listed in the groups and has no state: saving and loading know that."""

    def freeze(model: Any) -> Any:
        model[2].requires_grad_(False) if way in LAYOUTS else model.module[2].requires_grad_(False)
        return model

    source = freeze(shard(two_layers(), way))
    optimizer = adam(source.parameters())
    train(source, optimizer, range(2))
    options = state_dict.StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flatten)
    weights, saved = state_dict.get_state_dict(source, optimizer, options=options)
    model = freeze(shard(two_layers(), way))
    loaded = adam(model.parameters())
    state_dict.set_state_dict(model, loaded, model_state_dict=weights, optim_state_dict=saved, options=options)
    train(model, loaded, range(2, 3))

    def make() -> Any:
        made = two_layers()
        made[2].requires_grad_(False)
        return made

    return differences("", whole_state(model), whole_state(one_process(3, make)[0]))


@fronts
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
def test_parameters_that_groups_list_and_that_have_no_state(run_ranks, way, flatten, full):
    assert_same(run_ranks(frozen, way, flatten, full, timeout=20))


def lacks_a_parameter(way: str) -> list[str]:
    """State that a trained parameter lacks: refused by name where strict, as PyTorch does; else it begins anew."""
    model, optimizer = trained(way)
    saved = state_dict.get_optimizer_state_dict(model, optimizer, options=FULL)
    saved = {**saved, "state": {name: own for name, own in saved["state"].items() if name != "2.weight"}}
    fresh = adam(model.parameters())
    error = error_of(lambda: state_dict.set_optimizer_state_dict(model, fresh, saved, options=FULL))
    problems = []
    if not isinstance(error, RuntimeError) or "2.weight" not in str(error):
        problems.append(f"strict: {error!r}")
    loose = state_dict.StateDictOptions(full_state_dict=True, strict=False)
    fresh = adam(model.parameters())
    state_dict.set_optimizer_state_dict(model, fresh, saved, options=loose)
    again = state_dict.get_optimizer_state_dict(model, fresh, options=FULL)
    got = {f"{key}": whole(value) for key, value in again["state"]["0.weight"].items()}
    return problems + differences("loose", got, saved["state"]["0.weight"])


@fronts
def test_state_that_lacks_a_trained_parameter(run_ranks, way):
    assert_same(run_ranks(lacks_a_parameter, way, timeout=20))
