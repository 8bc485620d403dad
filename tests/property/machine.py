"""Any model, sharded in any way, taken through any sequence of what users do, is one process on all ranks' batches.

One stateful machine: hypothesis draws a model (`random_blocks.py`), a way to shard it (`random_ways.py`) and a sequence
of rules; ranks are threads (`tests/memory_ranks.py`), whose collectives are late and whose memory is poisoned. After
every rule what users see is compared (`invariants.py`): losses, gradients and whether there are any, parameters, what
is gathered, bytes. At the end the same step is repeated: it issues the same collectives each time, the small ones too,
and nothing is more than before.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import (
    byte_problems,
    bytes_held,
    eps_of,
    finite,
    gradient_problems,
    groups_of_this_rank,
    held_by_this_process,
    local,
    plain_counts,
    value_problems,
)
from random_blocks import INPUTS, Model, ModelPlan, changed, loss_of, models, set_turn
from random_faults import CHANGES, raising, scale, short_of_memory
from random_ways import Sharding, Way, ways, worlds
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.agreement import log
from fullshard.runtime import trace
from fullshard.shard.parking import Mover
from memory_ranks import HERE, ThreadRanks
from ways import synced, whole_parameters

EXACT = 1e-9  # relative, after some steps of double precision
HALF_RANGE = 65504 / 16  # where scaled gradients are in float16's range
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "view": lambda parameters: torch.optim.SGD(parameters, lr=0.05),  # of `optimizer_view`
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}
SHAPES = ["plain", "plain", "looks first", "two losses", "two backwards", "interleaved", "penalty"]
shapes, optimizers = st.sampled_from(SHAPES), st.sampled_from(list(OPTIMIZERS))
syncs = st.sampled_from(["yes", "yes", "yes", "no", "scatter"])


def differentiate(model: nn.Module, x: Tensor, shape: str, total: bool, scaled: Callable = lambda x: x) -> Tensor:
    """Forward and backward, of what `scaled` makes of the loss, in one of the shapes of programs; the loss."""
    if shape == "looks first":
        with torch.no_grad():
            model(x)
    x.requires_grad_(shape == "penalty")
    loss = loss_of(model, x, total)
    if shape == "two losses":
        loss = loss + loss_of(model, x * 0.5, total)
    if shape == "penalty":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
    if shape == "two backwards":
        scaled(0.25 * loss).backward(retain_graph=True)
        scaled(0.75 * loss).backward()
    elif shape == "interleaved":
        other = loss_of(model, x * 2, total)
        scaled(loss).backward()
        scaled(other).backward()
    else:
        scaled(loss).backward()
    return loss.detach()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the unsharded model's names."""
    return {name.replace("_fsdp_wrapped_module.", ""): parameter for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def memory_not_zeroed() -> Iterator[None]:
    """What torch leaves uninitialised is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Training(RuleBasedStateMachine):
    """See the module's docstring. `models` and `optimizers` are by rank; `reference` saw the batches of all."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = contextlib.ExitStack()
        self.ranks: ThreadRanks
        self.number = 0  # of micro-batches
        self.unreduced = False  # whether gradients were left on their ranks
        self.reduced: set[str] = set()  # the parameters whose gradients were there when all were last reduced
        self.rounding = 0.0  # the largest of all dtypes in which anything was computed; 0: double precision
        self.magnitude = 0.0  # of all gradients that were added up since there were none
        self.left_open: int | None = None  # the unit that was unsharded for the micro-batch that comes
        self.kept: list[tuple[Tensor, Tensor]] = []  # gradients that the program keeps, and what they were

    @initialize(plan=models, way=ways, world=worlds, optimizer=optimizers)
    def start(self, plan: ModelPlan, way: Way, world: int, optimizer: str = "sgd") -> None:
        self.plan = changed(plan, frozen=False) if way.flat else plan
        self.reference = Model(self.plan)
        self.shard(way, world)
        self.choose_optimizer(optimizer)

    def shard(self, way: Way, world: int) -> None:
        """Start `world` ranks with a model each."""
        self.ending.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self.ending.enter_context(memory_not_zeroed())
        self.way, self.world, self.factor = way, world, 1.0 * world
        self.frees, self.stays, self.trained = way.strategy == "full", False, False
        computed = way.param or self.plan.dtype
        rounding = max(eps_of(computed), eps_of(way.reduce or computed))
        self.rounding = max(self.rounding, rounding if rounding > 1e-12 else 0.0)
        self.ranks = self.ending.enter_context(ThreadRanks(world))
        plain = [Model(self.plan) for _ in range(world)]  # here: torch's random numbers are the process's
        self.sharding = self.ranks.run(lambda _: Sharding(self.plan, way, world))
        self.models: list[Any] = self.ranks.run(lambda rank: self.sharding[rank].model(plain[rank]))
        self.bytes = self.on_ranks(lambda _, model: bytes_held(model))

    # Helpers.

    def on_ranks(self, act: Callable[[int, Any], Any]) -> list[Any]:
        """`act(rank, model)` on every rank."""
        return self.ranks.run(lambda rank: act(rank, self.models[rank]))

    def batch(self, number: int, rank: int) -> Tensor:
        """Of a different number of samples on every rank, where gradients are divided by their count."""
        samples = 1 + (number + rank) % 3 if self.way.reduction == "tokens" else 3
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64).to(self.plan.dtype)

    @property
    def total(self) -> bool:
        """Whether losses are sums over samples."""
        return self.way.reduction == "tokens"

    def turn(self, model: Any, number: int, rank: int, trains: bool = False) -> Tensor:
        """Tell the model which micro-batch comes; its inputs."""
        set_turn(model, number, rank)
        x = self.batch(number, rank)
        if self.total and trains:
            fullshard.set_token_count(model, len(x))
        return x

    def share(self) -> float:
        """By which the ranks' gradients of this micro-batch are multiplied."""
        if self.total:
            return 1 / sum(len(self.batch(self.number, rank)) for rank in range(self.world))
        return 1.0 if self.way.reduction == "sum" else 1 / self.factor

    def differentiable(self) -> bool:
        """Whether on every rank anything that the loss depends on trains."""
        found = []
        for rank in range(self.world):
            set_turn(self.reference, self.number, rank)
            found.append(loss_of(self.reference, self.batch(self.number, rank)).requires_grad)
        return all(found)

    @property
    def tolerance(self) -> float:
        """Of losses and weights, relative."""
        return max(2e-4, 8 * self.rounding) if self.rounding else EXACT

    def gradients_agree(self, where: str = "after a backward") -> None:
        relative = 8 * self.rounding if self.rounding else EXACT
        least = 4 * self.rounding * self.magnitude + 1e-6 if self.rounding else EXACT
        found = self.on_ranks(lambda _, model: gradient_problems(model, self.reference, relative, least))
        assert not any(found), (where, found)

    def values_agree(self, where: str) -> None:
        """Afterwards the reference has the sharded weights, if they were rounded: errors do not add up over steps."""
        found = self.on_ranks(lambda _, model: value_problems(model, self.reference, self.tolerance))
        assert not any(found), (where, found)
        if self.rounding:
            whole = self.on_ranks(lambda _, model: whole_parameters(model))[0]
            with torch.no_grad():
                for name, parameter in self.reference.named_parameters():
                    parameter.copy_(whole[name])

    def gradients(self) -> bool:
        return self.unreduced or any(parameter.grad is not None for parameter in self.reference.parameters())

    # Training.

    @rule(sync=syncs, shape=shapes)
    def micro_batch(self, sync: str = "yes", shape: str = "plain") -> None:
        """Forward and backward; `sync`: with gradient sync, without, or (`scatter`) not between replicas."""
        self.forward_and_backward(sync, shape)

    def forward_and_backward(self, sync: str = "yes", shape: str = "plain", scalers: list | None = None) -> bool:
        """The next micro-batch, everywhere; whether there was anything to train."""
        self.number += 1
        sync = "yes" if self.total else "no" if self.way.wraps and sync == "scatter" else sync
        if (shape == "penalty" and (self.plan.reentrant or self.rounding)) or self.total:  # one backward for a count
            shape = "plain"
        if not self.differentiable():
            return False

        def train(rank: int, model: Any) -> Tensor:
            x = self.turn(model, self.number, rank, trains=True)
            if sync == "scatter":
                model.set_requires_all_reduce(False)
            with synced(model, sync != "no"):
                scaled = [scalers[rank].scale] if scalers is not None else []
                loss = differentiate(model, x, shape, self.total, *scaled)
            if sync == "scatter":
                model.set_requires_all_reduce(True)
            return loss

        losses = self.on_ranks(train)
        wanted = self.reference_losses(shape)
        if torch.float16 in (self.way.param, self.way.reduce):
            assume(self.magnitude < HALF_RANGE)  # a training that diverges overflows, in one process as well
        for loss, want in zip(losses, wanted, strict=True):
            torch.testing.assert_close(loss.double(), want.double(), rtol=self.tolerance, atol=self.tolerance)
        self.unreduced, self.trained = sync != "yes", True
        self.settled()
        if not self.unreduced:
            self.reduced = {name for name, p in self.reference.named_parameters() if p.grad is not None}
        if not self.unreduced and scalers is None:
            self.gradients_agree()
        return True

    def reference_losses(self, shape: str) -> list[Tensor]:
        """One process on the batches of all ranks, in the dtype in which they compute; the losses."""
        losses = []
        for rank in range(self.world):
            low = copy.deepcopy(self.reference).to(self.way.param or self.plan.dtype)
            for parameter in low.parameters():
                parameter.grad = None
            x = self.batch(self.number, rank).to(self.way.param or self.plan.dtype)
            set_turn(low, self.number, rank)
            losses.append(differentiate(low, x, shape, self.total))
            for parameter, mine in zip(self.reference.parameters(), low.parameters(), strict=True):
                if mine.grad is not None:
                    gradient = mine.grad.to(parameter.dtype) * self.share()
                    self.magnitude += float(gradient.norm())
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return losses

    @precondition(lambda self: not self.unreduced)
    @rule(batches=st.integers(0, 2), shape=shapes, clips=st.booleans(), to_none=st.booleans())
    def step(self, batches: int = 0, shape: str = "plain", clips: bool = False, to_none: bool = True) -> None:
        """So many more micro-batches, and an optimizer's step."""
        for _ in range(batches):
            self.forward_and_backward("yes", shape)
        if clips and self.gradients():
            want = nn.utils.clip_grad_norm_(self.reference.parameters(), 0.1)
            allowed = {"rtol": max(1e-6, self.tolerance), "atol": 1e-6 + 8 * self.rounding * self.magnitude}
            for norm in self.on_ranks(lambda _, model: clipped(model)):
                torch.testing.assert_close(norm.double(), want.double(), **allowed)
        self.on_ranks(lambda rank, _: self.optimizers[rank].step())
        self.reference_optimizer.step()
        self.zero(to_none)
        self.values_agree("after a step")

    @precondition(lambda self: not self.gradients() and not self.total)
    @rule(batches=st.integers(1, 3), sync=st.sampled_from(["no", "scatter"]))
    def accumulate(self, batches: int = 2, sync: str = "no") -> None:
        """So many micro-batches without gradient sync, one with it, a clipped step; and one more, as ever."""
        for _ in range(batches):
            self.forward_and_backward(sync)
        if self.forward_and_backward() or not self.unreduced:
            self.step(clips=True)
            self.step(1)

    @precondition(lambda self: not self.gradients())
    @rule(infinite=st.none() | st.integers(0, 3), batches=st.integers(1, 2))
    def scaled_step(self, infinite: int | None = None, batches: int = 1) -> None:
        """With loss scaling, and perhaps a gradient on one rank that is infinite: then no rank takes the step."""
        scalers = self.on_ranks(lambda *_: fullshard.ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1))
        if not all(self.forward_and_backward("yes", "plain", scalers) for _ in range(batches)):
            return self.zero(True)

        def spoil(rank: int, model: Any) -> bool:
            grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
            grads = [grad for grad in grads if grad.numel()] if rank == infinite else []
            for grad in grads[:1]:
                grad.view(-1)[0] = float("inf")
            return bool(grads)

        def update(rank: int, _: Any) -> float:
            scalers[rank].step(self.optimizers[rank])
            scalers[rank].update()
            return scalers[rank].get_scale()

        skipped = any(self.on_ranks(spoil))
        assert set(self.on_ranks(update)) == {2.0 if skipped else 8.0}
        if not skipped:
            self.reference_optimizer.step()
        self.zero(True)
        return self.values_agree("after a step with a scaled loss")

    @rule(to_none=st.booleans(), keeps=st.booleans())
    def zero(self, to_none: bool = True, keeps: bool = False) -> None:
        """Gradients are given up, reduced or not; or the program keeps them."""
        to_none = to_none or self.way.flat or self.optimizer == "view"  # where one gradient is there for many
        if keeps and to_none:
            grads = [p.grad for p in self.models[0].parameters() if p.grad is not None]
            self.kept += [(local(grad), local(grad).clone()) for grad in grads]
        self.on_ranks(lambda _, model: model.zero_grad(set_to_none=to_none))
        self.reference.zero_grad(set_to_none=to_none)
        for name, parameter in self.reference.named_parameters():
            if name not in self.reduced and not self.way.wraps:  # it waited for a reduction; `.grad` was None and is
                parameter.grad = None
        self.reduced = set() if to_none else self.reduced
        self.unreduced, self.magnitude = False, 0.0

    @precondition(lambda self: not self.gradients())
    @rule(optimizer=optimizers)
    def choose_optimizer(self, optimizer: str) -> None:
        if self.way.flat or (self.rounding > 1e-6 and optimizer == "adamw"):
            optimizer = "sgd"  # an unused parameter's gradient is zero; a rounded one's sign may be any
        self.optimizer, build, self.optimizers = optimizer, OPTIMIZERS[optimizer], []
        view = fullshard.optimizer_view if optimizer == "view" else lambda model: model.parameters()
        self.optimizers = self.on_ranks(lambda _, model: build(view(model)))
        self.reference_optimizer = build(self.reference.parameters())

    # What leaves no trace.

    @rule(evaluates=st.booleans())
    def evaluate(self, evaluates: bool) -> None:
        """A forward without gradients, perhaps in evaluation mode."""

        def forward(rank: int, model: Any) -> Tensor:
            x = self.turn(model, 1, rank)
            with torch.no_grad():
                out = (model.eval() if evaluates else model)(x)[0]
            model.train()
            assert out.dtype == (self.way.output or self.way.param or self.plan.dtype)
            return out

        outputs = self.on_ranks(forward)
        if self.frees:
            self.settled(counted=self.total)
        low = copy.deepcopy(self.reference).to(self.way.param or self.plan.dtype)
        for rank, out in enumerate(outputs):
            set_turn(low, 1, rank)
            with torch.no_grad():
                want = low(self.batch(1, rank).to(self.way.param or self.plan.dtype))[0]
            torch.testing.assert_close(out.double(), want.double(), rtol=self.tolerance, atol=self.tolerance)

    @rule()
    def forward_in_vain(self) -> None:
        """Nobody calls backward."""
        self.on_ranks(lambda rank, model: loss_of(model, self.turn(model, 2, rank), self.total) and None)

    @precondition(lambda self: not self.plan.of_some_ranks)
    @rule(where=st.integers(0, 30), in_backward=st.booleans())
    def exception(self, where: int, in_backward: bool = False) -> None:
        """A module raises in its forward, or as its output gets a gradient; the program catches it and goes on."""

        def fail(rank: int, model: Any) -> None:
            x = self.turn(model, 3, rank, trains=True)
            layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
            with raising(layers[where % len(layers)], in_backward):
                loss = loss_of(model, x, self.total)
                if loss.requires_grad:
                    loss.backward()

        self.on_ranks(fail)
        self.zero(True)
        self.forward_and_backward()

    @precondition(lambda self: not self.plan.of_some_ranks and not self.gradients() and self.optimizer != "view")
    @rule()
    def change_in_between(self) -> None:
        """Weights change between a forward and its backward: where plain PyTorch raises, all ranks do."""

        def refused(model: Any, x: Tensor) -> bool:
            loss = loss_of(model, x, self.total)
            scale(model, "mul_", 0.9)
            try:
                if loss.requires_grad:
                    loss.backward()
            except RuntimeError:
                return True
            return False

        set_turn(self.reference, 3, 0)
        wanted = refused(self.reference, self.batch(3, 0))
        found = self.on_ranks(lambda rank, model: refused(model, self.turn(model, 3, rank, trains=True)))
        assert all(found) or not wanted, found
        self.zero(True)
        self.values_agree("after a refused backward")

    @precondition(lambda self: self.trained and not self.plan.of_some_ranks and not isinstance(self.way.units, int))
    @rule(who=st.integers(0, 3))
    def exception_on_one_rank(self, who: int) -> None:
        """After the last gather, in an order that is known; ranks agree on the error, and none of them goes back."""

        def fail(rank: int, model: Any) -> None:
            x, last = self.turn(model, 3, rank), (model.module if isinstance(model, FSDP) else model).last
            with raising(last) if rank == who % self.world else contextlib.nullcontext():
                loss_of(model, x, self.total)
            torch.distributed.all_reduce(torch.ones(()))

        self.on_ranks(fail)
        self.zero(True)

    @precondition(lambda self: not self.plan.of_some_ranks)
    @rule(nth=st.integers(1, 20))
    def out_of_memory(self, nth: int) -> None:
        """There is no memory for the nth collective."""

        def fail(rank: int, model: Any) -> None:
            set_turn(model, 3, 0)  # all ranks do the same, so that all fail at the same point
            if self.total:
                fullshard.set_token_count(model, 3)
            HERE.pieces_left = nth
            try:
                with contextlib.suppress(torch.OutOfMemoryError):
                    loss = loss_of(model, self.batch(3, 0))
                    if loss.requires_grad:
                        loss.backward()
            finally:
                HERE.pieces_left = 0

        with short_of_memory(), mock.patch.object(self.ranks.coin, "random", lambda: 1.0):
            self.on_ranks(fail)
        self.zero(True)

    @rule(which=st.integers(0, 10), mode=st.sampled_from(["at once", "async", "stays"]), writes_back=st.booleans())
    def look(self, which: int, mode: str = "at once", writes_back: bool = False) -> None:
        """Whole parameters: of all of the model, or of a unit, which may stay gathered over the next step."""

        def see(_: int, model: Any) -> None:
            if isinstance(model, FSDP):
                with FSDP.summon_full_params(model, writeback=writes_back):
                    assert finite(model)
                    if writes_back:
                        scale(model, "mul_", 0.9)
                return
            unit = unit_of(model, which)
            handle = unit.unshard(async_op=mode == "async")
            if handle is not None:
                handle.wait()
            whole = [p for p in unit.parameters(recurse=False) if type(p) is nn.Parameter]  # not of units tied with it
            assert all(bool(p.isfinite().all()) for p in whole)
            if mode != "stays":
                unit.reshard()

        writes_back = writes_back and self.way.wraps and not self.gradients()
        self.on_ranks(see)
        if writes_back:
            scale(self.reference, "mul_", 0.9)
            self.values_agree("after writing whole parameters")
        if mode == "stays":
            self.left_open = None if self.way.wraps else which
            self.forward_and_backward()

    @rule()
    def keep_gathered(self) -> None:
        """A micro-batch with all units gathered from their first use on."""
        contexts = self.on_ranks(lambda _, model: fullshard.keep_gathered(model))
        self.on_ranks(lambda rank, _: contexts[rank].__enter__())
        frees, self.frees = self.frees, False
        self.forward_and_backward()
        self.on_ranks(lambda rank, _: contexts[rank].__exit__(None, None, None))
        self.frees = frees

    @precondition(lambda self: not self.unreduced)
    @rule()
    def park(self) -> None:
        with mock.patch.object(Mover, "needed", lambda *_: True):  # also to a CPU's memory
            self.on_ranks(lambda rank, model: fullshard.park(model, self.optimizers[rank]))
            self.on_ranks(lambda rank, model: fullshard.resume(model, self.optimizers[rank]))

    @precondition(lambda self: not self.way.flat and not self.gradients())
    @rule()
    def copy(self) -> None:
        """A copy of the model computes what the model does."""

        def compare(rank: int, model: Any) -> None:
            x = self.turn(model, 4, rank)
            with torch.no_grad():
                assert copy.deepcopy(model)(x)[0].equal(model(x)[0])

        self.on_ranks(compare)

    # What users change.

    @precondition(lambda self: not self.way.flat and not self.gradients() and self.optimizer != "view")
    @rule(which=st.integers(0, 40), trains=st.booleans())
    def freeze(self, which: int, trains: bool = False) -> None:
        """A parameter is frozen or thawed."""
        names = [name for name, _ in self.reference.named_parameters()]
        name = names[which % len(names)]
        for each in names:  # of two that ranks use unlike each other, none alone: docs/guides/limits.md
            if each in (name, name.replace("left", "right"), name.replace("right", "left")):
                self.reference.get_parameter(each).requires_grad_(trains)
                self.on_ranks(lambda _, model, each=each: named(model)[each].requires_grad_(trains))

    @precondition(lambda self: not self.way.wraps and not self.gradients() and self.way.reduction == "mean")
    @rule(what=st.sampled_from(["after forward", "after backward", "divide"]), value=st.booleans())
    def set(self, what: str, value: bool) -> None:
        """A setting is changed between steps."""

        def change(_: int, model: Any) -> None:
            if what == "after forward":
                model.set_reshard_after_forward(value)
            elif what == "after backward":
                model.set_reshard_after_backward(value)
                self.stays = not value
            else:
                for module in model.modules():
                    if isinstance(module, fullshard.FSDPModule):
                        module.set_gradient_divide_factor(3.0 if value else float(self.world))

        self.on_ranks(change)
        if what == "divide":
            self.factor = 3.0 if value else float(self.world)
        else:
            self.frees = False

    @precondition(lambda self: not self.gradients())
    @rule(way=st.sampled_from(CHANGES), factor=st.sampled_from([0.9, 1.1]))
    def change(self, way: str, factor: float = 0.9) -> None:
        """All weights are scaled by hand; state dicts of whole tensors are copies, and stay what they were."""
        states = self.on_ranks(lambda _, model: model.state_dict() if self.way.wraps else {})
        before = [{name: value.clone() for name, value in state.items()} for state in states]
        self.on_ranks(lambda _, model: scale(model, way, factor))
        changed = [
            name for now, old in zip(states, before, strict=True) for name in old if not now[name].equal(old[name])
        ]
        assert not changed, changed
        scale(self.reference, "mul_", factor)
        self.values_agree(f"after {way}")

    @precondition(lambda self: not self.gradients() and not self.way.flat)
    @rule()
    def swap_in_average(self) -> None:
        """The classical exchange of weights for an average, an evaluation, and back."""

        def swap(rank: int, model: Any) -> None:
            parameters = list(model.parameters())
            backups = [parameter.data for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.data * 0.5
            x = self.turn(model, 1, rank)
            with torch.no_grad():
                model(x)
            for parameter, backup in zip(parameters, backups, strict=True):
                parameter.data = backup

        self.on_ranks(swap)
        self.values_agree("after an average was swapped in and out")

    @precondition(lambda self: not self.gradients() and not self.way.wraps and not hasattr(self.reference, "adapter"))
    @rule()
    def add_parameters(self) -> None:
        """An adapter beside the blocks, sharded as the model is."""

        def adapter() -> nn.Module:
            made = nn.Linear(self.plan.width, self.plan.width).to(self.plan.dtype)
            with torch.no_grad():
                made.weight.fill_(0.01), made.bias.fill_(0.02)
            return made

        def add(rank: int, model: Any) -> None:
            model.adapter = self.sharding[rank].unit(adapter())
            if self.factor != self.world:
                model.adapter.set_gradient_divide_factor(self.factor)

        self.reference.adapter = adapter()
        self.on_ranks(add)
        self.trained = False  # with it
        self.bytes = self.on_ranks(lambda _, model: bytes_held(model))
        self.choose_optimizer(self.optimizer)

    @precondition(lambda self: not self.gradients() and not hasattr(self.reference, "adapter"))
    @rule(way=ways, world=worlds)
    def move(self, way: Way, world: int) -> None:
        """Save, and load on another number of ranks, into a model that is sharded in another way."""
        trains = {name: parameter.requires_grad for name, parameter in self.reference.named_parameters()}
        if way.flat and not all(trains.values()):
            way = replace(way, front="originals")
        if way.flat or way.param is not None or way.reduce is not None or self.optimizer == "view":
            self.choose_optimizer("sgd")
        with tempfile.TemporaryDirectory() as folder:
            save = lambda rank, model: fullshard.save(folder, model, self.optimizers[rank], step=self.number)  # noqa: E731
            self.on_ranks(save)
            self.end()
            self.shard(way, world)
            for name, wanted in trains.items() if not way.flat else ():
                self.on_ranks(lambda _, model, n=name, w=wanted: named(model)[n].requires_grad_(w))
            build = OPTIMIZERS[self.optimizer]
            self.optimizers = self.on_ranks(lambda _, model: build(model.parameters()))
            self.on_ranks(lambda rank, model: fullshard.load(folder, model, self.optimizers[rank], rng=False))
        self.values_agree("after loading elsewhere")

    # Invariants.

    def settled(self, counted: bool = False) -> None:
        """After a backward, and after a forward without gradients: nothing is gathered, reduced or on its way.

        `counted`: but for a count of tokens, perhaps.
        """

        def look(rank: int, model: Any) -> Any:
            if self.left_open is not None:  # which nothing may have run
                unit_of(model, self.left_open).reshard()
            return fullshard.memory_use(model)

        assert counted or not self.ranks.in_flight, [each.kind for each in self.ranks.in_flight]
        for use in self.on_ranks(look):
            self.left_open = None
            assert self.unreduced or not use.reducing, use
            assert not use.gathered or not self.frees or self.whole(), use

    def whole(self) -> bool:
        """Whether every rank holds all of every parameter, so that nothing is gathered or freed."""
        return self.way.copies(self.world) == self.world

    @invariant()
    def bytes_stay(self) -> None:
        """Shards are as large as at the start; gradients that the program keeps are what they were."""
        if not hasattr(self, "optimizers"):
            return
        held = self.on_ranks(lambda _, model: bytes_held(model))
        assert held == self.bytes, (held, self.bytes)
        problems = byte_problems(held, self.way, self.reference)
        assert not problems, problems
        assert all(now.equal(value) for now, value in self.kept), "a gradient that the program keeps has changed"

    def teardown(self) -> None:
        try:
            if hasattr(self, "optimizers") and sys.exc_info()[0] is None:
                self.steady_at_end()
        finally:
            self.end()

    def steady_at_end(self) -> None:
        vain = self.number % 2 == 1
        self.zero(True)
        self.steady(vain)

    def end(self) -> None:
        """Of these ranks."""
        self.kept = []
        self.ending.close()

    def steady(self, vain: bool = False) -> None:
        """The same step again and again: the same collectives, and nothing more of anything than before.

        `vain`: or a forward whose backward nobody calls.
        """
        self.number, self.kept = 5, []  # the same micro-batch
        seen, counts = [{}] * 4, [{}] * 4  # as long as ever: their entries are counted, too
        if not self.differentiable():
            return
        want = plain_counts(self.reference, self.way, self.world) if self.frees and not vain else None

        def train(rank: int, model: Any) -> int:
            x = self.turn(model, 5, rank, trains=True)
            if vain:
                loss_of(model, x, self.total)
                return groups_of_this_rank()
            differentiate(model, x, "plain", self.total)
            if not self.stays:  # else what is gathered again depends on which weights changed in the compute dtype
                self.optimizers[rank].step()
            model.zero_grad()
            return groups_of_this_rank()

        for repetition in range(14):  # ten until ranks expect what they saw last
            self.ranks.counts.clear()
            # At most 4 passes without a backward are kept. What comes next follows from 8 passes: the program may have
            # repeated as many steps before, and then gone on differently (agreement/log.py).
            with mock.patch.object(trace, "_MOST_PASSES", 4), mock.patch.object(log, "_CONTEXT", 8):
                groups = tuple(self.on_ranks(train))
            if repetition >= 10:
                seen[repetition - 10] = {"groups": max(groups), **held_by_this_process()}
                counts[repetition - 10] = dict(self.ranks.counts)
        assert all(each == counts[0] for each in counts), counts
        for what in seen[0]:
            numbers = [each[what] for each in seen]
            assert not all(more > less for less, more in pairwise(numbers)), f"{what} grow: {numbers}"
        if want is not None:
            kinds = {"gathers": "all_gather", "reductions": "reduce_scatter", "small": "all_reduce"}
            assert {name: counts[0].get(kind, 0) for name, kind in kinds.items()} == want, counts[0]


def unit_of(model: Any, which: int) -> Any:
    units = [module for module in model.modules() if isinstance(module, fullshard.FSDPModule)]
    return units[which % len(units)]


def clipped(model: Any) -> Tensor:
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(0.1)
    norm = fullshard.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
