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
from fullshard import FullyShardedDataParallel
from training import full

WIDTH = 5
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int16, torch.uint16, torch.uint32, torch.bool)
FRONTS = ("rows", "flat", fullshard.Blocks("row"), "owner", "wrapper orig", "wrapper flat")


class Spectrum(nn.Module):
    """A complex weight, and a complex scale of one element that not every rank can own a part of. `[n, width]`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.scale = nn.Parameter(torch.randn(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight * self.scale).abs().to(x.dtype)


class Table(nn.Module):
    """Frozen numbers in a narrow dtype, added in the input's. `[n, width]`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.randint(0, 100, (3, WIDTH)).to(dtype)
        self.table = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.table.to(x.dtype).sum(0)


class Model(nn.Module):
    """The layer in question is a unit of its own, between two units of floats."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.first(x)))))


def shard(model: nn.Module, front: Any) -> nn.Module:
    """The layer, then the root, each a unit."""
    if front in ("wrapper orig", "wrapper flat"):
        orig = front == "wrapper orig"
        model.layer = FullyShardedDataParallel(model.layer, use_orig_params=orig)
        return FullyShardedDataParallel(model, use_orig_params=orig)
    fullshard.fully_shard(model.layer, layout=front, reshard_after_forward=True)
    return fullshard.fully_shard(model, layout=front)


def make(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Model(Spectrum(dtype) if kind == "spectrum" else Table(dtype))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, ranks: list[int]) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        x = torch.cat([batch(step, rank) for rank in ranks])
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters under the unwrapped model's names."""
    if isinstance(model, FullyShardedDataParallel):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {name: whole(value) for name, value in model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; of rows, put together without a collective on its dtype: DTensor's own knows as few."""
    if not isinstance(tensor, DTensor):
        return full(tensor)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, as_bytes(tensor.to_local().clone()).tolist())  # 8-bit floats cannot be pickled
    together = torch.tensor([byte for part in parts for byte in part], dtype=torch.uint8)
    return together.view(tensor.dtype).view(tensor.shape)


def full_tensor_is_whole(dtype: torch.dtype, front: Any) -> None:
    want = make("table", dtype).layer.table
    got = shard(make("table", dtype), front).layer.table.full_tensor()
    check_same({"table": got}, {"table": want.detach()})


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


def as_one_process(kind: str, dtype: torch.dtype, front: Any) -> None:
    reference, model = make(kind, dtype), shard(make(kind, dtype), front)
    ranks = list(range(dist.get_world_size()))
    want, mine = train(reference, ranks), torch.tensor(train(model, [dist.get_rank()]), dtype=torch.float64)
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / len(ranks), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    check_same(whole_state(model), dict(reference.state_dict()))


def loads_what_it_saved(kind: str, dtype: torch.dtype, front: Any) -> None:
    model = shard(make(kind, dtype), front)
    before = model(batch(0, 0))
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert model(batch(0, 0)).equal(before)


def starts_from_rank_0(dtype: torch.dtype, kind: str, orig: bool) -> None:
    """`sync_module_states` sends what the backend may not know, too."""
    model = make(kind, dtype)
    want = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if dist.get_rank():
        for parameter in model.parameters():
            parameter.data.zero_()
    model.layer = FullyShardedDataParallel(model.layer, use_orig_params=orig, sync_module_states=True)
    model = FullyShardedDataParallel(model, use_orig_params=orig, sync_module_states=True)
    check_same(whole_state(model), want)


def clips(dtype: torch.dtype, front: Any) -> None:
    """The norm of complex gradients is that of their absolute values; both clipping functions give it."""
    reference, model = make("spectrum", dtype), shard(make("spectrum", dtype), front)
    ranks = range(dist.get_world_size())
    reference(torch.cat([batch(0, rank) for rank in ranks])).square().mean().backward()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    model(batch(0, dist.get_rank())).square().mean().backward()
    if isinstance(model, FullyShardedDataParallel):
        got = model.clip_grad_norm_(0.01)
    else:
        got = full(fullshard.clip_grad_norm_(model.parameters(), 0.01))
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-7)
    if not isinstance(model, FullyShardedDataParallel):
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-5, atol=1e-7)


def keeps_imaginary_parts(front: Any) -> None:
    """Mixed precision is of real numbers: complex parameters are computed with and reduced as they are."""
    reference, model = make("spectrum", torch.complex64), make("spectrum", torch.complex64)
    if front in ("wrapper orig", "wrapper flat"):
        mixed = fullshard.MixedPrecision(reduce_dtype=torch.float64)
        options = {"use_orig_params": front == "wrapper orig", "mixed_precision": mixed}
        model.layer = FullyShardedDataParallel(model.layer, **options)
        model = FullyShardedDataParallel(model, **options)
    else:
        policy = fullshard.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        fullshard.fully_shard(model.layer, layout=front, mp_policy=policy)
        fullshard.fully_shard(model, layout=front, mp_policy=policy)
    train(reference, list(range(dist.get_world_size())))
    train(model, [dist.get_rank()])
    check_same(whole_state(model), dict(reference.state_dict()))


def several_in_one_unit(front: Any) -> None:
    """Floats, complex numbers and both kinds of table together in one unit."""
    torch.manual_seed(3)
    dtypes = (torch.int16, torch.float8_e4m3fn)
    layers = nn.Sequential(Spectrum(torch.complex64), *(Table(dtype) for dtype in dtypes), nn.Linear(WIDTH, WIDTH))
    reference = Model(layers)
    model = shard(copy.deepcopy(reference), front)
    train(reference, list(range(dist.get_world_size())))
    train(model, [dist.get_rank()])
    check_same(whole_state(model), dict(reference.state_dict()))


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_parameters_train(run_ranks, dtype, front):
    run_ranks(as_one_process, "spectrum", dtype, front, timeout=20)


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize("dtype", [*FLOAT8, *INTEGERS], ids=str)
def test_frozen_tables_are_gathered(run_ranks, dtype, front):
    run_ranks(as_one_process, "table", dtype, front, timeout=20)


@pytest.mark.parametrize("front", FRONTS[:4], ids=str)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn], ids=str)
def test_full_tensor(run_ranks, dtype, front):
    run_ranks(full_tensor_is_whole, dtype, front, timeout=20)


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("spectrum", torch.complex64), ("table", torch.int16), ("table", torch.float8_e4m3fn)],
    ids=["complex64", "int16", "float8"],
)
def test_saved_and_loaded(run_ranks, kind, dtype, front):
    run_ranks(loads_what_it_saved, kind, dtype, front, timeout=20)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("spectrum", torch.complex64), ("table", torch.int16), ("table", torch.float8_e4m3fn)],
    ids=["complex64", "int16", "float8"],
)
def test_module_states_are_synchronised(run_ranks, kind, dtype, orig):
    run_ranks(starts_from_rank_0, dtype, kind, orig, timeout=20)


@pytest.mark.parametrize("front", FRONTS, ids=str)
def test_complex_gradients_are_reduced_whole(run_ranks, front):
    run_ranks(keeps_imaginary_parts, front, timeout=20)


@pytest.mark.parametrize("front", FRONTS, ids=str)
def test_complex_gradients_are_clipped(run_ranks, front):
    run_ranks(clips, torch.complex64, front, timeout=20)


@pytest.mark.parametrize("front", [front for front in FRONTS if front != "wrapper flat"], ids=str)
def test_several_dtypes_in_one_unit(run_ranks, front):
    run_ranks(several_in_one_unit, front, timeout=20)
