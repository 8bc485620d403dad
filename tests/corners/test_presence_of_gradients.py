"""Whether a parameter has a gradient is the same on every rank, whatever its part of it is.

A gradient of zeros is a gradient: it decays the weight, counts a step, and takes part in clipping's all-reduces.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import ShardPlacementResult, fully_shard
from models import Example
from ways import (
    assert_equal,
    every_way,
    layers,
    loss_of,
    mine,
    shard,
    sharded,
    whole_gradients,
    whole_parameters,
    without_sync,
)

SECONDS = 40  # a hang is this, not a minute
TRAINING = {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.3}


class Rows(nn.Module):
    """Weights of which one-hot inputs choose the rows that get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.randn(4, 3))
        self.chosen = nn.Parameter(torch.randn(4, 3))

    def forward(self, always: int, chosen: int | None) -> Tensor:
        out = self.always[always].square().sum()
        return out if chosen is None else out + self.chosen[chosen].square().sum()


def rows_example() -> Example:
    return Example(Rows, lambda model: [], kind="vectors")


def zero_parts(way: str, row: int, by: int, clip: str) -> bool:
    """Rank `by` alone uses `chosen`, and only one row of it. All of `chosen` decays, on every rank."""
    what, world, rank = rows_example(), dist.get_world_size(), dist.get_rank()
    whole = what.make(torch.float64)
    theirs = torch.optim.AdamW(whole.parameters(), **TRAINING)
    model = sharded(what, way)
    ours = torch.optim.AdamW(model.parameters(), **TRAINING)
    for _ in range(3):
        for other in range(world):
            (whole(0, row if other == by else None) / world).backward()
        model(0, row if rank == by else None).backward()
        assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients")
        want = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        if clip == "torch":
            got = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False).full_tensor()
        elif way in ("wrapper", "originals"):
            got = model.clip_grad_norm_(0.5)
        else:
            got = fullshard.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(got, want)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    # gloo's reduced slice is exact here; what clipping adds is rounding
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 1e-9)
    return True


@every_way
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("by", [0, 1])
def test_gradients_that_are_zero_where_a_rank_holds_them(run_ranks, way, row, by):
    assert all(run_ranks(zero_parts, way, row, by, "ours", timeout=SECONDS))


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("by", [0, 1])
def test_clipping_by_torch_meets_the_same_gradients_on_every_rank(run_ranks, row, by):
    assert all(run_ranks(zero_parts, "rows", row, by, "torch", timeout=SECONDS))


@every_way
def test_gradients_that_cancel(run_ranks, way):
    """A sum of zero over ranks is a gradient still."""
    assert all(run_ranks(cancelling, way, timeout=SECONDS))


def cancelling(way: str) -> bool:
    model = sharded(rows_example(), way)
    before = whole_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.25)
    sign = 1 - 2 * dist.get_rank()
    (sign * model(0, 3)).backward()
    assert all(grad is not None and not grad.any() for grad in whole_gradients(model).values())
    optimizer.step()
    assert_equal(whole_parameters(model), {name: 0.75 * p for name, p in before.items()}, "parameters")
    return True


@pytest.mark.parametrize("way", ["flat", "blocks", "owner"])
def test_optimizer_views_have_a_gradient_where_any_rank_used_one(run_ranks, way):
    assert all(run_ranks(viewed, way, timeout=SECONDS))


class Two(nn.Module):
    """Two units of one weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Single(), Single()])

    def forward(self, rows: tuple[int | None, ...]) -> Tensor:
        outputs = [unit(row or 0) for unit, row in zip(self.units, rows, strict=True)]
        return sum(output for output, row in zip(outputs, rows, strict=True) if row is not None)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, row: int) -> Tensor:
        return self.weight[row].square().sum()


def viewed(way: str) -> bool:
    """The second unit is in rank 1's loss only, and its gradient is zero but in rank 1's (last) row."""
    what = Example(Two, lambda model: list(model.units), kind="vectors")
    model, whole = sharded(what, way), what.make(torch.float64)
    ours = torch.optim.AdamW(fullshard.optimizer_view(model), **TRAINING)
    theirs = torch.optim.AdamW(whole.parameters(), **TRAINING)
    rows = [(0, None), (0, 3)]
    for _ in range(3):
        model(rows[dist.get_rank()]).backward()
        for row in rows:
            (whole(row) / 2).backward()
        assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 1e-9)
    return True


# Parameters of one unit on several meshes.


class Expert(nn.Module):
    """A weight that all ranks share, and an expert that two of them have."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Parameter(torch.randn(4, 3))
        torch.manual_seed(100 + expert)
        self.expert = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        out = 1.0 * x
        if "s" in use:
            out = out + torch.tanh(x @ self.shared.T) @ self.shared
        if "e" in use:
            out = out + torch.sin(x @ self.expert.T) @ self.expert
        return out


USED = {  # by rank; experts belong to ranks 0, 1 and 2, 3
    "each its own": ("s", "e", "s", "e"),
    "expert 0 by nobody": ("s", "s", "se", "se"),
    "shared by one": ("e", "e", "e", "s"),
    "nothing by some": ("", "se", "", ""),
}


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("case", USED)
def test_parameters_on_two_meshes_that_some_ranks_use(run_ranks, layout, case):
    assert all(run_ranks(on_two_meshes, layout, USED[case], world=4, timeout=SECONDS))


def expert_batch(step: int, rank: int) -> Tensor:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return x.requires_grad_()


def on_two_meshes(layout: str, used: tuple[str, ...]) -> bool:
    """Clipped besides: which gradients there are decides the order of clipping's all-reduces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    rank, mine = dist.get_rank(), mesh.get_local_rank("ep")
    model, wholes = Expert(mine).double(), [Expert(expert).double() for expert in range(2)]
    own = model.expert
    fully_shard(
        model, layout=layout, shard_placement_fn=lambda p: ShardPlacementResult(mesh=mesh["edp"]) if p is own else None
    )
    for step in range(2):
        model.zero_grad()
        model(expert_batch(step, rank), used[rank]).square().mean().backward()
        for whole in wholes:
            whole.zero_grad()
        for other in range(4):
            wholes[other // 2](expert_batch(step, other), used[other]).square().mean().backward()
        parts = [whole.shared.grad for whole in wholes if whole.shared.grad is not None]
        expert = wholes[mine].expert.grad
        want = {"shared": sum(parts) / 4 if parts else None, "expert": None if expert is None else expert / 2}
        has = {name: p.grad is not None for name, p in model.named_parameters()}
        assert has == {name: grad is not None for name, grad in want.items()}
        fullshard.clip_grad_norm_(model.parameters(), 1e9)
        got = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        assert_equal(got, want, f"gradients of step {step}")
    return True


def accumulated(way: str) -> None:
    present = []
    for without in (False, True):
        model = shard(layers(), way)
        with without_sync(model) if without else nullcontext():
            loss_of(model, mine(0)).backward()
        loss_of(model, mine(1)).backward()
        present.append({name: parameter.grad is not None for name, parameter in model.named_parameters()})
    assert present[0] == present[1]


@every_way
def test_accumulation_without_sync_leaves_the_same_gradients(run_ranks, way) -> None:
    """Where this rank holds nothing of a parameter, too."""
    run_ranks(accumulated, way)
