"""The wrapper together with checkpointing, compile, copies, casts, several roots, odd inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fullshard
from wrapped import Block, batch, blocks, same, sharded, train, trained, whole, wrap

both = pytest.mark.parametrize("originals", [True, False])


WRAPPINGS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for part in WRAPPINGS:
        tensors = {name.replace(part, ""): tensor for name, tensor in tensors.items()}
    return tensors


# Activation checkpointing.


class Recomputing(nn.Module):
    """Calls its block through `torch.utils.checkpoint`."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


def checkpointed(where: str, reentrant: bool, originals: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    if where == "inside":
        model = sharded(originals, nn.Sequential(*(checkpoint_wrapper(b, checkpoint_impl=kind) for b in blocks())))
    elif where == "outside":
        model = blocks()
        for i, block in enumerate(model):
            inner = wrap(fullshard, block, use_orig_params=originals)
            model[i] = checkpoint_wrapper(inner, checkpoint_impl=kind)
        model = wrap(fullshard, model, use_orig_params=originals)
    elif where == "applied":
        model = sharded(originals)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=kind),
            check_fn=lambda m: isinstance(m, Block),
        )
    else:
        model = blocks()
        for i, block in enumerate(model):
            model[i] = Recomputing(wrap(fullshard, block, use_orig_params=originals), reentrant)
        model = wrap(fullshard, model, use_orig_params=originals)
    train_first_leaf(model)
    found = {name.replace(".inner.", "."): t for name, t in clean(whole(fullshard, model)).items()}
    same(found, trained(blocks()))
    keys = [name.replace(".inner.", ".") for name in model.state_dict()]
    assert keys == list(blocks().state_dict())


def train_first_leaf(model: nn.Module) -> None:
    """As `train`, with inputs that need a gradient: reentrant checkpointing asks for that."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank()).requires_grad_()).square().mean().backward()
        optimizer.step()


@both
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside", "applied", "by function"])
def test_activation_checkpointing(run_ranks, where: str, reentrant: bool, originals: bool) -> None:
    run_ranks(checkpointed, where, reentrant, originals)


# Compiled blocks.


def compiled(originals: bool, backend: str) -> None:
    model = blocks()
    for block in model:
        block.compile(backend=backend)
    model = sharded(originals, model)
    train(model)
    same(whole(fullshard, model), trained(blocks()))


@both
def test_blocks_compiled_before_wrapping(run_ranks, originals: bool) -> None:
    run_ranks(compiled, originals, "aot_eager", timeout=120)


# Copies and casts.


def copied(when: str, originals: bool) -> None:
    model = sharded(originals)
    if when == "after":
        train(model, steps=1)
    before = whole(fullshard, model)
    twin = copy.deepcopy(model)
    same(whole(fullshard, twin), before, 0, 0)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    train(model)
    same(whole(fullshard, twin), before, 0, 0)
    train(twin)
    same(whole(fullshard, twin), whole(fullshard, model), 0, 0)
    if when == "before":
        same(whole(fullshard, twin), trained(blocks()))
    assert list(twin.state_dict()) == list(model.state_dict())


@both
@pytest.mark.parametrize("when", ["before", "after"])
def test_deep_copies(run_ranks, when: str, originals: bool) -> None:
    run_ranks(copied, when, originals)


def cast(how: str, originals: bool) -> None:
    change: Callable[[nn.Module], nn.Module] = {
        "to": lambda m: m.to(torch.float64),
        "half": lambda m: m.half(),
        "back": lambda m: m.half().float(),
    }[how]
    model = sharded(originals)
    model(batch(0, 0)).sum().backward() if how == "to" else None
    model.zero_grad()
    change(model)
    dtype = {"to": torch.float64, "half": torch.float16, "back": torch.float32}[how]
    assert {p.dtype for p in model.parameters()} == {dtype}
    train(model, dtype=dtype)
    reference = change(blocks())
    tolerance = 3e-2 if how == "half" else 1e-5
    same(whole(fullshard, model), trained(reference, dtype=dtype), tolerance, tolerance)


@both
@pytest.mark.parametrize("how", ["to", "half", "back"])
def test_casting_the_wrapped_model(run_ranks, how: str, originals: bool) -> None:
    run_ranks(cast, how, originals)


# Inputs and outputs of any form.


@dataclass
class Pair:
    first: Tensor
    second: Any


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Any, *, scale: float = 1.0) -> Any:
        x, y = given["x"], given["rest"][0].first
        return {"out": [self.a(x) * scale, (Pair(self.b(y), "kept"),)], "none": None}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.entry = nn.Linear(6, 6)
        self.inner = Structured()

    def forward(self, x: Tensor) -> Any:
        x = self.entry(x)
        return self.inner({"x": x, "rest": (Pair(x, 3), "text")}, scale=0.5)


def structured(originals: bool) -> None:
    def loss(out: Any) -> Tensor:
        assert out["none"] is None and out["out"][1][0].second == "kept"
        return (out["out"][0] + out["out"][1][0].first).square().mean()

    model = Outer()
    model.inner = wrap(fullshard, model.inner, use_orig_params=originals)
    model = wrap(fullshard, model, use_orig_params=originals)
    train(model, loss=loss)
    same(whole(fullshard, model), trained(Outer(), loss=loss))


@both
def test_structured_inputs_and_outputs(run_ranks, originals: bool) -> None:
    run_ranks(structured, originals)


def several_roots(originals: bool) -> None:
    first, second = sharded(originals), sharded(originals)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05, momentum=0.9)
    one, two = blocks(), blocks()
    reference = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05, momentum=0.9)
    for step in range(3):
        for a, b, opt, ranks in (
            (first, second, optimizer, [dist.get_rank()]),
            (one, two, reference, range(dist.get_world_size())),
        ):
            opt.zero_grad()
            x = torch.cat([batch(step, rank) for rank in ranks])
            (b(a(x)) + b(x)).square().mean().backward()  # the second twice, once after the first
            opt.step()
    same(whole(fullshard, first), dict(one.named_parameters()))
    same(whole(fullshard, second), dict(two.named_parameters()))
    assert first.check_is_root() and second.check_is_root()


@both
def test_several_roots_and_several_forwards(run_ranks, originals: bool) -> None:
    run_ranks(several_roots, originals)


def evaluated(originals: bool) -> None:
    model, reference = sharded(originals), blocks()
    x = batch(0, dist.get_rank())
    for _ in range(2):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model.eval()(x), reference.eval()(x))
        with torch.inference_mode():
            torch.testing.assert_close(model(x), reference(x))
    train(model.train())
    same(whole(fullshard, model), trained(reference.train()))


@both
def test_eval_and_no_grad_around_training(run_ranks, originals: bool) -> None:
    run_ranks(evaluated, originals)


def copied_with_cast_buffers(originals: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    mixed = fullshard.MixedPrecision(buffer_dtype=torch.float64)
    model = wrap(fullshard, model, mixed_precision=mixed, use_orig_params=originals)
    assert model.check_is_root()  # settles the root, which casts buffers
    twin = copy.deepcopy(model)
    assert twin.module[1].running_mean.dtype == torch.float64
    assert twin.state_dict()["1.running_mean"].dtype == torch.float32


@both
def test_copies_know_the_dtypes_that_buffers_had(run_ranks, originals: bool) -> None:
    run_ranks(copied_with_cast_buffers, originals)
