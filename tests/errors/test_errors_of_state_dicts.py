"""Errors of the state dicts of models and optimizers; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardedStateDictConfig, ShardingStrategy, StateDictType
from fullshard.errors import CheckpointError, ConfigError, MissingStateError
from fullshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from raising import assert_raises, nested, run, sharded, two_layers, words_of, wrapped

FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def adam(model: nn.Module) -> torch.optim.Adam:
    """An optimizer that has stepped once."""
    optimizer = torch.optim.Adam(model.parameters())
    run(model).sum().backward()
    optimizer.step()
    return optimizer


def flat(module: nn.Module | None = None, **settings: Any) -> FSDP:
    """One flat parameter, with local state dicts."""
    model = FSDP(module or two_layers(), use_orig_params=False, **settings)
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    return model


def state_of_rows() -> tuple[FSDP, torch.optim.Optimizer]:
    """State that is not one value per element."""
    model = wrapped(use_orig_params=False)
    optimizer = adam(model)
    optimizer.state[model._flat_param]["rows"] = torch.ones(3)
    return model, optimizer


def loaded(change: Any) -> None:
    """Load the optimizer state of a layer after a change of it; the layer is one flat parameter."""
    model = FSDP(nn.Linear(4, 4), use_orig_params=False)
    optimizer = torch.optim.Adam(model.parameters())
    state = {
        name: {"step": torch.tensor(1.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
        for name, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    change(state)
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": ["weight", "bias"]}]
    FSDP.optim_state_dict_to_load(model, optimizer, {"state": state, "param_groups": groups})


def loaded_by_name(change: Any) -> None:
    """Load the optimizer state of a sharded model after a change of it."""
    model = sharded()
    optimizer = adam(model)
    state = fullshard.optimizer_state_dict(model, optimizer)
    change(state)
    before = optimizer.param_groups[0]["lr"]
    try:
        fullshard.load_optimizer_state_dict(model, optimizer, state)
    finally:
        assert optimizer.param_groups[0]["lr"] == before and len(optimizer.state) == len(list(model.parameters()))


def cut_moments(state: dict[str, Any]) -> None:
    name, moments = next(iter(state["state"].items()))
    state["state"][name] = {**moments, "exp_avg": torch.ones(2, 2)}


def with_state(value: Any) -> None:
    """The state of an optimizer that holds something besides numbers."""
    model = sharded()
    optimizer = adam(model)
    for state in optimizer.state.values():
        state["more"] = value
    fullshard.optimizer_state_dict(model, optimizer)


CALLS = [
    (
        lambda: with_state(None),
        "CheckpointError: optimizer_state_dict cannot return optimizer state 'more'",
    ),
    (lambda: with_state("x"), "CheckpointError: optimizer_state_dict cannot return optimizer state 'more'"),
    (
        lambda: with_state({1: 2}),
        "CheckpointError: optimizer_state_dict cannot ... a dict ... get_optimizer_state",
    ),
    (lambda: loaded_by_name(cut_moments), "CheckpointError: Values to load do not fit the model ... shape ... exp_avg"),
    (
        lambda: loaded_by_name(lambda state: state.update(param_groups=state.pop("groups"))),
        "MissingStateError: What was passed is not an optimizer state dict ... set_optimizer_state_dict",
    ),
    (
        lambda: loaded_by_name(lambda state: state.clear()),
        "MissingStateError: What was passed is not an optimizer state dict ... set_optimizer_state_dict",
    ),
    (
        lambda: get_model_state_dict(wrapped(), options=StateDictOptions(dsd_fqn_modifiers="other")),
        "ConfigError: dsd_fqn_modifiers is not supported for models that Fullshard shards",
    ),
    (
        lambda: set_model_state_dict(wrapped(), {}, options=StateDictOptions(broadcast_from_rank0=True)),
        "ConfigError: full_state_dict must be True when broadcast_from_rank0 is True",
    ),
    (
        lambda: FSDP.set_state_dict_type(wrapped(), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()),
        "CheckpointError: Expected state_dict_config of type FullStateDictConfig but got",
    ),
    (
        nested,
        lambda m: FSDP.set_state_dict_type(m.module[0], StateDictType.SHARDED_STATE_DICT),
        FSDP.get_state_dict_type,
        "CheckpointError: instances in this module have different state dict types",
    ),
    (lambda: FSDP.get_state_dict_type(nn.Linear(4, 4)), "CheckpointError: this model contains no"),
    (
        lambda: FSDP.rekey_optim_state_dict({"state": {7: {}}}, OptimStateKeyType.PARAM_NAME, two_layers()),
        "CheckpointError: The optimizer state has a key that the optimizer does not",
    ),
    (two_layers, lambda m: FSDP.optim_state_dict(m, sgd(m)), "CheckpointError: this model contains no"),
    (
        wrapped,
        lambda m: fullshard.optimizer_state_dict(m, adam(m)),
        "CheckpointError: The model is wrapped by FullyShardedDataParallel ... optim_state_dict",
    ),
    (
        sharded,
        lambda m: set_optimizer_state_dict(m, sgd(m), {}, options=FROM_0),
        "CheckpointError: rank 0 has no optimizer state dict to send to the others",
    ),
    (
        lambda: wrapped(use_orig_params=True),
        lambda m: get_model_state_dict(m.module[0]),
        "CheckpointError: The module is inside a FullyShardedDataParallel",
    ),
    (state_of_rows, lambda both: FSDP.optim_state_dict(*both), "CheckpointError: Optimizer state 'rows' does not have"),
    (
        lambda: flat(sharding_strategy=ShardingStrategy.NO_SHARD),
        lambda m: m.state_dict(),
        "CheckpointError: LOCAL_STATE_DICT can only be used when parameters are flattened",
    ),
    (lambda: loaded(lambda state: state.pop("bias")), "MissingStateError: The optimizer state to load lacks a"),
    (
        lambda: loaded(lambda state: state["bias"].pop("exp_avg")),
        "MissingStateError: The optimizer state to load lacks keys of a",
    ),
    (
        lambda: loaded(lambda state: state["bias"].update(step=torch.tensor(2.0))),
        "CheckpointError: State 'step' differs between parameters of one ... 1.0, as weight",
    ),
    (
        lambda: loaded(lambda state: state["bias"].update(exp_avg=torch.ones(3))),
        "CheckpointError: Values to load do not fit the model: a tensor has a different shape ... bias.exp_avg",
    ),
    (
        lambda: loaded(lambda state: state["bias"].update(exp_avg=torch.ones(4, device="meta"))),
        "CheckpointError: A value to load cannot be copied ... bias.exp_avg ... on the meta device",
    ),
    (
        wrapped,
        lambda m: FSDP.optim_state_dict_to_load(m, sgd(m, momentum=0.9), {"param_groups": []}),
        "MissingStateError: What was passed is not an optimizer state dict",
    ),
    (
        flat,
        lambda m: m.load_state_dict(flat(nn.Linear(4, 4)).state_dict()),
        "CheckpointError: LOCAL_STATE_DICT can only be loaded into the same model",
    ),
    (
        wrapped,
        lambda m: FSDP.sharded_optim_state_dict(m, sgd(m)),
        "FutureWarning: ``FullyShardedDataParallel.sharded_optim_state_dict`` is being",
    ),
    (
        wrapped,
        lambda m: FSDP.full_optim_state_dict(m, sgd(m), optim_input=list(m.parameters())),
        "FutureWarning: The `optim_input` argument is deprecated",
    ),
]


NOT_A_STATE = [None, 1, "state", [], {}, {"state": 1}, {"state": {"weight": 1}}, {"state": torch.ones(2)}]
NOT_GROUPS = ["params", 1, {"params": []}, [1], [{}], [{"params": "weight"}]]


@pytest.mark.parametrize("state", [*NOT_A_STATE, *({"state": {}, "param_groups": groups} for groups in NOT_GROUPS)])
def test_what_is_no_optimizer_state_is_refused_by_every_function(state):
    model, rows = wrapped(), sharded()
    optimizer, of_rows = adam(model), adam(rows)
    before = {key: value.clone() for key, value in optimizer.state[next(model.parameters())].items()}
    calls = [
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True),
        lambda: set_optimizer_state_dict(model, optimizer, state),
        lambda: set_optimizer_state_dict(rows, of_rows, state),
        lambda: fullshard.load_optimizer_state_dict(rows, of_rows, state),
        lambda: FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model),
    ]
    if state is not None:  # its own
        calls.append(lambda: FSDP.optim_state_dict(model, optimizer, state))
    for call in calls:
        with pytest.raises(MissingStateError, match="not an optimizer state dict"):
            call()
    after = optimizer.state[next(model.parameters())]
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_one_value_for_a_part_of_a_flat_parameter_whose_other_parts_have_one_per_element():
    for name in ("weight", "bias"):
        for value in ("text", 1.0, torch.tensor(1.0)):
            with pytest.raises(CheckpointError, match="'exp_avg' differs between parameters"):
                loaded(lambda state, name=name, value=value: state[name].update(exp_avg=value))


@pytest.mark.parametrize("value", [None, "model", 1, [], {}, torch.ones(2)], ids=str)
def test_what_is_no_module_or_optimizer_is_refused(value):
    model, rows = wrapped(), sharded()
    optimizer = adam(model)
    state = FSDP.optim_state_dict(model, optimizer)
    takes_module = [
        FSDP.fsdp_modules,
        FSDP.get_state_dict_type,
        lambda m: FSDP.set_state_dict_type(m, StateDictType.FULL_STATE_DICT),
        lambda m: FSDP.summon_full_params(m).__enter__(),
        lambda m: FSDP.optim_state_dict(m, optimizer),
        lambda m: FSDP.optim_state_dict_to_load(m, optimizer, state),
        lambda m: FSDP.optim_state_dict_to_load(state, m, optimizer),  # the order of PyTorch 1.13
        lambda m: FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, m),
        get_model_state_dict,
        lambda m: get_model_state_dict(model, submodules=[m]),
        lambda m: set_model_state_dict(m, {}),
        lambda m: set_optimizer_state_dict(m, optimizer, state),
        lambda m: fullshard.optimizer_state_dict(m, optimizer),
    ]
    for call in takes_module:
        with pytest.raises(ConfigError, match="takes a module"):
            call(value)
    takes_optimizer = [
        lambda o: FSDP.optim_state_dict(model, o),
        lambda o: FSDP.optim_state_dict_to_load(model, o, state),
        lambda o: set_optimizer_state_dict(rows, [o], state),
        lambda o: get_state_dict(model, [o]),
        lambda o: fullshard.optimizer_state_dict(rows, o),
    ]
    for call in takes_optimizer:
        with pytest.raises(ConfigError, match="The optimizer is invalid"):
            call(value)
    if not isinstance(value, dict):
        with pytest.raises(TypeError, match="state dict is invalid"):
            set_model_state_dict(model, value)


SWITCHES = [
    (FSDP.summon_full_params, ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")),
    (FSDP.fsdp_modules, ("root_only",)),
    (FSDP, ("full_precision_in_eval",)),
]


@pytest.mark.parametrize("value", ["no", 2, None])
@pytest.mark.parametrize(("function", "name"), [(function, name) for function, names in SWITCHES for name in names])
def test_switches_are_bools(function, name, value):
    model = two_layers() if function is FSDP else wrapped()
    with pytest.raises(ConfigError, match=rf"{name}=\) is invalid"):
        context = function(model, **{name: value})
        context.__enter__()


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)
