"""Random models on meshes of every kind, in mixed precision, with other reductions and with errors on one rank.

A seed stands for the front-end, too. Each of two steps is compared with one process that sees every rank's batches. In
mixed precision that process computes with a copy in the same dtype, and starts every step from the sharded weights: its
tolerance is then that of one reduction, whatever the depth. By hand:

    python tests/random_runs.py --wide --seed 7000 --count 200 --world 4
"""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from random_events import accumulate, evaluate, failing, unshard
from random_models import INPUTS, Either, Model, say_who

FRONTS = ("rows", "flat", fullshard.Blocks("row"), "owner", "wrapper orig", "wrapper flat")
EVENTS = ("no sync", "evaluate", "error on all", "skip", "clip", "unshard")
LR = 0.25
PARTS = {"unused": "zeros", "check": "every"}  # units run in any order, and number


@dataclass
class Wide:
    """What a seed stands for.

    Attributes:
        one: one rank alone raises in a forward after the last gather, and all ranks agree to go on.
        parts: some ranks leave out units that others run (`unused="zeros"`).
    """

    seed: int
    draw: random.Random = field(init=False)
    front: Any = field(init=False)
    low: torch.dtype | None = field(init=False)
    reduced: torch.dtype | None = field(init=False)
    reduction: str = field(init=False)
    micro_batches: int = field(init=False)
    chosen: set[str] = field(init=False)
    one: bool = field(init=False)
    parts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(f"wide {self.seed}")
        self.front = FRONTS[self.seed % len(FRONTS)]
        self.low = draw.choice([None, None, None, torch.bfloat16, torch.float16])
        self.reduced = draw.choice([None, torch.float32, torch.bfloat16]) if self.low else None
        self.reduction = draw.choice(["mean", "mean", "mean", "sum", "tokens"])
        self.micro_batches = draw.choice([1, 1, 2])
        self.chosen = {name for name in EVENTS if draw.random() < 0.3}
        self.parts = draw.random() < 0.3
        self.one = not self.parts and draw.random() < 0.4  # ranks that share an order talk until a pass is over

    @property
    def wrapper(self) -> bool:
        return self.front in ("wrapper orig", "wrapper flat")

    def batch(self, step: int, number: int, rank: int) -> Tensor:
        """As many rows on every rank only where losses are means."""
        rows = 3 if self.reduction == "mean" else random.Random(f"{self.seed} {step} {number} {rank}").randint(1, 4)
        generator = torch.Generator().manual_seed(((self.seed * 31 + step) * 7 + number) * 13 + rank)
        x = torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64)
        return x.float() if self.low else x

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        out = model(x).float() if self.low else model(x)
        return out.square().mean() if self.reduction == "mean" else out.square().sum()

    def shard(self, model: nn.Module, units: list[str]) -> nn.Module:
        """`model` with its units made, innermost first."""
        draw, hybrid = self.draw, dist.get_world_size() == 4 and self.draw.random() < 0.7
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
        if not self.wrapper:
            options = {"layout": self.front, "prefetch": draw.choice([0, 1, 2]), "mesh": mesh}
            options |= {"reduction": self.reduction, "mp_policy": MixedPrecisionPolicy(self.low, self.reduced)}
            options |= PARTS if self.parts else {}
            for name in units:
                after = draw.choice([True, False, None])
                fullshard.fully_shard(model.get_submodule(name), reshard_after_forward=after, **options)
            return fullshard.fully_shard(model, **options)
        strategies = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if hybrid else ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
        options = {"use_orig_params": self.front == "wrapper orig", "device_mesh": mesh, "reduction": self.reduction}
        options |= {"sharding_strategy": ShardingStrategy[draw.choice(strategies)]}
        options |= PARTS if self.parts else {}
        if self.low:
            options |= {"mixed_precision": MixedPrecision(self.low, self.reduced, cast_root_forward_inputs=True)}
        for name in units:
            parent, _, leaf = name.rpartition(".")
            holder = model.get_submodule(parent)
            setattr(holder, leaf, FullyShardedDataParallel(holder.get_submodule(leaf), **options))
        return FullyShardedDataParallel(model, **options)


class Reference:
    """One process that sees the batches of all ranks: weights, and a copy in the dtype of computation."""

    def __init__(self, wide: Wide, model: nn.Module) -> None:
        self.wide, self.model = wide, copy.deepcopy(model)
        self.low = copy.deepcopy(model).to(wide.low) if wide.low else self.model

    def backward(self, step: int) -> list[Tensor]:
        """This step's gradients into `model`; the losses of this rank's micro-batches."""
        wide, world = self.wide, dist.get_world_size()
        places = [(number, rank) for number in range(wide.micro_batches) for rank in range(world)]
        rows = sum([len(wide.batch(step, *place)) for place in places])
        share = {"mean": 1 / world, "sum": 1.0, "tokens": 1 / rows}[wide.reduction]
        losses = []
        for number, rank in places:
            if wide.low:
                self._load()
            say_who(self.low, step + number, rank)
            x = wide.batch(step, number, rank)
            loss = wide.loss(self.low, x.to(wide.low) if wide.low else x)
            (loss if wide.low else share * loss).backward()
            if rank == dist.get_rank():
                losses.append(loss.detach())
            if wide.low:
                self._take(share)
        return losses

    def _load(self) -> None:
        with torch.no_grad():
            for low, whole in zip(self.low.parameters(), self.model.parameters(), strict=True):
                low.copy_(whole)

    def _take(self, share: float) -> None:
        for low, whole in zip(self.low.parameters(), self.model.parameters(), strict=True):
            if low.grad is not None:
                grad = low.grad.float() * share
                whole.grad = grad if whole.grad is None else whole.grad + grad
                low.grad = None


