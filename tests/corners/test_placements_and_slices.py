"""Dims that a parameter does not have, slices of sharded containers, and classes made from a sharded model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard import fully_shard
from ways import (
    LAYOUTS,
    differences,
    error_of,
    inner,
    named_error,
    on_ranks,
    shard,
    two_layers,
    whole,
    whole_state,
    wide_batch,
)


@pytest.mark.parametrize(("dim", "ndim"), [(2, 2), (-3, 2), (1, 1)])
@on_ranks
def test_a_dim_that_the_parameter_does_not_have(dim: int, ndim: int) -> list[str]:
    """Refused by name, before anything changes; PyTorch's refuses it, too."""
    model = nn.Linear(6, 6)
    before = list(model.parameters())
    given = {"shard_placement_fn": lambda p: Shard(dim) if p.dim() == ndim else None}
    assert error_of(lambda: torch_fsdp.fully_shard(nn.Linear(6, 6), **given)) is not None, "PyTorch's takes it"
    error = error_of(lambda: fully_shard(model, **given))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True)) and type(model) is nn.Linear
    return named_error(
        error, "weight" if ndim == 2 else "bias", f"{dim}", kinds=(fullshard.LayoutError, fullshard.ConfigError)
    )


@pytest.mark.parametrize("dim", [1, -2])
@on_ranks
def test_dims_counted_from_behind(dim: int) -> None:
    """Dims counted from behind are dims, as PyTorch's has them."""
    model = fully_shard(nn.Linear(6, 4), shard_placement_fn=lambda p: Shard(dim) if p.dim() == 2 else None)
    assert model.weight.to_local().shape == nn.Linear(6, 4).weight.chunk(2, dim)[0].shape
    assert model.weight.placements == (Shard(dim % 2),)


class Named(nn.Sequential):
    """A container of a class of its own."""


SLICES = {
    "all": (lambda m: m[:], 3),
    "every_second": (lambda m: m[::2], 2),
    "none": (lambda m: m[3:], 0),
}


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("way", ["rows", "originals"])
@on_ranks
def test_slices_of_a_sharded_sequential(way: str, kind: str) -> list[str]:
    """A plain container of the same modules, of the class that the model had, which runs and trains its units."""
    cut, length = SLICES[kind]
    model, reference, mine = shard(Named(*two_layers()), way), two_layers(), wide_batch(0, dist.get_rank())
    piece, modules = cut(model), list(inner(model).children())
    assert type(piece) is Named and not isinstance(piece, fullshard.FSDPModule)
    assert isinstance(model, fullshard.FSDPModule) or way not in LAYOUTS
    assert len(piece) == length and all(a is b for a, b in zip(piece, cut(modules), strict=True))
    out = piece(mine)
    problems = differences("out", {"": out.detach()}, {"": cut(reference)(mine).detach()})
    if any(p.requires_grad for p in piece.parameters()):
        out.square().mean().backward()
        cut(reference)(wide_batch(0)).square().mean().backward()
        if way in LAYOUTS:
            got = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            want = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
            problems += differences("grad", got, want)
    return problems


class Inner(nn.Linear):
    """A module that makes another of its own class, as recursive models do."""

    def twin(self) -> Any:
        return type(self)(self.in_features, self.out_features)


@on_ranks
def test_containers_and_instances_made_from_a_sharded_one() -> list[str]:
    """They are unsharded, but for a copy; the model itself stays sharded and goes on training."""
    model = shard(two_layers(), "rows")
    fresh = type(model)(nn.Linear(2, 2))
    assert {type(each) for each in (model + nn.Sequential(nn.Tanh()), model * 2, fresh)} == {nn.Sequential}
    assert isinstance(fresh(torch.ones(1, 2)), torch.Tensor)
    model(wide_batch(0, dist.get_rank())).sum().backward()
    one = fully_shard(Inner(4, 4), layout="flat")
    twin, alias = one.twin(), copy.copy(one)
    assert type(twin) is Inner and type(alias) is type(one) and alias.weight is one.weight
    twin(torch.ones(1, 4))
    return differences("values", whole_state(model), dict(two_layers().state_dict()))


class Experts(nn.Module):
    """Experts [E, r, c], 15 rows of 4, which two ranks cannot share by experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bc,erc->ber", x, self.weight) * self.scale


class BlockShard:
    """Stands for that of torch 2.16, which is taken by its name."""


@on_ranks
def test_experts_are_cut_between_rows_by_a_block_shard() -> None:
    model, reference = Experts(), Experts()
    fullshard.fully_shard(model, shard_placement_fn=lambda p: BlockShard() if p.dim() == 3 else None)
    assert isinstance(model.weight, fullshard.FlatShard) and not isinstance(model.scale, fullshard.FlatShard)
    assert model.weight.to_local().numel() in (28, 32)
    for rank in range(dist.get_world_size()):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        (reference(x).square().mean() / dist.get_world_size()).backward()
        if rank == dist.get_rank():
            model(x).square().mean().backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
        torch.testing.assert_close(mine.full_tensor(), other.detach())


@pytest.mark.gloo("torch counts collectives by process")
@pytest.mark.parametrize(("rows", "dim"), [(7, 0), (1, 0), (8, 1)])
@on_ranks
def test_whole_values_are_dtensors_own(rows: int, dim: int) -> None:
    """Of a parameter that is split unevenly, perhaps so that a rank has none of it: as DTensor's own, and its gradient.

    They do not go over the user's group, where a rank that asks alone would wait in native code.
    """
    torch.manual_seed(0)
    layer = nn.Linear(rows, 6) if dim else nn.Linear(6, rows)
    start = layer.weight.detach().clone()
    fully_shard(layer, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0))
    weight, scale = layer.weight, torch.arange(1.0, start.numel() + 1).view_as(start) * (dist.get_rank() + 1)
    with CommDebugMode() as counted:
        whole, plain = weight.full_tensor(), weight.detach().full_tensor()
    assert not any("functional" in str(op) for op in counted.get_comm_counts()), counted.get_comm_counts()
    assert torch.equal(whole, start) and torch.equal(plain, start)
    for each in (whole, plain):
        assert each.is_contiguous() and each.untyped_storage().nbytes() == start.nbytes, "more is kept alive"
    for placements in (None, [Partial("sum")], [Replicate()]):
        (found,) = torch.autograd.grad((weight.full_tensor(grad_placements=placements) * scale).sum(), weight)
        wanted = DTensor.full_tensor(weight, grad_placements=placements or [Partial("avg")])
        (expected,) = torch.autograd.grad((wanted * scale).sum(), weight)
        assert torch.equal(found.to_local(), expected.to_local()), placements
