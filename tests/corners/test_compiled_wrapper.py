"""`torch.compile` of a wrapped model that has not run yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullshard
from training import assert_same
from ways import WAYS, WRAPPERS, adam, differences, one_process, shard, train, two_layers, whole_state, wide_batch

pytestmark = pytest.mark.gloo("torch compiles for one thread at a time")


def compiled(way: str, backend: str, when: str) -> list[str]:
    """Trains as one process does; the first forward is the compiled one, or an eager one came before it."""
    torch._dynamo.reset()
    model = shard(two_layers(), way)
    optimizer = adam(model.parameters())
    if when == "after a forward":
        with torch.no_grad():
            model(torch.zeros(1, 6))
    train(torch.compile(model, backend=backend), optimizer, range(2))
    torch._dynamo.reset()
    return differences("", whole_state(model), whole_state(one_process(2)[0]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before the first forward", "after a forward"])
def test_compiling_a_sharded_model(run_ranks, way, backend, when):
    assert_same(run_ranks(compiled, way, backend, when, timeout=40))


def compiled_part(way: str) -> list[str]:
    """A compiled module that contains the wrapped model is compiled before that has run, too."""
    torch._dynamo.reset()
    model = shard(two_layers(), way)
    optimizer = adam(model.parameters())
    train(torch.compile(nn.Sequential(model), backend="eager"), optimizer, range(2))
    torch._dynamo.reset()
    return differences("", whole_state(model), whole_state(one_process(2)[0]))


@pytest.mark.parametrize("way", WAYS)
def test_compiling_what_contains_a_sharded_model(run_ranks, way):
    assert_same(run_ranks(compiled_part, way, timeout=40))


def compiled_in_eval(way: str) -> list[str]:
    """`full_precision_in_eval` changes what a compiled model computes with, too, and changes it back."""
    torch._dynamo.reset()
    mixed = fullshard.MixedPrecision(param_dtype=torch.bfloat16)
    model = shard(two_layers(), way, mixed_precision=mixed, full_precision_in_eval=True)
    made = torch.compile(model, backend="eager")
    found = [made.train(mode)(wide_batch(0, 0)).dtype for mode in (True, False, True)]
    out = made.eval()(wide_batch(0, 0)).detach()
    torch._dynamo.reset()
    want = [torch.bfloat16, torch.float32, torch.bfloat16]
    problems = [] if found == want else [f"outputs of {found}"]
    return problems + differences("eval", {"": out}, {"": two_layers()(wide_batch(0, 0)).detach()})


@pytest.mark.parametrize("way", WRAPPERS)
def test_full_precision_in_eval_of_a_compiled_model(run_ranks, way):
    assert_same(run_ranks(compiled_in_eval, way, timeout=40))
