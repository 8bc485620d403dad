"""Methods of a sharded module, by their effect on numbers and on what its parameters are."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from models import EXAMPLES, Example
from training import (
    FP64,
    BatchOf,
    Options,
    assert_same,
    compare,
    compare_tensors,
    full_parameters,
    parity,
    reference,
    shard,
    take_step,
    train_sharded,
)


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


def test_registered_forward_methods(run_ranks):
    assert_same(run_ranks(registered_methods, double("rows", scenario=score)))


def registered_methods(options: Options) -> list[str]:
    model = sharded("two_ways", options)
    for block in model.blocks:
        fullshard.register_fsdp_forward_method(block, "project")
    fullshard.register_fsdp_forward_method(model, "score")
    got = train_sharded(fullshard, EXAMPLES["two_ways"], options, model)
    want = reference("two_ways", Options(dtype=options.dtype, scenario=score), dist.get_world_size())
    return compare(got, want, FP64, "one process")


@pytest.mark.parametrize(("asynchronous", "layout"), [(False, "flat"), (True, "rows")])
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


def test_prefetch_setters_change_no_number(run_ranks):
    assert_same(run_ranks(parity, "frozen", double("rows", scenario=prefetching), FP64))


def test_optimizer_view_says_which_gradient_is_zero(run_ranks):
    """A parameter that nothing used, beside one that was: one warning that names it, from a rank that holds it."""
    said = [text for texts in run_ranks(warnings_of_views, "flat") for text in texts]
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
