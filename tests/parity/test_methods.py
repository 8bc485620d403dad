"""Methods of a sharded module, by their effect on numbers and on what its parameters are."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from models import EXAMPLES, Example
from training import (
    FP64,
    LAYOUTS,
    BatchOf,
    Options,
    assert_same,
    compare,
    compare_tensors,
    full_gradients,
    full_parameters,
    parity,
    reference,
    shard,
    take_step,
    train_sharded,
)

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def double(layout: str, **settings: object) -> Options:
    return Options(layout=layout, dtype=torch.float64, **settings)


def sharded(name: str, options: Options) -> nn.Module:
    example = EXAMPLES[name]
    return shard(fullshard, example.make(options.dtype), example, options)


def score(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    inputs, targets = batch_of(0)
    loss = example.loss_of(model.score(inputs), targets)
    loss.backward()
    return loss


@both_layouts
def test_registered_forward_methods(run_ranks, layout):
    assert_same(run_ranks(registered_methods, double(layout, scenario=score)))


def registered_methods(options: Options) -> list[str]:
    model = sharded("two_ways", options)
    for block in model.blocks:
        fullshard.register_fsdp_forward_method(block, "project")
    fullshard.register_fsdp_forward_method(model, "score")
    got = train_sharded(fullshard, EXAMPLES["two_ways"], options, model)
    want = reference("two_ways", Options(dtype=options.dtype, scenario=score), dist.get_world_size())
    return compare(got, want, FP64, "one process")


@both_layouts
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at_once", "with_handle"])
def test_unshard_and_reshard(run_ranks, asynchronous, layout):
    assert_same(run_ranks(unshard_and_reshard, double(layout), asynchronous))


def unshard_and_reshard(options: Options, asynchronous: bool) -> list[str]:
    """Between the two a unit's parameters are plain and whole; afterwards the same sharded objects."""
    example = EXAMPLES["gpt"]
    model = sharded("gpt", options)
    take_step(model, example, 0, [dist.get_rank()], options)  # lazy init is done by the first forward
    model.zero_grad()
    block, problems = model.blocks[1], []
    before = dict(block.named_parameters())
    want = {name: p.detach() for name, p in example.make(options.dtype).blocks[1].named_parameters()}
    for _ in range(2):
        handle = block.unshard(async_op=asynchronous)
        if asynchronous:
            handle.wait()
        elif handle is not None:
            problems.append(f"unshard() returned {handle!r} where None is wanted")
        got = {name: p.detach().clone() for name, p in block.named_parameters()}
        problems += [f"{name} is a {type(p)} while unsharded" for name, p in got.items() if type(p) is not Tensor]
        problems += compare_tensors("unsharded", got, want, 0.0)
        block.reshard()
        after = dict(block.named_parameters())
        problems += [f"{name} is another object after reshard" for name in before if after[name] is not before[name]]
    return problems + compare_tensors("resharded", full_parameters(block), want, 0.0)


def unshard_first(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """Gathers by hand what forward would gather by itself. A plain module has nothing to gather."""
    for unit in [model, *model.blocks]:
        if hasattr(unit, "unshard"):
            unit.unshard(async_op=unit is not model)
    loss = example.loss(model, batch_of(0))
    loss.backward()
    return loss


@both_layouts
def test_unshard_by_hand_before_forward(run_ranks, layout):
    assert_same(run_ranks(parity, "gpt", double(layout, scenario=unshard_first), FP64))


def prefetching(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """The root prefetches the first block, and each block the next two, in both directions."""
    blocks = list(model.blocks)
    if hasattr(model, "set_modules_to_forward_prefetch"):
        model.set_modules_to_forward_prefetch(blocks[:1])
        model.set_modules_to_backward_prefetch(blocks[:-2:-1])
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    loss = example.loss(model, batch_of(0))
    loss.backward()
    return loss


@both_layouts
@pytest.mark.parametrize("name", ["frozen", "nested"])
def test_prefetch_setters_change_no_number(run_ranks, name, layout):
    assert_same(run_ranks(parity, name, double(layout, scenario=prefetching), FP64))


@both_layouts
@pytest.mark.parametrize("mesh", ["default", "hybrid"])
def test_gradient_divide_factor(run_ranks, mesh, layout):
    assert_same(run_ranks(divided_gradients, double(layout, mesh=mesh), world=4))


def divided_gradients(options: Options) -> list[str]:
    """A gradient is the sum over ranks divided by the factor, where by default it is the mean."""
    world, factor, name = dist.get_world_size(), 2.5, "odd_mlp"
    model = sharded(name, options)
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            module.set_gradient_divide_factor(factor)
    take_step(model, EXAMPLES[name], 0, [dist.get_rank()], options)
    mean = reference(name, Options(dtype=options.dtype), world).gradients[0]
    want = {name: gradient * world / factor for name, gradient in mean.items()}
    return compare_tensors(f"divided by {factor}: gradient of", full_gradients(model), want, FP64)


@both_layouts
def test_optimizer_view(run_ranks, layout):
    """Plain local tensors for the optimizer, the same numbers, and state dicts that see every step."""
    assert_same(run_ranks(viewed, double(layout)))


@both_layouts
def test_optimizer_view_says_which_gradient_is_zero(run_ranks, layout):
    """A parameter that nothing used, beside one that was: one warning that names it, from a rank that holds it."""
    said = [text for texts in run_ranks(warnings_of_views, layout) for text in texts]
    assert said
    assert all("unused" in text and "optimizer_view(model, params=...)" in text for text in said)


def warnings_of_views(layout: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].unused = nn.Parameter(torch.ones(4))
    for module in (*model, model):
        fullshard.fully_shard(module, layout=layout)
    views = fullshard.optimizer_view(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
    texts = [str(warning.message) for warning in caught if "optimizer view" in str(warning.message)]
    assert len(views) == 2 and len(texts) <= 1
    return texts


def viewed(options: Options) -> list[str]:
    model = sharded("odd_mlp", options)
    problems = []
    views = fullshard.optimizer_view(model)
    problems += [
        f"view {index} is a {type(view)}"
        for index, view in enumerate(views)
        if not isinstance(view, nn.Parameter) or isinstance(view, DTensor) or hasattr(view, "full_tensor")
    ]
    if options.layout == "rows":  # padding may come along: it stays zero
        held = sum(p.to_local().numel() for p in model.parameters())
        seen = sum(view.numel() for view in views)
        problems += [] if seen >= held else [f"views hold {seen} elements, the shard holds {held}"]
    optimizer = torch.optim.AdamW(views, lr=1e-2, eps=1e-3, weight_decay=0.1)
    for step in range(options.steps):
        take_step(model, EXAMPLES["odd_mlp"], step, [dist.get_rank()], options)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    want = reference("odd_mlp", Options(dtype=options.dtype), dist.get_world_size()).parameters
    return problems + compare_tensors("parameter", full_parameters(model), want, FP64)
