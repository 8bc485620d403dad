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


class Inner(nn.Module):
    """Keeps its weight, or a view of it."""

    def __init__(self, views: bool = False) -> None:
        super().__init__()
        self.layer, self.views, self.stored = nn.Linear(4, 4), views, []

    def forward(self, x: Tensor) -> Any:
        if self.views:
            self.view = self.layer.weight.t()
        else:
            self.stored.append(self.layer.weight)
        return self.layer(x)


class Later(Inner):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return (nn.functional.linear(x, self.layer.weight) for _ in range(2))


def uses_stored(model: Any, x: Tensor) -> Tensor:
    y, (weight,) = model.inner(x), model.inner.stored
    return y @ weight


def notes_of(wrap: Wrap, inner: nn.Module, use: Any, width: int = 4) -> str:
    model = wrap(Running(wrap, inner, use))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, width))
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) <= 1
    return "".join(notes)


HINTS: list[tuple[tuple[Wrap, ...], Callable[[], nn.Module], Any, tuple[str, ...]]] = [
    # front-ends, the layer in the unit, what the model does with it, words of the note
    ((fully_shard, wrapper), Inner, uses_stored, ("'inner.layer.weight'", "clone()")),
    (
        (fully_shard, wrapper),
        lambda: Inner(views=True),
        lambda m, x: m.inner(x) @ m.inner.view,
        ("'inner.layer.weight'",),
    ),
    ((wrapper,), Later, lambda m, x: sum(m.inner(x)), ("'inner.layer.weight'", "not gathered")),
    (
        (wrapper,),
        lambda: nn.Linear(4, 4),
        lambda m, x: m.layer(m.inner(x)) @ m.inner.weight,
        ("'inner.weight'", "not gathered"),
    ),
    (
        (in_half,),
        lambda: nn.Linear(4, 4),
        lambda m, x: m.inner(x) @ torch.ones(4, 4),
        ("torch.float16", "output_dtype"),
    ),
]


def test_hints_on_errors_that_sharding_causes(fake_world):
    fake_world(2)
    for wraps, inner, use, words in HINTS:
        for wrap in wraps:
            note = notes_of(wrap, inner(), use)
            assert all(word in note for word in words), note


def test_no_hints_on_other_errors(fake_world):
    """A wrong shape within a unit or outside of it, also where outer units see the error later."""
    fake_world(2)
    for wrap in (fully_shard, wrapper):
        assert notes_of(wrap, nn.Sequential(wrap(nn.Linear(4, 4))), lambda m, x: m.inner(x), width=3) == ""
        assert notes_of(wrap, nn.Linear(4, 4), lambda m, x: m.inner(x) @ x) == ""
        assert notes_of(wrap, nn.Linear(4, 4), lambda m, x: m.layer(x) @ x.half()) == ""
