"""Errors of what is done to parameters and graphs, and when; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import linear
from torch.nn.utils.parametrize import register_parametrization

import fullshard
from fullshard import fully_shard
from fullshard.comm import TorchComm
from fullshard.runtime.units import unit_of
from fullshard.shard.gradients import GradState
from raising import ONE, assert_raises, raises, run, sharded, step, two_layers, unit, warns, words_of, wrapped


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


class Writing(nn.Linear):
    """A layer that changes its own weight while it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


KEPT: list[torch.Tensor] = []


class Keeps(nn.Linear):
    """Leaves a part of what it computes in a list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.append(torch.tanh(x @ self.weight).exp() @ self.weight)
        return super().forward(x)


class Held:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Shows(nn.Linear):
    """Returns a view of its weight, in an object."""

    def forward(self, x: torch.Tensor) -> Held:
        return Held(self.weight[0])


class Half(nn.Sequential):
    """Does not use the bias of its first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](x @ self[0].weight)


def assign(m: nn.Module, *_: object) -> None:
    m.weight = nn.Parameter(torch.ones(4, 4))


def assigning() -> nn.Module:
    """Replaces its weights in forward."""
    model = sharded()
    for layer in model:
        layer.register_forward_pre_hook(assign)
    return model


def flat() -> nn.Module:
    return fully_shard(nn.Linear(4, 4, bias=False), layout="flat")


def tied() -> nn.Module:
    """Two units of one weight."""
    model = two_layers()
    model[1].weight = model[0].weight
    for layer in model:
        fully_shard(layer)
    return model


CALLS = [
    # What is done to parameters, and when.
    (
        two_layers,
        lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight.data)),
        fully_shard,
        "LayoutError: Two Parameter objects share the same memory: sharded",
    ),
    (
        lambda: setattr(unit().weight, "data", torch.ones(4, 4)),
        "ConfigError: A sharded parameter's ... RowShard of shape",
    ),
    (
        unit,
        lambda m: setattr(m.weight, "data", m.weight.data.to("meta")),
        "ConfigError: Setting .data cannot move a sharded parameter to or from",
    ),
    (
        sharded,
        run,
        lambda m: assign(m[1]),
        run,
        "ReplacementError: A sharded parameter was replaced by something that ... 1.weight ... expected ... remedy",
    ),
    (
        unit,
        lambda m: m.weight.register_hook(lambda grad: torch.ones(4, 4)),
        step,
        "ConfigError: A hook on a sharded parameter returned an invalid",
    ),
    (
        wrapped,
        lambda m: m.module[0].register_forward_hook(lambda *_: m.state_dict() and None),
        run,
        "PhaseError: state_dict() was called inside forward or backward",
    ),
    (flat, lambda m: linear(ONE, m.weight), "PhaseError: aten.t.default is not supported on a flat shard, of which"),
    (unit, lambda m: linear(ONE, m.weight), "PhaseError: linear was called with a plain tensor and a sharded"),
    (
        sharded,
        lambda m: register_parametrization(m[0], "weight", nn.Identity()),
        run,
        "PhaseError: linear was called with a plain ... if the parametrization was registered on a sharded module, "
        "register it before sharding",
    ),
    (
        unit,
        lambda m: (m(ONE).sum() + m.weight.pow(2).sum()).backward(),
        "PhaseError: backward was called with a plain ... remedy:    add penalty.full_tensor() to the loss",
    ),
    (
        sharded,
        run,
        lambda m: setattr(m[0], "scale", nn.Parameter(torch.ones(4))),
        run,
        "PhaseError: Parameters were added to a sharded model and belong to no",
    ),
    (
        sharded,
        lambda m: m[0].register_forward_hook(lambda *_: copy.deepcopy(m)),
        run,
        "PhaseError: Sequential was deep-copied while a forward or backward through it",
    ),
    (
        sharded,
        lambda m: torch.ones(1, requires_grad=True).sum().backward(inputs=[m[0].weight]),
        "PhaseError: backward(inputs=...) names a parameter whose unit has not run yet",
    ),
    (
        lambda: fully_shard(nn.Sequential(fully_shard(Shows(4, 4)), nn.Identity())),
        run,
        "PhaseError: A forward returned an object that holds a view of a gathered",
    ),
    (
        lambda: torch.vmap(unit())(torch.ones(2, 4)),
        "PhaseError: The forward of unit '(Linear)' was called under",
    ),
    (
        sharded,
        lambda m: m.set_requires_gradient_sync(False),
        step,
        fullshard.park,
        "PhaseError: Unit '0' cannot be parked now: it has gradients not yet",
    ),
    (
        lambda: fully_shard(nn.Embedding(4, 4, sparse=True)),
        lambda m: m(torch.tensor([1])).sum().backward(),
        "PhaseError: A parameter has a sparse gradient",
    ),
    (lambda: fully_shard(Writing(4, 4)), run, "PhaseError: A gathered parameter was written to"),
    (assigning, run, "PhaseError: A parameter was assigned to a module of a sharded model inside a"),
    # Graphs, copies and roots.
    (
        lambda: nn.Linear(4, 4),
        lambda m: _apply_optimizer_in_backward(torch.optim.SGD, m.parameters(), {"lr": 0.1}),
        fully_shard,
        step,
        "PhaseError: An optimizer was attached to a parameter before sharding",
    ),
    (
        two_layers,
        lambda m: fully_shard([m[0], m[1]]),
        lambda m: copy.deepcopy(m[0]),
        "PhaseError: Linear is in one unit with",
    ),
    (
        lambda: fully_shard(nn.Sequential(fully_shard(Keeps(4, 4)), nn.Linear(4, 4))),
        run,
        lambda m: KEPT.pop().sum().backward(),
        "PhaseError: A backward needs a tensor that is gone",
    ),
    (
        unit,
        lambda m: m.register_forward_pre_hook(lambda *_: m.reshard()),
        run,
        "PhaseError: reshard() is not allowed for unit '(root)'",
    ),
    (tied, lambda m: copy.deepcopy(m[0]), "PhaseError: A part of a sharded model was deep-copied, and one of its"),
    # What units assert of themselves: in another state they stop, and change nothing.
    (
        lambda: unit_of(unit()),
        lambda unit: setattr(unit.gradients[0], "state", GradState.REDUCING),
        lambda unit: unit.gradients[0].collect(unit.ledger),
        "AssertionError: gradients were collected while their bucket is being reduced",
    ),
    (
        unit,
        lambda m: m.unshard(),
        lambda m: unit_of(m).issue_gather(TorchComm()),
        "AssertionError: unit '(Linear)' is gathered; only a sharded one is gathered",
    ),
    (
        lambda: unit_of(unit()).finish_gather(),
        "AssertionError: unit '(Linear)' is sharded; there is no gather",
    ),
    (lambda: unit_of(unit()).free(), "AssertionError: unit '(Linear)' is already sharded; there is nothing to free"),
    (lambda: unit_of(unit()).give_up(torch.ones(4)), "AssertionError: unit '(Linear)' lacks what it should give up"),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


