"""Parameters of dtypes that a backend's collectives may not know: complex numbers, small integers, 8-bit floats.

They train, or serve as frozen tables, as in one process; they come back whole; and they are saved and loaded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from training import full
from ways import WIDTH, WRAPPERS, batch, named, on_ranks
from ways import shard as sharded

three_ways = pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
KINDS = {"complex64": torch.complex64, "int16": torch.int16, "float8": torch.float8_e4m3fn}
KINDS |= {"uint32": torch.uint32, "bool": torch.bool}


class Spectrum(nn.Module):
    """A complex weight, and a complex scale of one element that not every rank can own a part of. `[n, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight * self.scale).abs().to(x.dtype)


class Table(nn.Module):
    """Frozen numbers in a narrow dtype, added in the input's. `[n, width]`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(0, 100, (3, WIDTH)).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.table.to(x.dtype).sum(0)


class Model(nn.Module):
    """The layer in question is a unit of its own, between two units of floats."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.first(x)))))


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Model(Spectrum() if kind == "complex64" else Table(KINDS[kind]))


def shard(model: nn.Module, way: str, **settings: Any) -> Any:
    return sharded(model, way, named("layer"), **settings)


def train(model: nn.Module, rank: int | None) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(batch(step, rank, dtype=torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters under the unwrapped model's names."""
    return {name: whole(value.detach().clone()) for name, value in model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; of rows, put together without a collective on its dtype: DTensor's own knows as few."""
    if not isinstance(tensor, DTensor):
        return full(tensor)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, as_bytes(tensor.to_local().clone()).tolist())  # 8-bit floats cannot be pickled
    together = torch.tensor([byte for part in parts for byte in part], dtype=torch.uint8)
    return together.view(tensor.dtype).view(tensor.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def check_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        if (value.dtype.is_floating_point and value.dtype.itemsize > 1) or value.dtype.is_complex:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(as_bytes(got[name]), as_bytes(value)), name


def trains_as(model: nn.Module, reference: nn.Module) -> None:
    want, mine = train(reference, None), torch.tensor(train(model, dist.get_rank()), dtype=torch.float64)
    dist.all_reduce(mine)
    world = dist.get_world_size()
    torch.testing.assert_close(mine / world, torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    check_same(whole_state(model), dict(reference.state_dict()))


@three_ways
@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_as_one_process(way: str, kind: str) -> None:
    model = shard(make(kind), way)
    trains_as(model, make(kind))
    if kind in ("int16", "float8") and way not in WRAPPERS:
        check_same({"table": model.layer.table.full_tensor()}, {"table": make(kind).layer.table.detach()})


@three_ways
@pytest.mark.parametrize("kind", ["complex64", "float8"])
@on_ranks
def test_saved_and_loaded(way: str, kind: str) -> None:
    model, x = shard(make(kind), way), batch(0, 0, dtype=torch.float32)
    before = model(x)
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert model(x).equal(before)


@pytest.mark.parametrize("kind", ["complex64", "int16", "float8"])
@on_ranks
def test_module_states_are_synchronised(kind: str) -> None:
    """`sync_module_states` sends what the backend may not know, too."""
    model = make(kind)
    if dist.get_rank():
        for parameter in model.parameters():
            parameter.data.zero_()
    check_same(whole_state(shard(model, "originals", sync_module_states=True)), dict(make(kind).state_dict()))


@three_ways
@on_ranks
def test_complex_gradients_are_reduced_whole_and_clipped(way: str) -> None:
    """Mixed precision is of real numbers; a norm is of absolute values, and both clipping functions give it."""
    low: dict[str, Any] = {"reduce_dtype": torch.float64}
    policy = {"mp_policy": fullshard.MixedPrecisionPolicy(**low)}
    given = {"mixed_precision": fullshard.MixedPrecision(**low)} if way in WRAPPERS else policy
    trains_as(shard(make("complex64"), way, **given), make("complex64"))
    reference, model = make("complex64"), shard(make("complex64"), way)
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, rank, dtype=torch.float32)).square().mean().backward()
    want, clip = nn.utils.clip_grad_norm_(reference.parameters(), 0.01), fullshard.clip_grad_norm_
    got = model.clip_grad_norm_(0.01) if way in WRAPPERS else full(clip(model.parameters(), 0.01))
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-7)
    for parameter, other in () if way in WRAPPERS else zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["rows", "flat"])
@on_ranks
def test_several_dtypes_in_one_unit(way: str) -> None:
    """Floats, complex numbers and both kinds of table together in one unit."""
    torch.manual_seed(3)
    tables = (Table(dtype) for dtype in (torch.int16, torch.float8_e4m3fn))
    reference = Model(nn.Sequential(Spectrum(), *tables, nn.Linear(WIDTH, WIDTH)))
    trains_as(shard(copy.deepcopy(reference), way), reference)