def check_wide(seed: int) -> None:
    """Two steps of the seed's model, sharded, against one process."""
    wide = Wide(seed)
    draw = wide.draw
    torch.manual_seed(seed)
    model: nn.Module = Model(draw, more=True, wide=True, parts=wide.parts)
    model = model.float() if wide.low else model.double()
    if draw.random() < 0.3 and wide.front != "wrapper flat":
        for parameter in model.body.parameters():
            parameter.requires_grad_(draw.random() < 0.6)
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    units = sorted((name for name in names if draw.random() < 0.4), key=lambda name: -name.count("."))
    train_both(model, units)
    reference = Reference(wide, model)
    last = model.last
    model = wide.shard(model, units)
    momentum = {} if wide.low or wide.front == "wrapper flat" else {"momentum": 0.9, "weight_decay": 0.01}
    each = [torch.optim.SGD(list(m.parameters()), lr=LR, **momentum) for m in (model, reference.model)]
    for step in range(2):
        events_before(wide, model, last, step)
        losses = sharded_step(wide, model, step)
        for got, want in zip(losses, reference.backward(step), strict=True):
            tolerance = {"rtol": 0.02, "atol": 1e-3} if wide.low else {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(got, want, **tolerance)
        if "clip" in wide.chosen and not wide.low:
            wrapped = isinstance(model, FullyShardedDataParallel)
            norm = model.clip_grad_norm_(0.5) if wrapped else fullshard.clip_grad_norm_(model.parameters(), 0.5)
            want = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
            torch.testing.assert_close(norm.double(), want.double(), rtol=1e-6, atol=1e-12)
        before = [parameter.detach().clone() for parameter in reference.model.parameters()]
        for optimizer in each:
            optimizer.step()
            optimizer.zero_grad()
        compare(wide, model, reference.model, before)


def train_both(model: nn.Module, units: list[str]) -> None:
    """Where a unit is frozen whole, no `Either` is frozen in part.

    Else one rank's backward might come to that unit alone, after a first pass in which no rank's did: not served
    (docs/divergence.md).
    """
    trains: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        unit = max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
        trains[unit] = trains.get(unit, False) or parameter.requires_grad
    for module in model.modules() if False in trains.values() else ():
        if isinstance(module, Either) and module.left.requires_grad != module.right.requires_grad:
            module.requires_grad_(True)


def sharded_step(wide: Wide, model: nn.Module, step: int) -> list[Tensor]:
    """Forward and backward of this rank's micro-batches; their losses."""
    batches = [wide.batch(step, number, dist.get_rank()) for number in range(wide.micro_batches)]
    if wide.reduction == "tokens":
        fullshard.set_token_count(model, [len(x) for x in batches])

    def backward(number: int) -> Tensor:
        loss = wide.loss(model, batches[number])
        loss.backward()
        return loss.detach()

    return accumulate(wide, model, step, backward)


def events_before(wide: Wide, model: nn.Module, last: nn.Module, step: int) -> None:
    """What must leave no trace in the training."""
    say_who(model, step, dist.get_rank())
    x = wide.batch(9, step, dist.get_rank())
    if "evaluate" in wide.chosen:
        evaluate(model, x)
    if "skip" in wide.chosen:
        wide.loss(model, x)
    if "error on all" in wide.chosen and step == 0 and not wide.parts:
        with failing(last, in_backward=False):
            wide.loss(model, x)
    # After the last gather, and once the order is known: along the first pass every step of it is compared. Ranks agree
    # on the error, and none of them goes back.
    if wide.one and step == 1:
        on_this = dist.get_rank() == wide.seed % dist.get_world_size()
        with failing(last, in_backward=False) if on_this else contextlib.nullcontext():
            wide.loss(model, x)
        failed = torch.tensor(float(on_this))
        dist.all_reduce(failed)
        assert failed.item() == 1
        model.zero_grad()
    if "unshard" in wide.chosen:
        unshard(model, model, writeback=step == 0)


def compare(wide: Wide, model: nn.Module, reference: nn.Module, before: list[Tensor]) -> None:
    """Whole parameters after a step; in mixed precision what the step changed, and the reference takes them over."""
    got = model.state_dict()
    whole = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in got.items()}
    want = reference.state_dict(keep_vars=True)
    assert whole.keys() == want.keys()
    old = dict(zip(map(id, reference.parameters()), before, strict=True))
    changes = [(want[name] - old[id(want[name])]).norm() for name in want]
    scale = torch.stack(changes).square().sum().sqrt()
    for name, value in whole.items():
        if not wide.low:
            torch.testing.assert_close(
                value, want[name].detach(), rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )
            continue
        change, expected = value - old[id(want[name])], want[name].detach() - old[id(want[name])]
        # A rounding at each of the places where gradients are added: uses, micro-batches, ranks.
        allowed = 2**-5 * expected.norm() + 2**-8 * scale + 1e-6
        assert (change - expected).norm() <= allowed, f"{name}: changed by {change}, expected {expected}"
    if wide.low:
        with torch.no_grad():
            for name, value in whole.items():
                want[name].copy_(value)
