"""Running out of memory at any allocation of a step: the user's error on top, nothing leaked, the next step right.

Every allocation is a place to fail: an operator that makes a new tensor (the user's or the engine's), and a storage
that grows. All ranks fail at the same one, as ranks with equal shapes do. A communicator that always says "not done
yet" makes sure that the ranks allocate in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same

WIDE = 8
FRONT_ENDS = ("rows", "flat", "owner", "blocks", "flat parameter", "original parameters")


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
        """Operators and growing storages."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if size > storage.nbytes():
                self.note("resize_")
            return plain(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


class Late:
    """A pending collective that never says that it is done, so that no rank's timing decides anything."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def wait(self) -> object:
        return self.inner.wait()

    def is_completed(self) -> bool:
        return False


class LateComm(fullshard.RecordingComm):
    """See `Late`."""

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Any:
        return Late(self.inner.gather(axis, out, shard))

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        return Late(self.inner.reduce(axis, out, buffer, mean))

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        return Late(self.inner.all_reduce(axis, tensor, mean))


class Network(nn.Module):
    """Two blocks of two layers; the second is recomputed in backward if asked for."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)) for _ in range(2)
        )
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == 1 and self.recomputes:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def sharded(front: str, variant: str) -> nn.Module:
    model = Network(variant == "recomputing")
    comm = LateComm(fullshard.TorchComm())
    world = dist.get_world_size()
    if front in ("flat parameter", "original parameters"):
        given: dict[str, Any] = {"use_orig_params": front == "original parameters", "comm": comm}
        if variant == "bf16":
            given["mixed_precision"] = fullshard.MixedPrecision(torch.bfloat16, torch.float32)
        if variant == "kept":
            given["sharding_strategy"] = fullshard.ShardingStrategy.SHARD_GRAD_OP
        for index in range(2):
            model.blocks[index] = FSDP(model.blocks[index], **given)
        return FSDP(model, **given)
    given = {"comm": comm, "layout": fullshard.Blocks("row") if front == "blocks" else front}
    if variant == "bf16":
        given["mp_policy"] = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if variant == "kept":
        given["reshard_after_forward"] = False
    if variant == "hybrid":
        given["mesh"] = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fullshard.fully_shard(block, **given)
    return fullshard.fully_shard(model, **given)


def batch(rank: int) -> Tensor:
    return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(rank))


def forward_backward(model: nn.Module) -> Tensor:
    loss = model(batch(dist.get_rank())).float().square().mean()
    loss.backward()
    return loss.detach()


def local(tensor: Tensor | None) -> Tensor | None:
    """This rank's elements, in memory of their own."""
    return None if tensor is None else (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [local(p.grad) for p in model.parameters()]


def same(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    return all((g is None) == (w is None) and (g is None or torch.equal(g, w)) for g, w in zip(got, want, strict=True))


class Expected:
    """What a model that never failed gives."""

    def __init__(self, front: str, variant: str) -> None:
        model = sharded(front, variant)
        with torch.no_grad():
            self.output = model(batch(0)).clone()
        self.loss = forward_backward(model)
        self.gradients = gradients(model)
        self.parameters = [local(p) for p in model.parameters()]

    def check_reference(self, front: str, variant: str) -> list[str]:
        """Against one process, so that "as without the failure" means right."""
        plain = Network()
        x = torch.cat([batch(rank) for rank in range(dist.get_world_size())])
        plain(x).square().mean().backward()
        with torch.no_grad():
            output = plain(batch(0))
        tolerance = 0.02 if variant == "bf16" else 1e-6
        problems = [] if torch.allclose(self.output.float(), output, rtol=tolerance, atol=tolerance) else ["output"]
        if front == "rows":
            model = sharded(front, variant)
            forward_backward(model)
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                if not torch.allclose(p.grad.full_tensor(), q.grad, rtol=tolerance, atol=tolerance):
                    problems.append(f"reference gradient of {name}")
        return problems


SHOWN = "modules show other parameters than before"


def use(model: nn.Module, number: int, expected: Expected) -> str | None:
    """What a program does first after the error, in turn; what was wrong."""
    if number % 3 == 1:
        with torch.no_grad():
            if not torch.equal(model(batch(0)), expected.output):
                return "evaluation"
    elif number % 3 == 2 and len(model.state_dict()) != 10:
        return "state_dict"
    return None


def check_step(model: nn.Module, own: list[nn.Parameter], number: int, expected: Expected) -> list[str]:
    """After an error: parameters `own` as they were, the next step as ever, and nothing left gathered."""
    problems = []
    if not same([local(p) for p in own], expected.parameters):
        problems.append("parameters changed")
    if any(p is not q for p, q in zip(model.parameters(), own, strict=True)):
        problems.append(SHOWN)
    if (wrong := use(model, number, expected)) is not None:
        problems.append(wrong)
    model.zero_grad()
    loss = forward_backward(model)
    if not torch.equal(loss, expected.loss):
        problems.append(f"loss {loss} for {expected.loss}")
    if not same(gradients(model), expected.gradients):
        problems.append("gradients")
    model.zero_grad()
    held = fullshard.memory_use(model)
    if held.gathered or held.reducing:
        problems.append(f"{held.gathered} bytes gathered, {held.reducing} reducing after the step")
    return problems


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(0))


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
    wrapper = isinstance(model, FSDP)
    if wrapper:
        with model.no_sync():
            forward_backward(model)
    else:
        model.set_requires_gradient_sync(False)
        try:
            forward_backward(model)
        finally:
            model.set_requires_gradient_sync(True)
    forward_backward(model)


ACTIONS = {
    "step": forward_backward,
    "evaluation": evaluate,
    "unshard": unshard,
    "summon": summon,
    "state_dict": lambda model: model.state_dict(),
    "accumulation": two_micro_batches,
}


def fail_everywhere(front: str, variant: str, first_step: bool, action: str = "step") -> list[str]:
    """One step for each allocation in it; `first_step`: every other one, of a new model each; else of one model."""
    act = ACTIONS[action]
    expected = Expected(front, variant)
    problems = expected.check_reference(front, variant)
    model = sharded(front, variant)
    own = list(model.parameters())
    if not first_step:
        forward_backward(model)
        act(model)
        model.zero_grad()
    with Failing().watching() as counted:
        act(model)
    if len(counted.seen) < (30 if action == "step" else 1):
        problems.append(f"only {len(counted.seen)} allocations seen: {counted.seen}")
    model.zero_grad()
    # Of a first step, which is made anew each time, every other one: the odd ones of every second front-end.
    chosen = range(FRONT_ENDS.index(front) % 2, len(counted.seen), 2) if first_step else range(len(counted.seen))
    for number in chosen:
        if first_step:
            model = sharded(front, variant)
            own = list(model.parameters())
        what = f"allocation {number} of {len(counted.seen)} ({counted.seen[number]})"
        print(what, flush=True)  # the last line tells where a rank died
        failing = Failing(number)
        try:
            with failing.watching():
                act(model)
            if failing.failed:  # a pass that ranks need not compare allocates less than the one that was counted
                problems.append(f"{what}: no error reached the user")
        except SimulatedError:
            pass
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__} hides the user's error: {str(error)[:120]}")
        try:
            found = check_step(model, own, number, expected)
        except Exception as error:
            return [*problems, f"{what}: then {type(error).__name__}: {str(error)[:200]}"]
        told = any(SHOWN in problem for problem in problems)  # once: it hides nothing else
        problems += [f"{what}: then {wrong}" for wrong in found if wrong is not SHOWN or not told]
        if len(problems) > 5:
            break
    return problems


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_at_every_allocation_of_the_first_step(run_ranks, front):
    assert_same(run_ranks(fail_everywhere, front, "plain", True, timeout=120))


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_at_every_allocation_of_a_later_step(run_ranks, front):
    assert_same(run_ranks(fail_everywhere, front, "plain", False, timeout=120))


