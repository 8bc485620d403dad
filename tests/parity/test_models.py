"""Models, settings and shapes of steps of `fully_shard`: the numbers of one process, and of PyTorch's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from models import EXAMPLES, Example
from training import (
    FP32,
    FP64,
    BatchOf,
    Options,
    assert_same,
    compare,
    parity,
    reference,
    shard,
    train_sharded,
)
from ways import on_ranks

DOUBLE = torch.float64


LIKE_OTHERS = ("gpt", "gpt_one_unit", "odd_mlp_one_unit", "checkpoint_outside", "checkpoint_inside")


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in LIKE_OTHERS])
def test_model(run_ranks, name):
    assert_same(run_ranks(parity, name, Options(layout=EXAMPLES[name].layouts[0], steps=2), FP32))


# The example, the world, and what is set.
SETTINGS = {
    "gathered after forward, no prefetch": ("nested", 2, Options(reshard=False, prefetch=0, steps=2)),
    "the root is freed too, prefetch of three": ("nested", 2, Options(reshard=True, prefetch=3, steps=2)),
    "freed to half of the ranks": ("odd_mlp", 4, Options(reshard=2, steps=2)),
    "rows of blocks, hybrid": ("odd_mlp", 4, Options(layout=fullshard.Blocks("row"), mesh="hybrid", steps=2)),
    "owner": ("odd_mlp_one_unit", 4, Options(layout="owner", mesh="1d", steps=2)),
    "accumulation": ("frozen", 2, Options(micro_batches=3, dtype=DOUBLE, steps=2)),
    "accumulation without sync": ("odd_mlp", 4, Options(mesh="hybrid", micro_batches=2, sync=False, dtype=DOUBLE)),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_setting(run_ranks, what):
    name, world, options = SETTINGS[what]
    tolerance = FP64 if options.dtype is DOUBLE else FP32
    assert_same(run_ranks(parity, name, options, tolerance, world=world))


@pytest.mark.parametrize(
    ("name", "settings", "max_norm"),
    [
        # PyTorch's function cannot take the infinity norm of an empty local tensor; the GPT has none.
        ("gpt", {"clip": "torch"}, 0.5),
        ("gpt", {"clip": "torch", "norm_type": float("inf")}, 0.02),
        ("odd_mlp", {"clip": "torch", "mesh": "hybrid"}, 0.3),
        ("odd_mlp", {"clip": "fullshard", "norm_type": 1.0}, 5.0),
        ("odd_mlp", {"clip": "fullshard", "mesh": "hybrid"}, 0.3),
        ("odd_mlp", {"clip": "fullshard", "norm_type": float("inf"), "layout": "flat"}, 0.05),
        ("odd_mlp", {"clip": "fullshard", "norm_type": 1.0, "layout": "owner"}, 5.0),
    ],
    ids=str,
)
def test_clipping(run_ranks, name, settings, max_norm):
    """The total norm and the clipped gradients are those of the unsharded model."""
    options = Options(max_norm=max_norm, dtype=DOUBLE, steps=2, **settings)
    assert_same(run_ranks(clipped, name, options, world=4 if "mesh" in settings else 2))


def clipped(name: str, options: Options) -> list[str]:
    norms = reference(name, replace(options, layout="rows"), dist.get_world_size()).norms
    assert min(norms) > options.max_norm, "this test clips nothing"
    return parity(name, options, FP64, check_torch=False)


@on_ranks
def test_same_seed_twice_is_bitwise_equal() -> list[str]:
    options = Options(clip="fullshard")
    first, second = (train_sharded(fullshard, EXAMPLES["odd_mlp"], options) for _ in range(2))
    return compare(first, second, 0.0, "the same once more")


# Shapes of steps: two that PyTorch promises, too; others are the stateful machine's (`tests/property`).


def two_losses_of_one_forward(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    inputs, targets = batch_of(0)
    outputs = model(inputs)
    first, second = example.loss_of(outputs, targets), outputs.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def two_forwards_after_an_evaluation(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    model.eval()
    with torch.no_grad():
        example.loss(model, batch_of(1))
    model.train()
    first, second = example.loss(model, batch_of(0)), example.loss(model, batch_of(1))
    first.backward()
    second.backward()
    return first + second


@pytest.mark.parametrize("scenario", [two_losses_of_one_forward, two_forwards_after_an_evaluation])
def test_scenario(run_ranks, scenario):
    options = Options(dtype=DOUBLE, scenario=scenario, steps=2)
    assert_same(run_ranks(parity, "odd_mlp", options, FP64))


def score(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    inputs, targets = batch_of(0)
    loss = example.loss_of(model.score(inputs), targets)
    loss.backward()
    return loss


@on_ranks
def test_registered_forward_methods() -> list[str]:
    example, options = EXAMPLES["two_ways"], Options(dtype=DOUBLE, scenario=score)
    model = shard(fullshard, example.make(DOUBLE), example, options)
    for block in model.blocks:
        fullshard.register_fsdp_forward_method(block, "project")
    fullshard.register_fsdp_forward_method(model, "score")
    got = train_sharded(fullshard, example, options, model)
    return compare(got, reference("two_ways", options, dist.get_world_size()), FP64, "one process")
