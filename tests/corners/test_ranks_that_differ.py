"""Ranks that use other parameters, other units or other losses than their neighbours: exact, and never stuck.

What is right is one process that goes through the ranks' batches one by one: a parameter has a gradient if any rank
used it, on every rank, whatever its part of it is, and the gradient is the mean over all ranks. A gradient of zeros is
a gradient: it decays the weight, counts a step, and takes part in clipping's all-reduces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import ShardPlacementResult, fully_shard
from models import Example
from ways import assert_equal, batch, on_ranks, sharded, synced, whole_gradients, whole_parameters

WIDTH = 4


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.3)


def gradients_of(whole: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in whole.named_parameters()}


class Choosing(nn.Module):
    """`[n, 4]` to the same, by those of its parameters that it is told to use."""

    def __init__(self, two_dtypes: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.row = nn.Parameter(torch.randn(1, WIDTH))  # of which rank 1 holds nothing by rows
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.low = nn.Parameter(torch.randn(3, WIDTH))
        self.two_dtypes = two_dtypes

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.two_dtypes and self.low.dtype == torch.float64:
            self.low.data = self.low.data.float()  # a bucket of its own
        return self

    def forward(self, x: Tensor, use: frozenset[str]) -> Tensor:
        out = 1.0 * x
        if "matrix" in use:
            out = out + torch.tanh(x @ self.matrix.T)
        if "row" in use:
            out = out * self.row
        if "gain" in use:
            out = out + torch.sin(x * self.gain)
        if "low" in use:
            out = out + self.low.to(x.dtype).sum(0)
        return out


class Heads(nn.Module):
    """A body and equal heads, each upon the body or, in a chain, upon the one before; all of their outputs."""

    def __init__(self, chain: bool = False, two_dtypes: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.body = Choosing(two_dtypes)
        self.heads = nn.ModuleList(Choosing(two_dtypes) for _ in range(3))
        self.chain = chain

    def forward(self, x: Tensor, use: frozenset[str], runs: tuple[bool, ...]) -> list[Tensor]:
        outputs = [self.body(x * self.scale, use)]
        for head, run in zip(self.heads, runs, strict=True):
            outputs.append(head(outputs[-1] if self.chain else outputs[0], use) if run else outputs[-1])
        return outputs


@dataclass(frozen=True)
class Micro:
    """One backward of every rank: by rank, what every unit uses, as words, and the outputs in the loss, as digits."""

    ranks: tuple[tuple[str, str], ...]
    runs: tuple[bool, ...] = (True,) * 3  # of the heads, on every rank
    sync: bool = True

    def loss(self, model: nn.Module, rank: int, number: int) -> Tensor:
        words, digits = self.ranks[rank]
        outputs = model(batch(number, rank, WIDTH), frozenset(words.split()), self.runs)
        return sum(outputs[int(index)].square().mean() for index in digits)


def micro(*ranks: tuple[str, str], **settings: Any) -> Micro:
    return Micro(ranks, **settings)


def fill(model: Any, way: str, zeros: bool) -> None:
    """Zeros for None where that is right: in a FlatParameter that has a gradient; everywhere, if asked for."""
    units = [[model.scale], list(model.body.parameters()), *(list(head.parameters()) for head in model.heads)]
    for unit in units:
        if zeros or (way == "wrapper" and any(p.grad is not None for p in unit)):
            for p in unit:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def follow(way: str, steps: dict[str, list[Micro]], zeros: bool = False, **settings: bool) -> None:
    """Every step twice; gradients after each reduction, step counts and parameters are compared with one process."""
    example = Example(lambda: Heads(**settings), lambda m: [m.body, *m.heads], kind="vectors", width=WIDTH)
    world, tolerance = dist.get_world_size(), 1e-5 if settings.get("two_dtypes") else 1e-12
    for name, step in steps.items():
        model, whole = sharded(example, way), example.make(torch.float64)
        if zeros:
            model.set_reduce_scatter_unused_params(True)
        ours, theirs = adamw(model), adamw(whole)
        for _ in range(2):
            for number, part in enumerate(step):
                for rank in range(world):
                    (part.loss(whole, rank, number) / world).backward()
                with synced(model, part.sync):
                    part.loss(model, dist.get_rank(), number).backward()
                if part.sync:
                    fill(whole, way, zeros)
                    assert_equal(whole_gradients(model), gradients_of(whole), f"{name}, gradients {number}", tolerance)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        want = {n: p.detach() for n, p in whole.named_parameters()}
        assert_equal(whole_parameters(model), want, f"{name}, parameters", tolerance)
        if way != "wrapper":
            counts = [
                {n: o.state[p]["step"].item() for n, p in each.named_parameters() if o.state[p] and p.numel()}
                for each, o in ((model, ours), (whole, theirs))
            ]
            assert counts[0].items() <= counts[1].items(), name


BOTH = micro(("matrix", "123"), ("matrix", "123"))
INSIDE: dict[str, list[Micro]] = {
    "one rank, in the second micro-batch": [BOTH, micro(("matrix", "123"), ("matrix low", "123"))],
    "the other, in the second": [BOTH, micro(("matrix gain", "123"), ("matrix", "123"))],
    "each its own": [micro(("matrix", "123"), ("low", "123")), micro(("low", "123"), ("row", "123"))],
    "nothing at all on one": [micro(("", "123"), ("matrix low", "123"))],
    "nothing, then something": [micro(("matrix", "123"), ("", "123")), micro(("", "123"), ("low gain", "123"))],
    "kept, then not used": [micro(("matrix", "123"), ("low", "123"), sync=False), BOTH],
    "nobody": [micro(("", "123"), ("", "123")), BOTH],
    "what rank 1 holds nothing of": [micro(("matrix", "123"), ("matrix row", "123"))],
    "what rank 1 holds nothing of, by the other": [micro(("matrix row", "123"), ("matrix", "123"))],
}
M = "matrix gain"
BETWEEN: dict[str, list[Micro]] = {
    "other heads": [micro((M, "1"), (M, "2"))],
    "other heads, the same input": [micro((M, "13"), (M, "23"))],
    "one left out by one rank": [micro((M, "123"), (M, "13"))],
    "all but the body": [micro((M, "123"), (M, "0"))],
    "one left out by all": [micro((M, "13"), (M, "13"))],
    "in turns": [micro((M, "1"), (M, "2")), micro((M, "2"), (M, "1"))],
    "kept, then in the loss": [micro((M, "1"), (M, "2"), sync=False), micro((M, "3"), (M, "3"))],
    "kept, then not run": [
        micro((M, "1"), (M, "2"), sync=False),
        micro((M, "3"), (M, "0"), runs=(False, False, True)),
    ],
    "not run by anybody": [micro((M, "1"), (M, "3"), runs=(True, False, True))],
}


@pytest.mark.parametrize(("way", "two_dtypes"), [("rows", True), ("wrapper", False)])
@on_ranks
def test_parameters_that_some_ranks_use(way: str, two_dtypes: bool) -> None:
    """In the second of two reduced micro-batches, in buckets of several dtypes; and zeros for what is not used."""
    follow(way, INSIDE, two_dtypes=two_dtypes)
    if way == "rows":  # `set_reduce_scatter_unused_params(True)`: as PyTorch's, every parameter has a gradient
        names = ("nothing at all on one", "nobody", "other heads", "kept, then in the loss")
        follow("rows", {name: {**INSIDE, **BETWEEN}[name] for name in names}, zeros=True, two_dtypes=True)


@pytest.mark.parametrize(("way", "chain"), [("flat", False), ("rows", True), ("wrapper", True)])
@on_ranks
def test_losses_that_leave_out_units(way: str, chain: bool) -> None:
    """In a chain a rank whose loss contains an early output only leaves out all units above it (early exit)."""
    follow(way, BETWEEN, chain=chain)


# Gradients that are zero where a rank holds elements, or everywhere.


class Rows(nn.Module):
    """Weights of which one-hot inputs choose the rows that get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.chosen = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))

    def forward(self, always: int, chosen: int | None) -> Tensor:
        out = self.always[always].square().sum()
        return out if chosen is None else out + self.chosen[chosen].square().sum()


