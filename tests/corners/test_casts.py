"""`half()`, `double()` and `to(dtype)` of a sharded model, on ranks that hold nothing of a unit too.

Every rank must notice: a rank that gathers in the old dtype sends other sizes than its neighbours, and the backend
aborts the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from ways import (
    LAYOUTS,
    differences,
    example_of,
    inner,
    on_ranks,
    shard,
    sharded,
    some_ways,
    whole_gradients,
    whole_parameters,
)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Net(nn.Module):
    """A unit of two elements, of which one rank of two holds nothing; one of one element; and an ordinary one."""

    dtype: torch.dtype | None = None  # of the small unit, where it is another one than that of the rest

    def __init__(self) -> None:
        super().__init__()
        self.small, self.gain, self.wide = nn.Linear(2, 1, bias=False), Gain(), nn.Linear(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.small(x.to(self.dtype or x.dtype)))
        return self.wide(self.gain(y.to(x.dtype)))


NET = example_of(Net, "small", "gain", "wide")
PARTS = example_of(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), nn.Linear(2, 2)), "0")


def batch(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def backward(model: nn.Module, dtype: torch.dtype) -> None:
    model(batch(dist.get_rank(), dtype)).square().mean().backward()


def compared(where: str, model: nn.Module, whole: nn.Module, dtype: torch.dtype, tolerance: float) -> list[str]:
    """A step's gradients, from none, and the parameters; their dtypes too."""
    model.zero_grad(), whole.zero_grad()
    backward(model, dtype)
    for rank in range(dist.get_world_size()):
        (whole(batch(rank, dtype)).square().mean() / dist.get_world_size()).backward()
    want = {n: p.grad for n, p in whole.named_parameters()}
    problems = differences(f"{where}: gradients", whole_gradients(model), want, tolerance)
    return problems + differences(
        where, whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, 0
    )


def module_of(model: nn.Module, name: str) -> Any:
    return next(m for n, m in model.named_modules() if n.replace("_fsdp_wrapped_module.", "") == name)


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.double()


def assigned(model: nn.Module) -> None:
    model.load_state_dict({n: v.double() for n, v in model.state_dict().items()}, assign=True)


CASTS: dict[str, tuple[Callable[[nn.Module], object], torch.dtype, float]] = {  # and the tolerance
    "double": (lambda model: model.double(), torch.float64, 1e-12),
    "half": (lambda model: model.half(), torch.float16, 1e-2),
    "half and back": (lambda model: model.half().float(), torch.float32, 1e-6),
    "data": (through_data, torch.float64, 1e-12),
    "twice": (lambda model: model.half().to(torch.float64), torch.float64, 1e-12),
    "loaded": (assigned, torch.float64, 1e-12),
}


@some_ways
@pytest.mark.parametrize("when", ["before the first step", "after it", "with gradients"])
@on_ranks
def test_a_cast_is_noticed_by_every_rank(way: str, when: str) -> list[str]:
    problems = []
    for name, (function, dtype, tolerance) in CASTS.items():
        if name == "loaded" and (way not in LAYOUTS or when == "with gradients"):
            continue  # the wrapper's state dicts are whole tensors
        model, whole = sharded(NET, way, dtype=torch.float32), NET.make()
        if when != "before the first step":
            backward(model, torch.float32)
        if when == "after it":
            model.zero_grad()
        elif when == "with gradients":
            for parameter, own in whole_gradients(model).items():
                whole.get_parameter(parameter).grad = own.clone()
        function(model), function(whole)
        if when == "with gradients" and name != "data":
            want = {n: p.grad for n, p in whole.named_parameters()}
            problems += differences(f"{name}: gradients that were there", whole_gradients(model), want, 0)
        for step in range(2):
            problems += compared(f"{name}, step {step}", model, whole, dtype, tolerance)
    return problems


@some_ways
@on_ranks
def test_a_cast_of_one_unit(way: str) -> list[str]:
    """The unit of which a rank holds nothing alone; the others stay as they are."""
    problems = []
    for cast in (through_data, nn.Module.double):
        model, whole = sharded(NET, way, dtype=torch.float32), NET.make()
        backward(model, torch.float32)
        for each in (model, whole):
            cast(module_of(each, "small"))
            inner(each).dtype = torch.float64
        problems += compared(cast.__name__, model, whole, torch.float32, 1e-6)
    return problems


@pytest.mark.parametrize("way", ["rows", "flat", "originals"])
@pytest.mark.parametrize("late", [False, True], ids=["before the first step", "after it"])
@on_ranks
def test_a_cast_of_a_part_of_a_unit_is_refused_by_name(way: str, late: bool) -> list[str]:
    """On every rank, before anything is changed: once the rest is cast too, training goes on."""
    model, whole = sharded(PARTS, way, dtype=torch.float32), PARTS.make().double()
    if late:
        backward(model, torch.float32)
        model.zero_grad()
    module_of(model, "0.1").double(), module_of(model, "1").double()
    for _ in range(2):
        with pytest.raises(fullshard.ConfigError, match=r"float64: 0\.1\.weight, 0\.1\.bias"):
            model(batch(dist.get_rank(), torch.float32))
    module_of(model, "0.0").double()
    return compared("cast", model, whole, torch.float64, 1e-6)


@on_ranks
def test_a_cast_of_a_part_of_a_flat_parameter_casts_nothing() -> list[str]:
    """The part has no parameters of its own: they are in its unit's one `FlatParameter`, as in PyTorch's."""
    model = sharded(PARTS, "wrapper", dtype=torch.float32)
    module_of(model, "0.1").double()
    return compared("cast", model, PARTS.make(), torch.float32, 1e-6)


@pytest.mark.parametrize("way", ["rows", "flat"])
@on_ranks
def test_values_given_to_a_meta_model_through_data_are_refused(way: str) -> None:
    """As torch refuses them of a plain parameter; nothing has changed."""
    with torch.device("meta"):
        meta = shard(Net(), way)
    for p in meta.parameters():
        with pytest.raises(fullshard.ConfigError, match=r"meta device(.|\n)*to_empty"):
            p.data = torch.ones_like(p.data, device="cpu")
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for p in meta.parameters():
            p.fill_(1.0)
    assert all((whole == 1.0).all() for whole in whole_parameters(meta).values())
