"""Ranks that use other parameters, other units or other losses than their neighbours: exact, and never stuck.

What is right is one process that goes through the ranks' batches one by one: a parameter has a gradient if any rank
used it, on every rank, and the gradient is the mean over all ranks.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import Example
from ways import (
    assert_equal,
    every_layout,
    every_parameter,
    every_way,
    sharded,
    whole_gradients,
    whole_parameters,
    without_sync,
)

SECONDS = 40  # a hang is this, not a minute
WIDTH = 4
ALL = ("matrix", "row", "gain", "low")
TRAINING = {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.3}


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

    def __init__(self, heads: int = 3, chain: bool = False, two_dtypes: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.body = Choosing(two_dtypes)
        self.heads = nn.ModuleList(Choosing(two_dtypes) for _ in range(heads))
        self.chain = chain

    def forward(self, x: Tensor, uses: tuple[frozenset[str], ...], runs: tuple[bool, ...]) -> list[Tensor]:
        outputs = [self.body(x * self.scale, uses[0])]
        for head, use, run in zip(self.heads, uses[1:], runs, strict=True):
            outputs.append(head(outputs[-1] if self.chain else outputs[0], use) if run else outputs[-1])
        return outputs


def example(**settings: object) -> Example:
    return Example(lambda: Heads(**settings), lambda model: [model.body, *model.heads], kind="vectors", width=WIDTH)


@dataclass(frozen=True)
class Micro:
    """One backward of every rank: by rank, what each unit uses, and which outputs the loss contains."""

    uses: tuple[tuple[frozenset[str], ...], ...]
    taken: tuple[frozenset[int], ...]
    runs: tuple[bool, ...] = (True,) * 3  # of the heads, on every rank
    sync: str = "all"  # "none", or "shard": not over the replicas


Plan = list[list[Micro]]  # steps of micro-batches


def micro(*ranks: tuple[str, str], **settings: object) -> Micro:
    """By rank: what every unit uses, as words; the outputs in the loss, as digits."""
    return Micro(
        tuple((frozenset(words.split()),) * 4 for words, _ in ranks),
        tuple(frozenset(map(int, digits)) for _, digits in ranks),
        **settings,
    )


def loss_of(model: nn.Module, part: Micro, rank: int, number: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * number + rank), dtype=torch.float64)
    outputs = model(x, part.uses[rank], part.runs)
    return sum(outputs[index].square().mean() for index in sorted(part.taken[rank]))


def fill(model: nn.Module, way: str, zeros: bool) -> None:
    """Zeros for None where that is right: in a FlatParameter that has a gradient; everywhere, if asked for."""
    units = [[model.scale], list(model.body.parameters()), *(list(head.parameters()) for head in model.heads)]
    for unit in units:
        if zeros or (way == "wrapper" and any(p.grad is not None for p in unit)):
            for p in unit:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@dataclass
class Trained:
    """What one process leaves, to be compared step by step."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


def reference(what: Example, way: str, plan: Plan, world: int, zeros: bool = False) -> Trained:
    model, found, numbers = what.make(torch.float64), Trained(), itertools.count()
    optimizer = torch.optim.AdamW(model.parameters(), **TRAINING)
    for step in plan:
        for part in step:
            number = next(numbers)
            for rank in range(world):
                (loss_of(model, part, rank, number) / world).backward()
            if part.sync == "all":
                fill(model, way, zeros)
                found.gradients.append(
                    {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
                )
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    found.steps = {n: optimizer.state[p]["step"].item() for n, p in model.named_parameters() if optimizer.state[p]}
    return found


def follow(way: str, plan: Plan, settings: dict, hybrid: bool = False, zeros: bool = False) -> bool:
    """Trains by the plan, sharded, and compares gradients after each reduction, step counts and parameters."""
    what, world, rank = example(**settings), dist.get_world_size(), dist.get_rank()
    want = reference(what, way, plan, world, zeros)
    model, numbers, reductions = sharded(what, way, hybrid=hybrid), itertools.count(), itertools.count()
    if zeros:
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), **TRAINING)
    tolerance = 1e-5 if settings.get("two_dtypes") else 1e-12
    for index, step in enumerate(plan):
        for part in step:
            number = next(numbers)
            if part.sync == "none":
                with without_sync(model):
                    loss_of(model, part, rank, number).backward()
                continue
            if part.sync == "shard":
                model.set_requires_all_reduce(False)
                loss_of(model, part, rank, number).backward()
                model.set_requires_all_reduce(True)
                continue
            loss_of(model, part, rank, number).backward()
            done = next(reductions)
            assert_equal(whole_gradients(model), want.gradients[done], f"step {index}, gradients {done}", tolerance)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(whole_parameters(model), want.parameters, "parameters after the last step", tolerance)
    if way not in ("wrapper", "originals"):
        counts = {n: optimizer.state[p]["step"].item() for n, p in model.named_parameters() if optimizer.state[p]}
        assert counts == want.steps
    return True


# Parameters of one unit: (a) in the second of two reduced micro-batches, (d) in buckets of several dtypes.

