"""`half()`, `double()` and `to(dtype)` of a sharded model, on ranks that hold nothing of a unit too.

Every rank must notice: a rank that gathers in the old dtype sends other sizes than its neighbours, and the backend
aborts the process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from ways import (
    WAYS,
    assert_equal,
    every_layout,
    every_parameter,
    every_way,
    example_of,
    sharded,
    whole_gradients,
    whole_parameters,
)

SECONDS = 40  # a hang is this, not a minute


class Net(nn.Module):
    """A unit of two elements, of which one rank of two holds nothing; one of one element; and an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(2, 1, bias=False)
        self.gain = Gain()
        self.wide = nn.Linear(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.gain(torch.tanh(self.small(x))))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


NET = example_of(Net, "small", "gain", "wide")


def batch(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.double()


def through_data_of(name: str) -> Callable[[nn.Module], None]:
    def cast(model: nn.Module) -> None:
        for p in module_of(model, name).parameters():
            p.data = p.data.double()

    return cast


def module_of(model: nn.Module, name: str) -> nn.Module:
    return next(m for n, m in model.named_modules() if n.replace("_fsdp_wrapped_module.", "") == name)


CASTS: dict[str, tuple[Callable[[nn.Module], object], torch.dtype, float]] = {  # and the tolerance
    "double": (lambda model: model.double(), torch.float64, 1e-12),
    "to": (lambda model: model.to(torch.float64), torch.float64, 1e-12),
    "half": (lambda model: model.half(), torch.float16, 1e-2),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16, 5e-2),
    "half and back": (lambda model: model.half().float(), torch.float32, 1e-6),
    "data": (through_data, torch.float64, 1e-12),
    "twice": (lambda model: model.half().double(), torch.float64, 1e-12),
}


@every_way
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("when", ["before the first step", "after it", "with gradients"])
def test_a_cast_is_noticed_by_every_rank(run_ranks, way, cast, when):
    assert all(run_ranks(casting, way, cast, when, timeout=SECONDS))


def casting(way: str, cast: str, when: str) -> bool:
    function, dtype, tolerance = CASTS[cast]
    model, whole = sharded(NET, way, dtype=torch.float32), NET.make()
    if when != "before the first step":
        model(batch(dist.get_rank(), torch.float32)).square().mean().backward()
    if when == "after it":
        model.zero_grad()
    function(model)
    function(whole)
    if when == "with gradients":
        model.zero_grad()
    assert {p.dtype for p in model.parameters()} == {dtype}
    for step in range(2):
        model.zero_grad()
        whole.zero_grad()
        model(batch(dist.get_rank(), dtype)).square().mean().backward()
        for rank in range(2):
            (whole(batch(rank, dtype)).square().mean() / 2).backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
        got, want = whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}
        assert_equal(wide(got), wide(want), f"gradients of step {step}", tolerance)
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 0.0)
    return True


def wide(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


@every_way
@pytest.mark.parametrize("through", ["the module", "data"])
def test_a_cast_of_one_unit(run_ranks, way, through):
    """The unit of which a rank holds nothing alone; the others stay as they are."""
    assert all(run_ranks(casting_one, way, through, timeout=SECONDS))


class Converting(Net):
    """Its small unit may be of another dtype than the rest."""

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.gain(torch.tanh(self.small(x.to(self.dtype))).float()))

    dtype = torch.float32


def casting_one(way: str, through: str) -> bool:
    example = example_of(Converting, "small", "gain", "wide")
    model, whole = sharded(example, way, dtype=torch.float32), example.make()
    model(batch(dist.get_rank(), torch.float32)).square().mean().backward()
    model.zero_grad()
    for each in (model, whole):
        if through == "data":
            through_data_of("small")(each)
        else:
            module_of(each, "small").double()
        module_of(each, "").__dict__["dtype"] = torch.float64
        getattr(each, "module", each).__dict__["dtype"] = torch.float64
    model(batch(dist.get_rank(), torch.float32)).square().mean().backward()
    for rank in range(2):
        (whole(batch(rank, torch.float32)).square().mean() / 2).backward()
    assert {n: p.dtype for n, p in whole_parameters(model).items()} == {n: p.dtype for n, p in whole.named_parameters()}
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients", 1e-6)
    return True


