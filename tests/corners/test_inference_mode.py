"""Under `torch.inference_mode` sharded parameters are read, saved and loaded as outside of it, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard

READS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda weight: weight.detach(),
    "clone": lambda weight: weight.detach().clone(),
    "data": lambda weight: weight.data,
    "deepcopy": copy.deepcopy,
    "gradient": lambda weight: weight.grad.detach() * 2,
    "to": lambda weight: weight.to(torch.float64),
    "sum": lambda weight: weight - 1,
    "full_tensor": lambda weight: weight.full_tensor(),
    "norm": lambda weight: weight.norm(),
}
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda weight: weight.t(),
    "rows": lambda weight: weight[1:],
    "view": lambda weight: weight.view(3, 1, 5),
}


def trained(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
    for layer in model:
        fullshard.fully_shard(layer, layout=layout)
    fullshard.fully_shard(model, layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def read(layout: str) -> list[str]:
    """Reads whose values differ from those outside of inference mode, or whose views may not be used there."""
    model, _ = trained(layout)
    weight: Any = model[0].weight
    wrong = []
    for name, function in {**READS, **(OF_ROWS if layout == "rows" else {})}.items():
        with torch.no_grad():
            expected = whole(function(weight))
        with torch.inference_mode():
            got = function(weight)
            inside = whole(got)
        if not torch.equal(inside, expected) or not torch.equal(whole(got), expected):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_parameters_are_read_in_inference_mode(run_ranks, layout):
    assert run_ranks(read, layout) == [[]] * 2


def written(layout: str) -> tuple[bool, str]:
    """Whether a view made in inference mode shares memory; and the error if it is written to before a backward."""
    model, _ = trained(layout)
    loss = model(torch.ones(2, 5)).sum()
    with torch.inference_mode():
        view = model[0].weight.detach()
    view.zero_()
    try:
        for _ in range(3):  # an accelerator's ranks compare two backwards later
            loss.backward()
            loss = model(torch.ones(2, 5)).sum()
    except fullshard.PhaseError as error:
        return not whole(model[0].weight).any(), str(error)
    return not whole(model[0].weight).any(), ""


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_write_through_a_view_made_in_inference_mode_is_noticed(run_ranks, layout):
    for shares, error in run_ranks(written, layout):
        assert shares and "0.weight" in error


def evaluated(layout: str, folder: str) -> bool:
    """Whether a model that was saved and loaded by an evaluation trains on like one that was not evaluated."""
    losses = []
    for evaluates in (False, True):
        model, optimizer = trained(layout)
        if evaluates:
            with torch.inference_mode():
                model(torch.ones(2, 5))
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                fullshard.save(folder, model, optimizer)
                model[0].weight.zero_()
                fullshard.load(folder, model, optimizer)
        for _ in range(3):
            model.zero_grad()
            losses.append(model(torch.ones(2, 5)).sum())
            losses[-1].backward()
            optimizer.step()
    return [loss.item() for loss in losses[:3]] == [loss.item() for loss in losses[3:]]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_an_evaluation_in_inference_mode_saves_and_loads(run_ranks, layout, tmp_path: Path):
    assert run_ranks(evaluated, layout, str(tmp_path / "checkpoint")) == [True] * 2


def assigned(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    return model


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: 2 * value.detach() for name, value in model.state_dict().items()}, assign=True)
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "assigned": assigned,
    "loaded": loaded,
    "cast": lambda model: model.double(),
    "copied": copy.deepcopy,
}


def changed(layout: str, name: str, mode: Any) -> list[float]:
    """Losses of a model whose storage was replaced, first used or even replaced in `mode`, and that trains on."""
    losses = []
    for inside in (False, True):
        model, _ = trained(layout)
        with mode() if inside else torch.no_grad():
            model = CHANGES[name](model)
        ones = torch.ones(2, 5, dtype=torch.float64 if name == "cast" else None)
        with mode():
            losses.append(model(ones).sum().item())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            loss = model(ones).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_storage_replaced_before_or_in_inference_mode(run_ranks, layout, name):
    expected = run_ranks(changed, layout, name, torch.no_grad)
    assert run_ranks(changed, layout, name, torch.inference_mode) == expected
