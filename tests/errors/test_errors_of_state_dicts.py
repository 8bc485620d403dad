"""Errors of the state dicts of models and optimizers; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardedStateDictConfig, ShardingStrategy, StateDictType
from fullshard.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict, set_optimizer_state_dict
from raising import assert_raises, nested, run, sharded, two_layers, wrapped

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


CALLS = {
    "C075": lambda: get_model_state_dict(wrapped(), options=StateDictOptions(dsd_fqn_modifiers="other")),
    "C076": lambda: set_model_state_dict(wrapped(), {}, options=StateDictOptions(broadcast_from_rank0=True)),
    "K001": lambda: FSDP.set_state_dict_type(wrapped(), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()),
    "K002": (
        nested,
        lambda m: FSDP.set_state_dict_type(m.module[0], StateDictType.SHARDED_STATE_DICT),
        FSDP.get_state_dict_type,
    ),
    "K003": lambda: FSDP.get_state_dict_type(nn.Linear(4, 4)),
    "K004": lambda: FSDP.rekey_optim_state_dict({"state": {7: {}}}, OptimStateKeyType.PARAM_NAME, two_layers()),
    "K005": (two_layers, lambda m: FSDP.optim_state_dict(m, sgd(m))),
    "K006": (wrapped, lambda m: fullshard.optimizer_state_dict(m, adam(m)), "optim_state_dict"),
    "K007": (sharded, lambda m: set_optimizer_state_dict(m, sgd(m), {}, options=FROM_0)),
    "K008": (lambda: wrapped(use_orig_params=True), lambda m: get_model_state_dict(m.module[0])),
    "K010": (state_of_rows, lambda both: FSDP.optim_state_dict(*both)),
    "K011": (lambda: flat(sharding_strategy=ShardingStrategy.NO_SHARD), lambda m: m.state_dict()),
    "K012": lambda: loaded(lambda state: state.pop("bias")),
    "K013": lambda: loaded(lambda state: state["bias"].pop("exp_avg")),
    "K014": lambda: loaded(lambda state: state["bias"].update(step=torch.tensor(2.0))),
    "K019": lambda: loaded(lambda state: state["bias"].update(exp_avg=torch.ones(3))),
    "K016": (wrapped, lambda m: FSDP.optim_state_dict_to_load(m, sgd(m, momentum=0.9), {"param_groups": []})),
    "K018": (flat, lambda m: m.load_state_dict(flat(nn.Linear(4, 4)).state_dict())),
    "W003": (wrapped, lambda m: FSDP.sharded_optim_state_dict(m, sgd(m))),
    "W004": (wrapped, lambda m: FSDP.full_optim_state_dict(m, sgd(m), optim_input=list(m.parameters()))),
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])
