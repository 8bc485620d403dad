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
from ways import LAYOUTS, alone, named, shard, some_ways

WIDE = 8


class Careful(nn.Linear):
    """Overrides `__setattr__`."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDE, WIDE),
    "LSTM": lambda: nn.LSTM(WIDE, WIDE),
    "GRU": lambda: nn.GRU(WIDE, WIDE, num_layers=2, bidirectional=True),
    "__setattr__": Careful,
    "LSTM below": lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.LSTM(WIDE, WIDE)),
    "__setattr__ below": lambda: nn.Sequential(nn.Linear(WIDE, WIDE), Careful()),
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


def watched(way: str, kind: str, how: str) -> dict[str, weakref.ref]:
    """What a model consists of, after the last other reference to it is gone."""
    below = kind.endswith("below") and way in LAYOUTS
    model: Any = shard(MODELS[kind](), way, named("1") if below else alone)
    if how != "never run":
        outputs = model(torch.ones(2, 3, WIDE))
        outputs: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        if how == "trained":
            outputs.sum().backward()
    if how == "copied":
        model = copy.deepcopy(model)
        model(torch.ones(2, 3, WIDE))
    return {name: weakref.ref(each) for name, each in [*model.named_modules(), *model.named_parameters()]}


@some_ways
@pytest.mark.parametrize("how", ["never run", "evaluated", "trained", "copied"])
def test_a_deleted_model_is_freed(fake_world, way, how):
    fake_world(2)
    refs = {kind: watched(way, kind, how) for kind in MODELS}
    gc.collect()
    alive = [(kind, name) for kind, of_model in refs.items() for name, ref in of_model.items() if ref() is not None]
    assert not alive
