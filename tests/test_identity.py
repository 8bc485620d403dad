"""A parameter keeps its owner, its name and what users set on it, whatever moves its storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullshard


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
