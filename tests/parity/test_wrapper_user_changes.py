"""What users of the wrapper change between steps: data, gradients, parameters; taken over, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from wrapped import batch, blocks, same, sharded, train, whole

both = pytest.mark.parametrize("originals", [True, False])


def step_after(model: Any, change: Callable[[Any], None]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, dist.get_rank())).square().mean().backward()
    change(model)
    optimizer.step()
    optimizer.zero_grad()
    return whole(fullshard, model)


def data_replaced(originals: bool) -> None:
    model = sharded(originals)
    train(model, steps=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(2)
    doubled = whole(fullshard, model)
    plain = sharded(originals)
    train(plain, steps=1)
    same(doubled, {name: 2 * tensor for name, tensor in whole(fullshard, plain).items()})
    model(batch(0, 0)).sum().backward()  # and forward computes with them
    reference = blocks()
    reference.load_state_dict(doubled)
    torch.testing.assert_close(model(batch(0, 0)), reference(batch(0, 0)))


@both
def test_replaced_data_is_taken_over(run_ranks, originals: bool) -> None:
    run_ranks(data_replaced, originals)


def data_refused(originals: bool) -> None:
    model = sharded(originals)
    train(model, steps=1)
    victim = next(p for p in model.parameters() if p.numel())
    victim.data = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"(?s)replaced.*parameter: +\S*(up|down)\."):
        model(batch(0, 0))


@both
def test_data_that_does_not_fit_is_refused_by_name(run_ranks, originals: bool) -> None:
    run_ranks(data_refused, originals)


def gradients_replaced(originals: bool) -> None:
    def negate(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = -parameter.grad.clone()

    start = whole(fullshard, sharded(originals))
    usual = step_after(sharded(originals), lambda model: None)
    turned = step_after(sharded(originals), negate)
    same(turned, {name: 2 * start[name] - usual[name] for name in start}, 1e-5, 1e-5)

    model, plain = sharded(originals), sharded(originals)  # a gradient of the user's is added to by the next backward
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in (model, plain):
        one(batch(0, dist.get_rank())).square().mean().backward()
    expected = whole_gradients(plain)
    for name, grad in whole_gradients(model).items():
        torch.testing.assert_close(grad, expected[name] + 1)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, with_grads=True):
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@both
def test_replaced_gradients_count(run_ranks, originals: bool) -> None:
    run_ranks(gradients_replaced, originals)


def reassigned(originals: bool) -> None:
    model = sharded(originals)
    train(model, steps=1)
    inner = model.module[1].module
    if originals:
        inner.up.weight = nn.Parameter(torch.full((9, 6), 0.1))
    else:
        inner._flat_param = nn.Parameter(torch.full_like(inner._flat_param, 0.1))
    out = model(batch(0, 0))
    found = whole(fullshard, model)
    assert torch.equal(found["1.up.weight"], torch.full((9, 6), 0.1))
    reference = blocks()
    reference.load_state_dict(found)
    torch.testing.assert_close(out, reference(batch(0, 0)))
    train(model, steps=1)
    assert not torch.equal(whole(fullshard, model)["1.up.weight"], found["1.up.weight"])
    if originals:
        inner.up.weight = nn.Parameter(torch.zeros(4, 4))
        said = r"1\._fsdp_wrapped_module\.up\.weight|up\.weight"
    else:
        inner.up.weight = nn.Parameter(torch.zeros(9, 6))  # lies in the flat parameter: cannot be taken from here
        said = r"up\.weight"
    with pytest.raises(ValueError, match=said):
        model(batch(0, 0))


@both
def test_a_reassigned_parameter_is_taken_over_or_refused(run_ranks, originals: bool) -> None:
    run_ranks(reassigned, originals)
