"""Errors of the state dicts of models and optimizers; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullshard
from fullshard import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from raising import nested, raises, sharded, two_layers, warns, wrapped

FSDP = FullyShardedDataParallel


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


def test_a_config_of_another_type_of_state_dict():
    with raises("K001"):
        FSDP.set_state_dict_type(wrapped(), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())


def test_instances_that_differ_in_their_type_of_state_dict():
    model = nested()
    FSDP.set_state_dict_type(model.module[0], StateDictType.SHARDED_STATE_DICT)
    with raises("K002"):
        FSDP.get_state_dict_type(model)


def test_a_model_without_instances_has_no_type_of_state_dict():
    with raises("K003"):
        FSDP.get_state_dict_type(nn.Linear(4, 4))


def test_a_model_without_instances_has_no_sharded_optimizer_state():
    model = nn.Linear(4, 4)
    with raises("K005"):
        FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_old_name():
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warns("W003"):
        FSDP.sharded_optim_state_dict(model, optimizer)


def test_an_old_argument():
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warns("W004"):
        FSDP.full_optim_state_dict(model, optimizer, optim_input=list(model.parameters()))


def test_names_that_are_translated_where_they_do_not_change():
    with raises("C075"):
        get_model_state_dict(wrapped(), options=StateDictOptions(dsd_fqn_modifiers="other"))


def test_sending_from_rank_0_what_is_not_whole():
    with raises("C076"):
        set_model_state_dict(wrapped(), {}, options=StateDictOptions(broadcast_from_rank0=True))


def test_something_else_than_an_optimizer_state_dict():
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with raises("K016"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"param_groups": []})


def test_numbers_of_parameters_that_there_are_not():
    with raises("K004"):
        FSDP.rekey_optim_state_dict({"state": {7: {}}}, OptimStateKeyType.PARAM_NAME, two_layers())


def test_the_state_of_a_part_of_an_instance():
    model = wrapped(use_orig_params=True)
    with raises("K008"):
        get_model_state_dict(model.module[0])


def test_nothing_to_send_from_rank_0():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises("K007"):
        set_optimizer_state_dict(
            model, optimizer, {}, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )


def test_a_local_state_dict_of_what_is_not_split():
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=False)
    with raises("K011"), FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.state_dict()


def test_a_local_state_dict_of_another_model():
    model, other = wrapped(use_orig_params=False), FSDP(nn.Linear(4, 4), use_orig_params=False)
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType.LOCAL_STATE_DICT)
    with raises("K018"):
        model.load_state_dict(other.state_dict())


def adam(model: FSDP) -> torch.optim.Adam:
    """An optimizer that has stepped once."""
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def test_state_that_is_not_one_value_per_element():
    model = wrapped(use_orig_params=False)
    optimizer = adam(model)
    optimizer.state[model._flat_param]["rows"] = torch.ones(3)
    with raises("K010"):
        FSDP.optim_state_dict(model, optimizer)


def loaded(change: object) -> None:
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


def test_state_without_a_parameter():
    with raises("K012"):
        loaded(lambda state: state.pop("bias"))


def test_state_of_a_parameter_without_a_part():
    with raises("K013"):
        loaded(lambda state: state["bias"].pop("exp_avg"))


def test_steps_that_differ_within_a_flat_parameter():
    with raises("K014"):
        loaded(lambda state: state["bias"].update(step=torch.tensor(2.0)))


def test_state_of_another_shape():
    with raises("K015"):
        loaded(lambda state: state["bias"].update(exp_avg=torch.ones(3)))


def test_the_functions_for_fully_shard_of_an_instance():
    model = wrapped()
    with raises("K006"):
        fullshard.optimizer_state_dict(model, adam(model))
