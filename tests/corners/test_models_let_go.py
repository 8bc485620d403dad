"""A model that is deleted is freed at once: modules are let go when the last reference to the root goes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import fully_shard
from training import assert_same
from ways import LAYOUTS, WAYS, alone, named, shard

WIDE = 8


class Careful(nn.Module):
    """Overrides `__setattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.gain = nn.Parameter(torch.ones(WIDE))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain


def around(module: nn.Module) -> nn.Module:
    """`module` as one unit of two under a root."""
    return nn.Sequential(nn.Linear(WIDE, WIDE), module)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDE, WIDE),
    "LSTM": lambda: nn.LSTM(WIDE, WIDE),
    "GRU": lambda: nn.GRU(WIDE, WIDE, num_layers=2),
    "RNN": lambda: nn.RNN(WIDE, WIDE, bidirectional=True),
    "__setattr__": Careful,
    "LSTM below": lambda: around(nn.LSTM(WIDE, WIDE)),
    "__setattr__ below": lambda: around(Careful()),
}


def test_classes_of_deleted_models_are_let_go(fake_world):
    """Programs make classes while they run (parametrizations, adapters): none stays because it was sharded."""
    fake_world(2)
    made = type("Made", (nn.Linear,), {})
    model = nn.Sequential(*(fully_shard(made(WIDE, WIDE)) for _ in range(2)))
    assert type(model[0]) is type(model[1])
    fully_shard(model)(torch.ones(1, WIDE)).sum().backward()
    kind = weakref.ref(made)
    del made, model
    gc.collect()  # the class that a unit of it had
    gc.collect()  # its own
    assert kind() is None


def alive(way: str, kind: str, how: str) -> list[str]:
    """What is still there of a model after the last reference to it is gone."""
    below = kind.endswith("below") and way in LAYOUTS
    model: Any = shard(MODELS[kind](), way, named("1") if below else alone)
    if how != "never run":
        outputs = model(torch.ones(2, 3, WIDE))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        if how == "trained":
            outputs.sum().backward()
        del outputs
    if how == "copied":
        model = copy.deepcopy(model)
        model(torch.ones(2, 3, WIDE))
    watched = {name or "the root": weakref.ref(module) for name, module in model.named_modules()}
    watched |= {f"parameter {name}": weakref.ref(p) for name, p in model.named_parameters()}
    del model
    gc.collect()
    return [f"{name} is alive" for name, ref in watched.items() if ref() is not None]


def let_go(way: str) -> list[str]:
    hows = ("never run", "evaluated", "trained", "copied")
    return [f"{kind}, {how}: {wrong}" for kind in MODELS for how in hows for wrong in alive(way, kind, how)[:1]]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "blocks"])
def test_a_deleted_model_is_freed(run_ranks, way):
    assert_same(run_ranks(let_go, way))