ROWS = Example(Rows, lambda model: [], kind="vectors")


@pytest.mark.parametrize(("row", "by"), [(0, 1), (3, 0)])
@pytest.mark.parametrize(
    ("way", "clip"), [("rows", "ours"), ("rows", "torch"), ("flat", "ours"), ("wrapper", "ours"), ("originals", "ours")]
)
@on_ranks
def test_gradients_that_are_zero_where_a_rank_holds_them(way: str, clip: str, row: int, by: int) -> None:
    """Rank `by` alone uses `chosen`, and only one row of it. All of `chosen` decays, on every rank."""
    model, whole, rank = sharded(ROWS, way), ROWS.make(torch.float64), dist.get_rank()
    ours, theirs = adamw(model), adamw(whole)
    for _ in range(3):
        for other in range(2):
            (whole(0, row if other == by else None) / 2).backward()
        model(0, row if rank == by else None).backward()
        assert_equal(whole_gradients(model), gradients_of(whole), "gradients")
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
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 1e-9)


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_gradients_that_cancel(way: str) -> None:
    """A sum of zero over ranks is a gradient still."""
    model = sharded(ROWS, way)
    before = whole_parameters(model)
    ((1 - 2 * dist.get_rank()) * model(0, 3)).backward()
    assert all(grad is not None and not grad.any() for grad in whole_gradients(model).values())
    torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.25).step()
    assert_equal(whole_parameters(model), {name: 0.75 * p for name, p in before.items()}, "parameters")


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
@on_ranks(world=4)
def test_parameters_on_two_meshes_that_some_ranks_use(layout: str) -> None:
    """Clipped besides: which gradients there are decides the order of clipping's all-reduces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    rank, mine = dist.get_rank(), mesh.get_local_rank("ep")
    for case, used in USED.items():
        model, wholes = Expert(mine).double(), [Expert(expert).double() for expert in range(2)]
        place = {id(model.expert): ShardPlacementResult(mesh=mesh["edp"])}
        fully_shard(model, layout=layout, shard_placement_fn=lambda p, place=place: place.get(id(p)))
        for step in range(2):
            for each in (model, *wholes):
                each.zero_grad()
            model(batch(step, rank, 3).requires_grad_(), used[rank]).square().mean().backward()
            for other in range(4):
                x = batch(step, other, 3).requires_grad_()
                wholes[other // 2](x, used[other]).square().mean().backward()
            parts = [whole.shared.grad for whole in wholes if whole.shared.grad is not None]
            expert = wholes[mine].expert.grad
            want = {"shared": sum(parts) / 4 if parts else None, "expert": None if expert is None else expert / 2}
            assert all((p.grad is None) == (want[name] is None) for name, p in model.named_parameters()), case
            fullshard.clip_grad_norm_(model.parameters(), 1e9)
            got = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
            assert_equal(got, want, f"{case}, gradients of step {step}")