BOTH = micro(("matrix", "123"), ("matrix", "123"))
INSIDE: dict[str, list[Micro]] = {
    "one rank, in the second micro-batch": [BOTH, micro(("matrix", "123"), ("matrix low", "123"))],
    "the other, in the second": [BOTH, micro(("matrix gain", "123"), ("matrix", "123"))],
    "each its own": [micro(("matrix", "123"), ("low", "123")), micro(("low", "123"), ("row", "123"))],
    "nothing at all on one": [micro(("", "123"), ("matrix low", "123"))],
    "nothing, then something": [micro(("matrix", "123"), ("", "123")), micro(("", "123"), ("low gain", "123"))],
    "kept, then not used": [
        micro(("matrix", "123"), ("low", "123"), sync="none"),
        BOTH,
    ],
    "nobody": [micro(("", "123"), ("", "123")), BOTH],
    "what rank 1 holds nothing of": [micro(("matrix", "123"), ("matrix row", "123"))],
    "what rank 1 holds nothing of, by the other": [micro(("matrix row", "123"), ("matrix", "123"))],
}  # fmt: skip


def follow_all(way: str, cases: dict[str, list[Micro]], settings: dict, zeros: bool = False) -> bool:
    """Two steps of every case; whatever fails names its case."""
    for name, step in cases.items():
        try:
            follow(way, [step] * 2, settings, zeros=zeros)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return True


@every_way
def test_parameters_that_some_ranks_use(run_ranks, way):
    assert all(run_ranks(follow_all, way, INSIDE, {}, timeout=SECONDS))


@every_parameter
def test_parameters_of_two_dtypes_that_some_ranks_use(run_ranks, way):
    assert all(run_ranks(follow_all, way, INSIDE, {"two_dtypes": True}, timeout=SECONDS))


@every_layout
@pytest.mark.parametrize("two_dtypes", [False, True])
def test_zeros_for_what_is_not_used(run_ranks, way, two_dtypes):
    """`set_reduce_scatter_unused_params(True)`: as PyTorch's, every parameter has a gradient."""
    assert all(run_ranks(follow_all, way, INSIDE, {"two_dtypes": two_dtypes}, zeros=True, timeout=SECONDS))


# Units: (c) every rank runs all of them, and the losses leave out different ones.

M = "matrix gain"
BETWEEN: dict[str, list[Micro]] = {
    "other heads": [micro((M, "1"), (M, "2"))],
    "other heads, the same input": [micro((M, "13"), (M, "23"))],
    "one left out by one rank": [micro((M, "123"), (M, "13"))],
    "all but the body": [micro((M, "123"), (M, "0"))],
    "one left out by all": [micro((M, "13"), (M, "13"))],
    "in turns": [micro((M, "1"), (M, "2")), micro((M, "2"), (M, "1"))],
    "kept, then in the loss": [micro((M, "1"), (M, "2"), sync="none"), micro((M, "3"), (M, "3"))],
    "kept, then not run": [
        micro((M, "1"), (M, "2"), sync="none"),
        micro((M, "3"), (M, "0"), runs=(False, False, True)),
    ],
    "not run by anybody": [micro((M, "1"), (M, "3"), runs=(True, False, True))],
}  # fmt: skip


@every_way
@pytest.mark.parametrize("case", BETWEEN)
def test_losses_that_leave_out_units(run_ranks, way, case):
    assert all(run_ranks(follow_all, way, {case: BETWEEN[case]}, {}, timeout=SECONDS))


@every_way
@pytest.mark.parametrize("case", BETWEEN)
def test_losses_that_leave_out_units_of_a_chain(run_ranks, way, case):
    """A rank whose loss contains an early output only leaves out all units above it (early exit)."""
    assert all(run_ranks(follow_all, way, {case: BETWEEN[case]}, {"chain": True}, timeout=SECONDS))


@every_layout
@pytest.mark.parametrize("case", ["other heads", "one left out by one rank", "kept, then in the loss"])
def test_losses_that_leave_out_units_with_zeros_for_what_is_not_used(run_ranks, way, case):
    assert all(run_ranks(follow_all, way, {case: BETWEEN[case]}, {}, zeros=True, timeout=SECONDS))


def random_plan(seed: int, world: int, hybrid: bool, alike: bool = False) -> Plan:
    draw = random.Random(seed)

    def some(of: list, least: int = 0) -> frozenset:
        return frozenset(draw.sample(of, draw.randint(least, len(of))))

    plan: Plan = []
    for _ in range(3):
        step = []
        for last in [False] * draw.randint(0, 2) + [True]:
            runs = tuple(draw.random() < 0.8 for _ in range(3))
            uses = tuple(tuple(some(list(ALL)) for _ in range(4)) for _ in range(world))
            taken = tuple(some([0, 1, 2, 3], least=1) for _ in range(world))
            if alike:
                uses, taken = uses[:1] * world, taken[:1] * world
            sync = "all" if last else draw.choice(["all", "none", "shard"] if hybrid else ["all", "none"])
            step.append(Micro(uses, taken, runs, sync))
        plan.append(step)
    return plan


def follow_several(way: str, seeds: range, hybrid: bool, alike: bool = False) -> bool:
    for seed in seeds:
        settings = {"chain": bool(seed % 2), "two_dtypes": way != "wrapper" and seed % 4 > 1}
        plan = random_plan(seed, dist.get_world_size(), hybrid and way not in ("wrapper", "originals"), alike)
        assert follow(way, plan, settings, hybrid), seed
    return True


@every_way
def test_any_use_by_all_ranks_alike(run_ranks, way):
    assert all(run_ranks(follow_several, way, range(6), False, alike=True, timeout=SECONDS))


@every_way
def test_any_use_by_any_rank(run_ranks, way):
    assert all(run_ranks(follow_several, way, range(12), False, timeout=SECONDS))


@every_way
def test_any_use_by_any_rank_on_a_hybrid_mesh(run_ranks, way):
    """Whether a parameter was used is agreed over the replicas too, and kept with what is not reduced over them."""
    assert all(run_ranks(follow_several, way, range(4), True, world=4, timeout=SECONDS))
