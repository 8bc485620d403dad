"""Settings of fully_shard and of a training step: same numbers whatever is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fullshard
from models import EXAMPLES
from training import (
    FP32,
    FP64,
    LAYOUTS,
    Options,
    assert_same,
    compare,
    parity,
    reference,
    train_sharded,
)

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@both_layouts
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", ["gpt", "nested"])
def test_reshard_after_forward(run_ranks, name, reshard, layout):
    """None, the default, is what every other test uses."""
    assert_same(run_ranks(parity, name, Options(layout=layout, reshard=reshard), FP32))


@both_layouts
@pytest.mark.parametrize("prefetch", [0, 3])
def test_prefetch(run_ranks, prefetch, layout):
    assert_same(run_ranks(parity, "nested", Options(layout=layout, prefetch=prefetch), FP32))


@both_layouts
@pytest.mark.parametrize("name", ["gpt", "odd_mlp"])
def test_reshard_after_forward_to_a_smaller_group(run_ranks, name, layout):
    assert_same(run_ranks(parity, name, Options(layout=layout, reshard=2), FP32, world=4))


@both_layouts
@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "frozen", "tied_across"])
def test_hybrid_mesh(run_ranks, name, layout):
    assert_same(run_ranks(parity, name, Options(layout=layout, mesh="hybrid"), FP32, world=4))


@both_layouts
def test_explicit_one_dimensional_mesh(run_ranks, layout):
    assert_same(run_ranks(parity, "odd_mlp", Options(layout=layout, mesh="1d"), FP32, world=4))


@both_layouts
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no_sync"])
@pytest.mark.parametrize("where", ["gpt", "frozen", "tied_across", "odd_mlp on a hybrid mesh"])
def test_accumulation(run_ranks, where, sync, layout):
    """Three micro-batches a step. Double precision: the order of the sums may differ, nothing else."""
    name, _, hybrid = where.partition(" on a ")
    mesh, world = ("hybrid", 4) if hybrid else ("default", 2)
    options = Options(layout=layout, mesh=mesh, micro_batches=3, sync=sync, dtype=torch.float64)
    assert_same(run_ranks(parity, name, options, FP64, world=world))


@both_layouts
@pytest.mark.parametrize("function", ["torch", "fullshard"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping(run_ranks, norm_type, function, layout):
    """The total norm and the clipped gradients equal those of the unsharded model, for every p.

    PyTorch's function cannot take the infinity norm of an empty local tensor; the GPT has none.
    """
    name, max_norm = {
        "torch": ("gpt", {1.0: 20.0, 2.0: 0.5, float("inf"): 0.02}[norm_type]),
        "fullshard": ("odd_mlp", {1.0: 5.0, 2.0: 0.3, float("inf"): 0.05}[norm_type]),
    }[function]
    options = Options(
        layout=layout, clip=function, max_norm=max_norm, norm_type=norm_type, dtype=torch.float64, steps=2
    )
    assert_same(run_ranks(clipped_parity, name, options))


def clipped_parity(name: str, options: Options) -> list[str]:
    problems = parity(name, options, FP64, check_torch=False)
    norms = reference(name, replace(options, layout="rows"), dist.get_world_size()).norms
    if min(norms) <= options.max_norm:
        problems.append(f"norms {norms} never exceed {options.max_norm}: this test clips nothing")
    return problems


@both_layouts
@pytest.mark.parametrize("function", ["torch", "fullshard"])
def test_clipping_on_a_hybrid_mesh(run_ranks, function, layout):
    options = Options(layout=layout, mesh="hybrid", clip=function, max_norm=0.3, dtype=torch.float64, steps=2)
    assert_same(run_ranks(clipped_parity, "odd_mlp", options, world=4))


@both_layouts
@pytest.mark.parametrize("world", [2, 4])
def test_same_seed_twice_is_bitwise_equal(run_ranks, world, layout):
    assert_same(run_ranks(twice, Options(layout=layout, clip="fullshard"), world=world))


def twice(options: Options) -> list[str]:
    first, second = (train_sharded(fullshard, EXAMPLES["gpt"], options) for _ in range(2))
    return compare(first, second, 0.0, "the same once more")
