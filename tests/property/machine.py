"""Any model, sharded in any way, taken through any sequence of what users do, is one process on all ranks' batches.

One stateful machine: hypothesis draws a model (`random_blocks.py`), a way to shard it and a sequence of rules; ranks
are threads (`thread_ranks.py`). After every rule what users see is compared: losses, gradients and whether there are
any, parameters, what is gathered. At the end the same step is repeated: it issues the same collectives each time, the
small ones too, and nothing is more than before: tensors, threads, descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from random_blocks import INPUTS, Model, ModelPlan, loss_of, models, set_turn
from thread_ranks import HERE, ThreadRanks
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from ways import WAYS, WRAPPERS, gradient_problems, shard, synced, value_problems

EXACT, SINGLE = 1e-9, 2e-4  # relative, after some steps: of double precision, and of parameters cast to float32


@dataclass(frozen=True)
class Way:
    """How a model is sharded.

    Attributes:
        front: see `ways.WAYS`.
        keep: whether units stay gathered between forward and backward.
        hybrid: whether two replicas are sharded over half of the ranks each; on an even number of ranks.
        single: whether units compute in float32.
        offload: whether shards live in host memory.
        idiom: which units there are: the blocks and the root, or the root alone.
    """

    front: str
    keep: bool = False
    hybrid: bool = False
    single: bool = False
    offload: bool = False
    idiom: str = "blocks"

    @property
    def wraps(self) -> bool:
        return self.front in WRAPPERS

    @property
    def flat(self) -> bool:
        """Whether a unit shows one parameter, so that all of its parameters train or none does."""
        return self.front == "wrapper"


ways = st.builds(
    Way,
    front=st.sampled_from(list(WAYS)),
    keep=st.booleans(),
    hybrid=st.booleans(),
    single=st.sampled_from([False, False, False, True]),
    offload=st.sampled_from([False, False, False, True]),
    idiom=st.sampled_from(["blocks", "blocks", "blocks", "root"]),
)
worlds = st.sampled_from([2, 2, 1, 3, 4])
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


def sharded(model: nn.Module, plan: ModelPlan, way: Way, world: int) -> nn.Module:
    """A model of that plan, sharded so."""

    def units(model: nn.Module) -> list[nn.Module]:
        chosen = list(model.blocks) if way.idiom == "blocks" else []
        return [*(block.down for block in chosen), *chosen] if plan.nested else chosen

    return shard(model, way.front, units, **settings_of(way, world))


def settings_of(way: Way, world: int) -> dict[str, Any]:
    """The arguments of every unit."""
    settings: dict[str, Any] = {"keep": way.keep, "hybrid": way.hybrid and world % 2 == 0}
    if way.single and way.wraps:
        settings["mixed_precision"] = fullshard.MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
    elif way.single:
        settings["mp_policy"] = fullshard.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    if way.offload and way.wraps:
        settings["cpu_offload"] = fullshard.CPUOffload(offload_params=True)
    elif way.offload:
        settings["offload_policy"] = fullshard.CPUOffloadPolicy()
    return settings


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the unsharded model's names."""
    return {name.replace("_fsdp_wrapped_module.", ""): parameter for name, parameter in model.named_parameters()}


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, INPUTS, generator=generator, dtype=torch.float64)


