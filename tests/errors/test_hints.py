"""Errors of torch's own that sharding causes have a note that names the parameter and what to do. Others have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

Wrap = Callable[[nn.Module], nn.Module]


def wrapper(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def in_half(module: nn.Module) -> nn.Module:
    return fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))


class Running(nn.Module):
    """A layer in a unit, and what the model does with it."""

    def __init__(self, wrap: Wrap, inner: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.layer, self.use = wrap(inner), nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.stored = nn.Linear(4, 4), []

    def forward(self, x: Tensor) -> Tensor:
        self.stored.append(self.layer.weight)
        return self.layer(x)


class KeepingAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.transposed = self.layer.weight.t()
        return self.layer(x)


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return (nn.functional.linear(x, self.layer.weight) for _ in range(2))


def uses_stored(model: Any, x: Tensor) -> Tensor:
    y = model.inner(x)
    weight = model.inner.stored[0]
    return y @ weight


def uses_the_view(model: Any, x: Tensor) -> Tensor:
    return model.inner(x) @ model.inner.transposed


def uses_the_childs_weight(model: Any, x: Tensor) -> Tensor:
    y = model.layer(model.inner(x))
    return y @ model.inner.weight


def sums(model: Any, x: Tensor) -> Tensor:
    return sum(model.inner(x))


def mixes_dtypes(model: Any, x: Tensor) -> Tensor:
    return model.inner(x) @ torch.ones(4, 4)


def fails_by_itself(model: Any, x: Tensor) -> Tensor:
    return model.inner(x)


def notes_of(wrap: Wrap, inner: nn.Module, use: Any, width: int = 4) -> str:
    model = wrap(Running(wrap, inner, use))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, width))
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) <= 1
    return "".join(notes)


def test_hints_on_errors_that_sharding_causes(fake_world):
    fake_world(2)
    for wrap in (fully_shard, wrapper):
        assert "'inner.layer.weight'" in (note := notes_of(wrap, Storing(), uses_stored)), note
        assert "clone()" in note
        assert "'inner.layer.weight'" in (note := notes_of(wrap, KeepingAView(), uses_the_view)), note
    for inner, use in ((Later(), sums), (nn.Linear(4, 4), uses_the_childs_weight)):
        note = notes_of(wrapper, inner, use)
        assert "'inner." in note and "weight'" in note and "not gathered" in note, note
    note = notes_of(in_half, nn.Linear(4, 4), mixes_dtypes)
    assert "torch.float16" in note and "output_dtype" in note


def test_no_hints_on_other_errors(fake_world):
    """A wrong shape within a unit or outside of it, also where outer units see the error later."""
    fake_world(2)
    for wrap in (fully_shard, wrapper):
        assert notes_of(wrap, nn.Sequential(wrap(nn.Linear(4, 4))), fails_by_itself, width=3) == ""
        assert notes_of(wrap, nn.Linear(4, 4), lambda model, x: model.inner(x) @ x) == ""
        assert notes_of(wrap, nn.Linear(4, 4), lambda model, x: model.layer(x) @ x.half()) == ""
