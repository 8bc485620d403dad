"""`copy.deepcopy` of sharded models: what goes along. That copies are equal: tests/property."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import fully_shard
from fullshard.runtime import runner_of


def test_settings_and_registered_methods_are_copied(fake_world):
    fake_world(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_gradient_divide_factor(3.0)
    model.extra = lambda: None
    model[0].scores = model[0].forward
    fullshard.register_fsdp_forward_method(model[0], "scores")
    twin = copy.deepcopy(model)
    assert twin[0]._runner().settings.prefetch.forward_units == (twin[1]._runner(),)
    assert twin[1]._runner().settings.reduce.divide_factor == 3.0
    assert twin[0]._runner().modules == [twin[0]]
    assert twin[0].scores is not model[0].scores
    assert twin[0]._runner().root is None


def test_nothing_gathered_is_copied(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(8, 8))
    model.unshard()
    assert not isinstance(model.weight, DTensor)
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, DTensor)
    assert fullshard.memory_use(twin).gathered == 0
    assert not isinstance(model.weight, DTensor)  # and the model is left as it was


def test_kept_storage_of_a_copy_is_counted(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(8, 8))
    model.set_keep_unsharded_storage(True)
    twin = copy.deepcopy(model)
    unit = runner_of(twin).unit
    for _ in range(2):
        twin(torch.ones(1, 8)).sum().backward()
        assert fullshard.memory_use(twin).gathered == unit.ledger.gathered == unit.full_bytes


def test_copy_within_a_larger_object(fake_world):
    fake_world(2)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    kept = copy.deepcopy({"model": model, "step": 3, "again": model})
    assert kept["model"] is kept["again"] is not model
    kept["model"](torch.ones(1, 4)).sum().backward()
    assert kept["model"][0].weight.grad is not None
    assert model[0].weight.grad is None


def test_copy_with_gradients_not_reduced_is_refused(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(fullshard.PhaseError, match="not yet reduced"):
        copy.deepcopy(model)


# A parameter keeps its owner, its name and what users set on it, whatever moves its storage.


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("how", ["to_empty", "double", "assign"])
def test_moving_storage_keeps_owner_and_attributes(fake_world, layout: str, how: str) -> None:
    fake_world(1)
    with torch.device("meta" if how == "to_empty" else "cpu"):
        model = nn.Linear(4, 4)
    model.weight.no_decay = True
    fullshard.fully_shard(model, layout=layout)
    before = model.weight
    if how == "to_empty":
        with pytest.raises(fullshard.ConfigError, match="meta"):
            fullshard.optimizer_view(model)
        model.to_empty(device="cpu")
    view = fullshard.optimizer_view(model)
    if how == "double":
        model.double()
    elif how == "assign":
        model.load_state_dict({k: v.full_tensor().clone() for k, v in model.state_dict().items()}, assign=True)
    if how != "assign":
        assert model.weight is before
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    x = torch.ones(2, 4, dtype=model.weight.dtype)
    model(x).sum().backward()
    assert model.weight.no_decay
    assert model.weight.dtype == x.dtype
    assert fullshard.memory_use(model).parameters == 20 * x.element_size()
    torch.optim.SGD(view, lr=0.5).step()  # the view made before still updates the model
    assert torch.equal(model.weight.full_tensor(), torch.zeros(4, 4, dtype=x.dtype))