class Training(RuleBasedStateMachine):
    """See the module's docstring. `models` and `optimizers` are by rank; `reference` saw the batches of all."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = contextlib.ExitStack()
        self.ending.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self.ranks: ThreadRanks
        self.number = 0  # of micro-batches
        self.unreduced = False  # whether gradients were left on their ranks
        self.rounded = False  # whether any step computed in float32

    @initialize(plan=models, way=ways, world=worlds, optimizer=st.sampled_from(list(OPTIMIZERS)))
    def start(self, plan: ModelPlan, way: Way, world: int, optimizer: str) -> None:
        if way.flat and any(block.frozen for block in plan.blocks):
            plan = without_frozen(plan)
        self.plan = plan
        self.reference = Model(plan)
        self.shard(way, world)
        self.choose_optimizer(optimizer)

    def shard(self, way: Way, world: int) -> None:
        """Start `world` ranks with a model each."""
        self.way, self.world = way, world
        self.rounded = self.rounded or way.single
        self.ranks = self.ending.enter_context(ThreadRanks(world))
        plain = [Model(self.plan) for _ in range(world)]  # here: torch's random numbers are the process's
        self.models: list[Any] = self.ranks.run(lambda rank: sharded(plain[rank], self.plan, way, world))

    # Helpers.

    @property
    def tolerance(self) -> float:
        return SINGLE if self.rounded else EXACT

    def on_ranks(self, act: Callable[[int, Any], Any]) -> list[Any]:
        """`act(rank, model)` on every rank."""
        return self.ranks.run(lambda rank: act(rank, self.models[rank]))

    def problems(self, compare: Callable[..., list[str]], where: str) -> None:
        found = self.on_ranks(lambda rank, model: compare(where, model, self.reference, self.tolerance))
        assert not any(found), found

    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.reference.parameters())

    # Training.

    @precondition(lambda self: self.trains())
    @rule(reduced=st.sampled_from([True, True, False]))
    def micro_batch(self, reduced: bool) -> None:
        """Forward and backward; `reduced`: with gradient sync."""
        losses, wanted = self.forward_and_backward(reduced)
        for loss, want in zip(losses, wanted, strict=True):
            torch.testing.assert_close(loss.double(), want, rtol=self.tolerance, atol=self.tolerance)
        self.unreduced = not reduced
        self.nothing_stays_gathered()
        if reduced:
            self.problems(gradient_problems, "after a backward")

    def forward_and_backward(self, reduced: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Every rank's loss, and the reference's of the same batches."""
        self.number += 1

        def train(rank: int, model: Any) -> Tensor:
            set_turn(model, self.number, rank)
            with synced(model, reduced):
                loss = loss_of(model, batch(self.number, rank))
                loss.backward()
            return loss.detach()

        losses = self.on_ranks(train)
        wanted = []
        for rank in range(self.world):
            set_turn(self.reference, self.number, rank)
            loss = loss_of(self.reference, batch(self.number, rank))
            (loss / self.world).backward()
            wanted.append(loss.detach())
        return losses, wanted

    @precondition(lambda self: not self.unreduced)
    @rule(clips=st.booleans(), to_none=st.booleans())
    def step(self, clips: bool, to_none: bool) -> None:
        if clips:
            want = nn.utils.clip_grad_norm_(self.reference.parameters(), 0.1)
            for norm in self.on_ranks(lambda _, model: clipped(model)):
                torch.testing.assert_close(norm.double(), want.double(), rtol=max(1e-6, self.tolerance), atol=1e-7)
        self.optimizer_step()
        self.zero(to_none)
        self.problems(value_problems, "after a step")

    def optimizer_step(self) -> None:
        self.on_ranks(lambda rank, _: self.optimizers[rank].step())
        self.reference_optimizer.step()

    @rule(to_none=st.just(True))
    def zero(self, to_none: bool) -> None:
        """Gradients are given up, reduced or not."""
        to_none = to_none or self.way.flat  # one gradient of a unit is there or is not
        self.on_ranks(lambda _, model: model.zero_grad(set_to_none=to_none))
        self.reference.zero_grad(set_to_none=to_none)
        self.unreduced = False

    @precondition(lambda self: not self.gradients())
    @rule(optimizer=st.sampled_from(list(OPTIMIZERS)))
    def choose_optimizer(self, optimizer: str) -> None:
        self.optimizer = "sgd" if self.way.flat else optimizer  # where an unused parameter's gradient is zero
        build = OPTIMIZERS[self.optimizer]
        self.optimizers = self.on_ranks(lambda _, model: build(model.parameters()))
        self.reference_optimizer = build(self.reference.parameters())

    def gradients(self) -> bool:
        return self.unreduced or any(parameter.grad is not None for parameter in self.reference.parameters())

    # What leaves no trace.

    @rule(again=st.booleans())
    def evaluate(self, again: bool) -> None:
        """A forward without gradients, perhaps in evaluation mode."""

        def forward(rank: int, model: Any) -> Tensor:
            set_turn(model, 1, rank)
            with torch.no_grad():
                return loss_of(model.eval() if again else model, batch(1, rank))

        losses = self.on_ranks(forward)
        if not self.way.keep:
            self.nothing_stays_gathered()
        self.on_ranks(lambda _, model: model.train())
        for rank, loss in enumerate(losses):
            set_turn(self.reference, 1, rank)
            with torch.no_grad():
                want = loss_of(self.reference, batch(1, rank))
            torch.testing.assert_close(loss.double(), want, rtol=self.tolerance, atol=self.tolerance)

    @rule()
    def forward_in_vain(self) -> None:
        """Nobody calls backward."""

        def forward(rank: int, model: Any) -> None:
            set_turn(model, 2, rank)
            loss_of(model, batch(2, rank))

        self.on_ranks(forward)

    @rule(where=st.integers(0, 30), in_backward=st.booleans())
    def exception(self, where: int, in_backward: bool) -> None:
        """A module raises in its forward, or as its output gets a gradient; the program catches it and goes on."""

        def fail(rank: int, model: Any) -> None:
            set_turn(model, 3, rank)
            layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
            with raising(layers[where % len(layers)], in_backward), contextlib.suppress(Planted):
                loss_of(model, batch(3, rank)).backward()

        self.on_ranks(fail)
        self.zero(True)

    @rule(nth=st.integers(1, 40))
    def out_of_memory(self, nth: int) -> None:
        """The nth piece of memory that each rank asks for is not there."""

        def fail(rank: int, model: Any) -> None:
            set_turn(model, 3, 0)  # all ranks do the same, so that all fail at the same point
            HERE.pieces_left = nth
            try:
                with contextlib.suppress(torch.OutOfMemoryError):
                    loss_of(model, batch(3, 0)).backward()
            finally:
                HERE.pieces_left = 0

        with short_of_memory():
            self.on_ranks(fail)
        self.zero(True)

    @rule(which=st.integers(0, 10), writes_back=st.booleans())
    def look(self, which: int, writes_back: bool) -> None:
        """Whole parameters, of all of the model or of a unit that stays gathered until it is used."""

        def see(rank: int, model: Any) -> None:
            if isinstance(model, FSDP):
                with FSDP.summon_full_params(model, writeback=writes_back):
                    assert all(parameter.isfinite().all() for parameter in model.parameters())
            else:
                units = [module for module in model.modules() if isinstance(module, fullshard.FSDPModule)]
                units[which % len(units)].unshard()
                units[which % len(units)].reshard()

        self.on_ranks(see)

    @precondition(lambda self: self.trains())
    @rule()
    def keep_gathered(self) -> None:
        """A micro-batch with all units gathered from their first use on."""
        contexts = self.on_ranks(lambda _, model: fullshard.keep_gathered(model))
        self.on_ranks(lambda rank, _: contexts[rank].__enter__())
        self.forward_and_backward()
        self.on_ranks(lambda rank, _: contexts[rank].__exit__(None, None, None))
        self.unreduced = False
        self.problems(gradient_problems, "after a backward with all units kept")

    @precondition(lambda self: not self.unreduced)
    @rule()
    def park(self) -> None:
        self.on_ranks(lambda rank, model: fullshard.park(model, self.optimizers[rank]))
        self.on_ranks(lambda rank, model: fullshard.resume(model, self.optimizers[rank]))

    # What users change.

    @precondition(lambda self: not self.way.flat and not self.gradients())
    @rule(which=st.integers(0, 40), trains=st.booleans())
    def freeze(self, which: int, trains: bool) -> None:
        """A parameter is frozen or thawed."""
        names = [name for name, _ in self.reference.named_parameters()]
        name = names[which % len(names)]
        self.reference.get_parameter(name).requires_grad_(trains)
        self.on_ranks(lambda _, model: named(model)[name].requires_grad_(trains))

    @precondition(lambda self: not self.gradients())
    @rule(way=st.sampled_from(["mul_", "detach", "foreach", "data", "load"]), factor=st.sampled_from([0.9, 1.1]))
    def change(self, way: str, factor: float) -> None:
        """All weights are scaled by hand."""
        self.on_ranks(lambda _, model: scale(model, way, factor))
        scale(self.reference, "mul_", factor)
        self.problems(value_problems, f"after {way}")

    @precondition(lambda self: not self.gradients() and not self.way.flat)
    @rule()
    def swap_in_average(self) -> None:
        """The classical exchange of weights for an average, an evaluation, and back."""

        def swap(rank: int, model: Any) -> None:
            parameters = list(model.parameters())
            backups = [parameter.data for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.data * 0.5
            set_turn(model, 1, rank)
            with torch.no_grad():
                loss_of(model, batch(1, rank))
            for parameter, backup in zip(parameters, backups, strict=True):
                parameter.data = backup

        self.on_ranks(swap)
        self.problems(value_problems, "after an average was swapped in and out")

    @precondition(lambda self: not self.gradients() and not self.way.wraps and not hasattr(self.reference, "adapter"))
    @rule()
    def add_parameters(self) -> None:
        """An adapter beside the blocks, sharded as the model is."""

        def adapter() -> nn.Module:
            made = nn.Linear(self.plan.width, self.plan.width).double()
            with torch.no_grad():
                made.weight.fill_(0.01), made.bias.fill_(0.02)
            return made

        def add(rank: int, model: Any) -> None:
            model.adapter = shard(adapter(), self.way.front, lambda _: [], **settings_of(self.way, self.world))

        self.reference.adapter = adapter()
        self.on_ranks(add)
        self.choose_optimizer(self.optimizer)

    @precondition(lambda self: not self.gradients() and not hasattr(self.reference, "adapter"))
    @rule(way=ways, world=worlds)
    def move(self, way: Way, world: int) -> None:
        """Save, and load on another number of ranks, into a model that is sharded in another way."""
        trains = {name: parameter.requires_grad for name, parameter in self.reference.named_parameters()}
        if way.flat and not all(trains.values()):
            way = Way("originals", way.keep, way.hybrid, way.single, way.offload, way.idiom)
        if way.flat:
            self.choose_optimizer("sgd")
        with tempfile.TemporaryDirectory() as folder:
            save = lambda rank, model: fullshard.save(folder, model, self.optimizers[rank], step=self.number)  # noqa: E731
            self.on_ranks(save)
            self.ending.close()
            self.ending.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            self.shard(way, world)
            for name, wanted in trains.items():
                self.on_ranks(lambda _, model, n=name, w=wanted: self.set_trains(model, n, w))
            build = OPTIMIZERS[self.optimizer]
            self.optimizers = self.on_ranks(lambda _, model: build(model.parameters()))
            self.on_ranks(lambda rank, model: fullshard.load(folder, model, self.optimizers[rank], rng=False))
        self.problems(value_problems, "after loading elsewhere")

    def set_trains(self, model: Any, name: str, trains: bool) -> None:
        if not self.way.flat:
            named(model)[name].requires_grad_(trains)

    # Invariants.

    def nothing_stays_gathered(self) -> None:
        """After a backward, and after a forward without gradients."""
        if not self.whole():
            for use in self.on_ranks(lambda _, model: fullshard.memory_use(model)):
                assert not use.gathered, use

    def whole(self) -> bool:
        """Whether every rank holds all of every parameter, so that nothing is gathered or freed."""
        return self.world == 1 or (self.way.hybrid and self.world == 2)

    def teardown(self) -> None:
        try:
            if hasattr(self, "models") and self.trains():
                self.zero(True)
                self.steady()
        finally:
            self.ending.close()

    def steady(self) -> None:
        """The same step again and again: the same collectives, and nothing more of anything than before."""
        seen = []
        for repetition in range(9):
            self.number = 5  # the same micro-batch
            self.ranks.counts.clear()
            self.forward_and_backward()
            collectives = dict(self.ranks.counts)
            self.zero(True)
            if repetition >= 6:
                seen.append((collectives, held()))
        assert all(each == seen[0] for each in seen), seen


def without_frozen(plan: ModelPlan) -> ModelPlan:
    return replace(plan, blocks=tuple(replace(block, frozen=False) for block in plan.blocks))


def held() -> dict[str, int]:
    """How many there are in this process of what must not grow."""
    gc.collect()
    tensors = sum(1 for each in gc.get_objects() if isinstance(each, Tensor))
    return {
        "tensors": tensors,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def clipped(model: Any) -> Tensor:
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(0.1)
    norm = fullshard.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class Planted(Exception):
    """What a program's module raises."""


@contextlib.contextmanager
def raising(module: nn.Module, in_backward: bool) -> Iterator[None]:
    """`module` raises in its forward, or when its output's gradient comes."""

    def fail(*_: object) -> None:
        raise Planted

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if not in_backward:
            fail()
        if output.requires_grad:
            output.register_hook(fail)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    """On a rank's thread whose `HERE.pieces_left` is n, the nth piece of memory that is asked for is not there."""
    resize, empty, empty_like = torch.UntypedStorage.resize_, torch.empty, torch.empty_like

    def ask() -> None:
        left = getattr(HERE, "pieces_left", 0)
        HERE.pieces_left = left - 1
        if left == 1:
            raise torch.OutOfMemoryError("planted")

    def growing(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes > storage.nbytes():
            ask()
        return resize(storage, nbytes)

    def making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **keywords: Any) -> Tensor:
            ask()
            return make(*args, **keywords)

        return made

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", growing),
        mock.patch.object(torch, "empty", making(empty)),
        mock.patch.object(torch, "empty_like", making(empty_like)),
    ):
        yield


def scale(model: nn.Module, way: str, factor: float) -> None:
    """All weights, in one of the ways in which programs change them."""
    parameters = list(model.parameters())
    with torch.no_grad():
        if way == "load":
            model.load_state_dict({name: value.detach().clone() * factor for name, value in model.state_dict().items()})
        elif way == "foreach":
            torch._foreach_mul_(parameters, factor)
        for parameter in parameters if way in ("mul_", "detach", "data") else ():
            if way == "mul_":
                parameter.mul_(factor)
            elif way == "detach":
                parameter.detach().mul_(factor)
            else:
                parameter.data = parameter.detach().clone() * factor