def test_a_weight_that_is_changed_between_forward_and_backward():
    model = sharded()
    loss = run(model).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with raises("UsageError: Weights of unit '0' were changed between a forward and its"):
        loss.backward()


def test_pickling_a_flat_shard(tmp_path):
    with raises("PhaseError: FlatShard 'weight' contains a part of a parameter and a"):
        torch.save(flat().weight, tmp_path / "weight.pt")


def test_gradients_asked_of_autograd_itself():
    model = sharded()
    loss = run(model).sum()
    with raises("PhaseError: torch.autograd.grad was asked for gradients of sharded parameters"):
        torch.autograd.grad(loss, [model[0].weight])


def test_freeing_a_unit_twice_is_nothing():
    model = sharded()
    model.reshard()
    model.reshard()


class Turning(nn.Sequential):
    """Runs its layers in the other order once it is told to."""

    turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = list(self)[::-1] if self.turned else self
        return second(first(x))


def test_an_order_of_units_that_changes_is_told(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_debug_level", lambda: torch.distributed.DebugLevel.DETAIL)
    model = fully_shard(Turning(unit(), unit()))
    step(model)
    model.turned = True
    with warns("UserWarning: Forward order differs from that of the first iteration"):
        run(model)


def test_counting_tokens_within_a_backward():
    model = sharded(reduction="tokens")
    fullshard.set_token_count(model, 8)
    out = run(model)
    out.register_hook(lambda _: fullshard.set_token_count(model, 8))
    with raises("PhaseError: set_token_count was called during a backward"):
        out.sum().backward()


def test_a_unit_of_two_roots_that_run():
    shared = unit()
    first, second = (fully_shard(nn.Sequential(shared, nn.Linear(4, 4))) for _ in range(2))
    run(first)
    first[1].register_forward_hook(lambda *_: run(second) and None)
    with raises("PhaseError: Unit '0' belongs to two roots, and the forward or"):
        run(first)


def test_a_backward_whose_root_is_gone():
    model = sharded()
    layer, loss = model[0], run(model).sum()
    del model
    gc.collect()
    with raises("PhaseError: A backward reached a unit whose root module was deleted."):
        loss.backward()
    assert layer


def test_a_parameter_without_a_gradient_in_a_view():
    model = fully_shard(Half(*two_layers()), layout="flat")
    optimizer = torch.optim.SGD(fullshard.optimizer_view(model), lr=0.1)
    with warns("UserWarning: A parameter got no gradient in this step"):
        step(model)
    optimizer.step()


def test_a_parameter_of_a_view_that_is_frozen_later():
    model = fully_shard(nn.Sequential(*two_layers()), layout="flat")
    optimizer = torch.optim.AdamW(fullshard.optimizer_view(model), lr=0.1)
    for trains in (True, False):
        model[0].bias.requires_grad_(trains)
        with contextlib.nullcontext() if trains else warns("UserWarning: A parameter got no gradient in this"):
            step(model)
        optimizer.step()
        optimizer.zero_grad()
