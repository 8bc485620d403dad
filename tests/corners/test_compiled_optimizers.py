"""`torch.compile` of an optimizer's step: the same weights as one process, whatever the front-end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import WRAPPERS, batch, layers, shard
from torch import Tensor, nn

from fullshard import ConfigError
from ways import wrap

FRONT_ENDS = ["flat", *WRAPPERS]
BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def sharded(front_end: Any) -> nn.Module:
    if not isinstance(front_end, bool):
        return shard(layers(), layout=front_end)
    parts = layers()
    parts[2] = wrap(parts[2], use_orig_params=front_end)
    return wrap(parts, use_orig_params=front_end)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=str)
def test_a_compiled_step(run_ranks, front_end, build):
    assert all(run_ranks(steps, front_end, build))


def steps(front_end: Any, build: str) -> bool:
    model, reference = sharded(front_end), layers()
    ours, theirs = (BUILDERS[build](m.parameters()) for m in (model, reference))
    # Both are compiled: a compiled AdamW corrects its averages in tensors of 32 bits, an eager one in Python's floats.
    torch.compiler.reset()
    step, their_step = compiled(ours.step), compiled(theirs.step)
    for number in range(3):
        model(batch(number, dist.get_rank())).square().mean().backward()
        step()
        ours.zero_grad()
        reference(_of_all(number)).square().mean().backward()
        their_step()
        theirs.zero_grad()
        torch.testing.assert_close(model(_of_all(9)), reference(_of_all(9)))
    return True


def _of_all(number: int) -> Tensor:
    return torch.cat([batch(number, rank) for rank in range(dist.get_world_size())])


def test_what_a_step_refuses_it_refuses_compiled(run_ranks):
    """An optimizer built before its model was sharded trains nothing, compiled or not."""
    assert all(run_ranks(too_early))


def too_early() -> bool:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    model(batch(0, dist.get_rank())).square().mean().backward()
    torch.compiler.reset()
    step = compiled(optimizer.step)
    with pytest.raises(ConfigError, match="built before its model was sharded"):
        step()
    return True
