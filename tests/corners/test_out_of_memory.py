"""Running out of memory at any allocation of a step: the user's error on top, nothing leaked, the next step right.

Every allocation is a place to fail: an operator that makes a new tensor (the user's or the engine's), and a storage
that grows. All ranks fail at the same one, as ranks with equal shapes do. A communicator that always says "not done
yet" makes sure that the ranks allocate in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from models import blocks_of
from ways import WRAPPERS, gradient_problems, on_ranks, shard, wide_batch, without_sync
from ways import Block as Layers


class SimulatedError(torch.OutOfMemoryError):
    """What the failing allocation raises."""


class Failing(TorchDispatchMode):
    """Counts allocations; raises at the one of number `at` (0-based), if there is one.

    Attributes:
        seen: what allocated, in order.
        failed: whether there was one of that number.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.seen, self.failed = at, [], False

    def note(self, what: str) -> None:
        self.seen.append(what)
        if len(self.seen) - 1 == self.at:
            self.failed = True
            raise SimulatedError(f"simulated: out of memory at allocation {self.at}, {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and not func._schema.is_mutable:
            self.note(func._schema.name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[Failing]:
        """Operators and growing storages of this rank."""
        OF_RANK.failing = self
        try:
            with self:
                yield self
        finally:
            OF_RANK.failing = None


OF_RANK = threading.local()  # .failing: what watches this rank's storages


@pytest.fixture(autouse=True)
def watched_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks share the class of storages, so that it is patched once for all."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        failing = getattr(OF_RANK, "failing", None)
        if failing is not None and size > storage.nbytes():
            failing.note("resize_")
        return plain(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)


class Late:
    """A pending collective that never says that it is done, so that no rank's timing decides anything."""

    def __init__(self, inner: Any) -> None:
        self.wait = inner.wait

    def is_completed(self) -> bool:
        return False


class LateComm(fullshard.RecordingComm):
    """See `Late`."""

    def gather(self, *given: Any) -> Any:
        return Late(self.inner.gather(*given))

    def reduce(self, *given: Any) -> Any:
        return Late(self.inner.reduce(*given))

    def all_reduce(self, *given: Any) -> Any:
        return Late(self.inner.all_reduce(*given))


class Network(nn.Module):
    """Two blocks of two layers and a head; the second block is recomputed in backward if asked for."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.blocks = nn.ModuleList([Layers(), Layers()])
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False) if self.recomputes else self.blocks[1](x)
        return self.head(x)


def sharded(way: str, variant: str) -> Any:
    given: dict[str, Any] = {"comm": LateComm(fullshard.TorchComm()), "keep": variant == "kept"}
    if variant == "bf16" and way in WRAPPERS:
        given["mixed_precision"] = fullshard.MixedPrecision(torch.bfloat16, torch.float32)
    elif variant == "bf16":
        given["mp_policy"] = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return shard(Network(variant == "recomputing"), way, blocks_of, hybrid=variant == "hybrid", **given)


def backward(model: nn.Module) -> Tensor:
    loss = model(wide_batch(0, dist.get_rank())).float().square().mean()
    loss.backward()
    return loss.detach()


def local(tensor: Tensor | None) -> Tensor | None:
    """This rank's elements, in memory of their own."""
    return None if tensor is None else (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [local(p.grad) for p in model.parameters()]


def same(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    return all((g is None) == (w is None) and (g is None or torch.equal(g, w)) for g, w in zip(got, want, strict=True))


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(wide_batch(0, 0)).clone()


def unshard(model: nn.Module) -> None:
    """All units at once, as whoever exports a model does. What a user unsharded stays so until they reshard it."""
    units = [m for m in model.modules() if isinstance(m, fullshard.FSDPModule)]
    try:
        for handle in [unit.unshard(async_op=True) for unit in units]:
            if handle is not None:
                handle.wait()
    finally:
        for unit in units:
            unit.reshard()


def summon(model: nn.Module) -> None:
    with FSDP.summon_full_params(model, with_grads=True):
        sum(p.sum() for p in model.parameters())


def two_micro_batches(model: nn.Module) -> None:
    """The first without reduction, so that the second adds to what is set aside."""
    with without_sync(model):
        backward(model)
    backward(model)


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "step": backward,
    "evaluation": evaluate,
    "unshard": unshard,
    "summon": summon,
    "state_dict": lambda model: model.state_dict(),
    "accumulation": two_micro_batches,
}


class Expected:
    """What a model that never failed gives."""

    def __init__(self, way: str, variant: str) -> None:
        model = sharded(way, variant)
        self.output, self.loss, self.gradients = evaluate(model), backward(model), gradients(model)
        self.parameters = [local(p) for p in model.parameters()]
        plain = Network()
        plain(torch.cat([wide_batch(0, rank) for rank in range(dist.get_world_size())])).square().mean().backward()
        self.problems = gradient_problems("never failed", model, plain, 0.05 if variant == "bf16" else 1e-5)

    def compare(self, model: nn.Module, own: list[nn.Parameter], number: int) -> list[str]:
        """After an error: parameters `own` as they were, the next step as ever, and nothing left gathered."""
        found = {"parameters changed": not same([local(p) for p in own], self.parameters)}
        found["modules show other parameters"] = any(p is not q for p, q in zip(model.parameters(), own, strict=True))
        if number % 3 == 1:  # what a program does first after the error, in turn
            found["evaluation"] = not torch.equal(evaluate(model), self.output)
        elif number % 3 == 2:
            found["state_dict"] = len(model.state_dict()) != 10
        model.zero_grad()
        found["loss"] = not torch.equal(backward(model), self.loss)
        found["gradients"] = not same(gradients(model), self.gradients)
        model.zero_grad()
        held = fullshard.memory_use(model)
        found["memory after the step"] = bool(held.gathered or held.reducing)
        return [what for what, wrong in found.items() if wrong]


@pytest.mark.parametrize(
    ("way", "variant", "action"),
    [
        ("rows", "first step", "step"),
        *[(way, "plain", "step") for way in ("rows", "flat", "wrapper", "originals")],
        *[("rows", variant, "step") for variant in ("bf16", "recomputing", "hybrid")],
        *[("originals", variant, "step") for variant in ("kept", "recomputing")],
        *[("rows", "plain", action) for action in ("unshard", "accumulation")],
        *[("wrapper", "plain", action) for action in ("evaluation", "summon", "state_dict", "accumulation")],
    ],
)
@on_ranks
def test_at_every_allocation(way: str, variant: str, action: str) -> list[str]:
    """One step for every other allocation in it, of first steps for every sixth."""
    act, first = ACTIONS[action], variant == "first step"
    expected = Expected(way, variant)
    problems, model = expected.problems, sharded(way, variant)
    own = list(model.parameters())
    if not first:
        backward(model), act(model), model.zero_grad()
    with Failing().watching() as counted:
        act(model)
    assert len(counted.seen) >= (30 if action == "step" else 1), counted.seen
    model.zero_grad()
    for number in range(way != "rows", len(counted.seen), 6 if first else 2):
        if first:
            model = sharded(way, variant)
            own = list(model.parameters())
        what, failing = f"allocation {number} of {len(counted.seen)} ({counted.seen[number]})", Failing(number)
        try:
            with failing.watching():
                act(model)
            assert not failing.failed, f"{what}: no error reached the user"
        except SimulatedError:
            pass
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__} hides the user's error: {str(error)[:120]}")
        problems += [f"{what}: then {wrong}" for wrong in expected.compare(model, own, number)]
        if len(problems) > 5:
            break
    return problems


@pytest.mark.parametrize(("way", "sync"), [("rows", True), ("flat", False), ("wrapper", False), ("originals", True)])
@on_ranks
def test_a_failed_forward_keeps_what_was_accumulated(way: str, sync: bool) -> list[str]:
    """A micro-batch whose forward fails is given again: what the one before it left is not lost."""

    def first_micro_batch(model: nn.Module) -> None:
        if sync:
            backward(model)
        else:
            with without_sync(model):
                backward(model)

    plain, model, problems = sharded(way, "plain"), sharded(way, "plain"), []
    first_micro_batch(plain), backward(plain)
    with Failing().watching() as counted:
        plain(wide_batch(0, dist.get_rank()))
    for number, what in enumerate(counted.seen):
        first_micro_batch(model)
        failing, raised = Failing(number), False
        try:
            with failing.watching():
                model(wide_batch(0, dist.get_rank()))
        except SimulatedError:
            raised = True
        assert raised == failing.failed and (not (number < len(counted.seen) // 2) or raised), (
            f"failure at allocation {number} ({what}): raised is {raised}"
        )
        backward(model)
        assert same(gradients(model), gradients(plain)), f"gradients after a failure at allocation {number} ({what})"
        model.zero_grad()
    return problems