@pytest.mark.parametrize("variant", ["bf16", "kept", "recomputing"])
@pytest.mark.parametrize("front", ["rows", "flat", "flat parameter", "original parameters"])
def test_at_every_allocation_with(run_ranks, front, variant):
    assert_same(run_ranks(fail_everywhere, front, variant, False, timeout=120))


@pytest.mark.parametrize("front", ["rows", "flat"])
def test_at_every_allocation_on_a_hybrid_mesh(run_ranks, front):
    assert_same(run_ranks(fail_everywhere, front, "hybrid", False, timeout=120))


@pytest.mark.parametrize(
    ("action", "front"),
    [
        *[("evaluation", front) for front in ("rows", "flat", "flat parameter")],
        *[("unshard", front) for front in ("rows", "flat")],
        *[("summon", front) for front in ("flat parameter", "original parameters")],
        *[("state_dict", front) for front in ("flat parameter", "original parameters")],
        *[("accumulation", front) for front in ("rows", "flat", "flat parameter")],
    ],
)
def test_at_every_allocation_of(run_ranks, action, front):
    assert_same(run_ranks(fail_everywhere, front, "plain", False, action, timeout=120))


# A micro-batch whose forward fails is given again: what the one before it left is not lost.


def retried(front: str, sync: bool) -> list[str]:
    def first_micro_batch(model: nn.Module) -> None:
        if sync:
            forward_backward(model)
        elif isinstance(model, FSDP):
            with model.no_sync():
                forward_backward(model)
        else:
            model.set_requires_gradient_sync(False)
            forward_backward(model)
            model.set_requires_gradient_sync(True)

    plain = sharded(front, "plain")
    first_micro_batch(plain)
    forward_backward(plain)
    want = gradients(plain)
    with Failing().watching() as counted:
        plain(batch(dist.get_rank()))
    model = sharded(front, "plain")
    problems = []
    for number, what in enumerate(counted.seen):
        print(what, number, flush=True)
        first_micro_batch(model)
        failing, told = Failing(number), False
        try:
            with failing.watching():
                model(batch(dist.get_rank()))
        except SimulatedError:
            told = True
        if told != failing.failed or (number < len(counted.seen) // 2 and not told):
            problems.append(f"failure at allocation {number} ({what}): the user was {'' if told else 'not '}told")
        forward_backward(model)
        if not same(gradients(model), want):
            problems.append(f"gradients after a failure at allocation {number} ({what})")
        model.zero_grad()
    return problems


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("front", ["rows", "flat", "flat parameter", "original parameters"])
def test_a_failed_forward_keeps_what_was_accumulated(run_ranks, front, sync):
    assert_same(run_ranks(retried, front, sync, timeout=120))