class Pair(nn.Module):
    """Two layers of one unit, of which one may be cast alone."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(torch.tanh(self.low(x.to(self.dtypes[0]))).to(self.dtypes[1]))

    dtypes = (torch.float32, torch.float32)


@every_parameter
@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_a_cast_of_a_part_of_a_unit_is_refused_by_name(run_ranks, way, when):
    assert all(run_ranks(casting_part, way, when, timeout=SECONDS))


def casting_part(way: str, when: str) -> bool:
    """On every rank, before anything is changed: once the rest is cast too, training goes on."""
    example = example_of(lambda: nn.Sequential(Pair(), nn.Linear(2, 2)), "0")
    model, whole = sharded(example, way, dtype=torch.float32), example.make()
    if when == "after it":
        model(batch(dist.get_rank(), torch.float32)).square().mean().backward()
        model.zero_grad()
    cast(model, "0.high", "1")
    for _ in range(2):
        with pytest.raises(fullshard.ConfigError, match=r"float64: 0\.high\.weight, 0\.high\.bias"):
            model(batch(dist.get_rank(), torch.float32))
    cast(model, "0.low")
    cast(whole, "0.high", "1", "0.low")
    model(batch(dist.get_rank(), torch.float32)).square().mean().backward()
    for rank in range(2):
        (whole(batch(rank, torch.float32)).square().mean() / 2).backward()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients", 1e-6)
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 0.0)
    return True


def cast(model: nn.Module, *names: str) -> None:
    for name in names:
        module_of(model, name).double()
    for module in model.modules():
        if isinstance(module, Pair):
            module.dtypes = tuple(
                torch.float64 if f"0.{n}" in names else d for n, d in zip(("low", "high"), module.dtypes, strict=True)
            )


def test_a_cast_of_a_part_of_a_flat_parameter_casts_nothing(run_ranks):
    """The part has no parameters of its own: they are in its unit's one `FlatParameter`, as in PyTorch's."""
    assert all(run_ranks(casting_part_of_flat, timeout=SECONDS))


def casting_part_of_flat() -> bool:
    model = sharded(example_of(lambda: nn.Sequential(Pair(), nn.Linear(2, 2)), "0"), "wrapper", dtype=torch.float32)
    assert not list(module_of(model, "0.high").parameters())
    module_of(model, "0.high").double()
    model(batch(dist.get_rank(), torch.float32)).square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return True


@every_layout
def test_a_load_that_assigns_another_dtype_is_noticed_by_every_rank(run_ranks, way):
    assert all(run_ranks(assigning, way, timeout=SECONDS))


def assigning(way: str) -> bool:
    model = sharded(NET, way, dtype=torch.float32)
    model(batch(dist.get_rank(), torch.float32)).sum().backward()
    model.zero_grad()
    model.load_state_dict({n: v.double() for n, v in model.state_dict().items()}, assign=True)
    whole = NET.make().double()
    model(batch(dist.get_rank(), torch.float64)).square().mean().backward()
    for rank in range(2):
        (whole(batch(rank, torch.float64)).square().mean() / 2).backward()
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients")
    return True


@every_layout
def test_values_given_to_a_meta_model_through_data_are_refused(run_ranks, way):
    assert all(run_ranks(materialised, way, timeout=SECONDS))


def materialised(way: str) -> bool:
    """As torch refuses them of a plain parameter; nothing has changed."""
    with torch.device("meta"):
        meta = Net()
    given = dict(WAYS[way])
    for name in ("small", "gain", "wide", ""):
        fullshard.fully_shard(meta.get_submodule(name), **given)
    for p in meta.parameters():
        with pytest.raises(fullshard.ConfigError, match=r"meta device(.|\n)*to_empty"):
            p.data = torch.ones_like(p.data, device="cpu")
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for p in meta.parameters():
            p.fill_(1.0)
    assert all((whole == 1.0).all() for whole in whole_parameters(meta).values())
    return True
