"""A gradient that the user gave other memory (`p.grad.data = ...`) is the one that counts, in every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from ways import (
    LAYOUTS,
    assert_equal,
    but_last,
    every_way,
    layers,
    loss_of,
    mine,
    shard,
    whole_gradients,
    whole_parameters,
)
from ways import batch as batch_of


def by_data(grad: Any) -> None:
    grad.data = grad.detach() * -3


def by_set(grad: Any) -> None:
    local = getattr(grad, "_local_tensor", grad)
    with torch.no_grad():
        local.set_(local * -3)


ASSIGN = {"data": by_data, "set_": by_set}


def parameters_to_step(model: nn.Module, way: str) -> Any:
    return fullshard.optimizer_view(model) if way in LAYOUTS else model.parameters()


def assigned(way: str, then: str) -> None:
    for assign in ASSIGN:
        trained(way, assign, then)


def trained(way: str, assign: str, then: str) -> None:
    model, plain = shard(layers(), way, but_last), layers()
    optimizer = torch.optim.SGD(parameters_to_step(model, way), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    def backward(seed: int) -> None:
        loss_of(model, mine(seed)).backward()
        loss_of(plain, batch_of(seed)).backward()

    for step in range(2):
        backward(step)
        for parameter in model.parameters():
            if parameter.grad is not None:
                ASSIGN[assign](parameter.grad)
        for parameter in plain.parameters():
            parameter.grad.mul_(-3)
        if then == "zeroed":
            model.zero_grad(set_to_none=False)
            plain.zero_grad(set_to_none=False)
        elif then == "parked":
            fullshard.park(model)
            fullshard.resume(model)
        if then != "stepped":
            backward(step + 10)
            assert_equal(whole_gradients(model), whole_gradients(plain), f"gradients of step {step}")
        optimizer.step()
        reference.step()
        assert_equal(whole_parameters(model), whole_parameters(plain), f"parameters after step {step}")


@every_way
@pytest.mark.parametrize("then", ["added to", "zeroed", "stepped", "parked"])
def test_assigned_gradients_count(run_ranks, way, then) -> None:
    run_ranks(assigned, way, then)
