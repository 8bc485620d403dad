"""Measures an optimizer's state and temporary memory by running it on fake tensors of the rank's shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...torch_private.fake_tensors import fake_tensors
from .profile import Tracker

Shard = tuple[tuple[int, ...], torch.dtype, bool]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def optimizer_bytes(shards: Sequence[Shard], make: MakeOptimizer) -> tuple[int, int]:
    """Bytes of state, and of the most temporary memory that a step allocates.

    Runs a single shard of each shape and dtype, then two of each, which shows whether temporary memory grows with the
    number of parameters (`foreach`) or not (a loop, `fused`).

    Args:
        shards: shape, dtype, and whether it trains.
        make: creates the optimizer for a list of parameters.

    Raises:
        Exception: whatever the optimizer raises.
    """
    counts = Counter((shape, dtype) for shape, dtype, trains in shards if trains)
    if not counts:
        return 0, 0
    kinds = list(counts)
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
    with fake_tensors():
        states, once = _run(kinds, make)
        _, twice = _run([*kinds, *kinds], make)
    whole = sum(size * counts[kind] for kind, size in zip(kinds, sizes, strict=True))
    grows = (whole - sum(sizes)) / max(sum(sizes), 1)
    state = sum(nbytes * counts[kind] for kind, nbytes in zip(kinds, states, strict=True))
    return state, round(once + (twice - once) * grows)


def _run(kinds: Sequence[tuple[Any, torch.dtype]], make: MakeOptimizer) -> tuple[list[int], int]:
    """Take two steps; returns each parameter's bytes of state, and the temporary bytes of the second step."""
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu")) for shape, dtype in kinds]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    states = [[v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)] for p in parameters]
    existing = [t for p, state in zip(parameters, states, strict=True) for t in (p, p.grad, *state) if t is not None]
    with Tracker(existing) as tracker:
        optimizer.step()
    return [sum(tensor.nbytes for tensor in state) for state in states], tracker.peak
