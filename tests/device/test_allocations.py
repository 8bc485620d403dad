"""What takes memory of the device in a steady step: which function asks, for which buffer, and how many bytes.

The tables are what there is, and easily changed: an allocation that is in none is one that nobody has decided on.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_host_waits import backward, sharded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard import MixedPrecisionPolicy
from fullshard.shard import units_of
from simulated import ENGINE, by_nccl, simulated

WARM_UP, STEPS = 5, 3
RESIZE = torch.UntypedStorage.resize_
MACHINERY = {"eval_frame.py", "_compile.py", "mock.py", "simulated.py", Path(__file__).name}
"""Files whose functions stand between an allocation and who asked for it."""
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# Of four blocks, on two ranks: two gathers of each, and one reduction, all the usual way. A block has 80 bytes of
# parameters in float32; in `rows` they are gathered as chunks of both, rounded up to 16 bytes, in one buffer, and
# copied out of it into another, with room for equal chunks.
TABLES: dict[str, dict[tuple[str, str, int], int]] = {
    # function, buffer, bytes: how often in a step
    "rows": {
        ("step.py: gather_ahead", "gathered", 96): 8,
        ("step.py: open_unit", "copied out", 96): 8,
        ("reducer.py: close", "to be reduced", 96): 4,
        ("reducer.py: close", "slice", 48): 4,
    },
    "flat": {
        ("step.py: gather_ahead", "gathered in place", 96): 8,
        ("reducer.py: close", "to be reduced", 96): 4,
        ("reducer.py: close", "slice", 48): 4,
    },
    "rows, bf16": {
        ("containers.py: _cast", "aten._to_copy.default", 16): 1,  # the batch
        ("step.py: gather_ahead", "cast", 32): 8,
        ("step.py: gather_ahead", "gathered", 64): 8,
        ("step.py: open_unit", "copied out", 48): 8,
        ("reducer.py: close", "to be reduced", 128): 4,
        ("reducer.py: close", "slice", 64): 4,
    },
    "flat, bf16": {
        ("containers.py: _cast", "aten._to_copy.default", 16): 1,  # the batch
        ("step.py: gather_ahead", "cast", 32): 8,
        ("step.py: gather_ahead", "gathered in place", 64): 8,
        ("reducer.py: close", "to be reduced", 128): 4,
        ("reducer.py: close", "slice", 64): 4,
    },
}
# Buffers of one size get each other's blocks: a step leaves them in another order than it found them.
WANDERING: dict[str, set[str]] = {
    "rows": {"gathered", "copied out"},
    "flat": {"gathered in place", "to be reduced"},
    "rows, bf16": {"gathered", "slice"},
    "flat, bf16": {"gathered in place", "slice"},
}


class Allocations(TorchDispatchMode):
    """Memory that the engine takes while this is active.

    An allocator stands for the device's that keeps what was freed, by size, and gives the last first. It serves nobody
    else: a buffer that gets another block in it than a step ago lies elsewhere in every program.

    Attributes:
        taken: before all steps and in each, in order: the function that asked; the storage, or the operator that made
            a tensor with memory of its own; bytes; the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[list[tuple[str, int | str, int, int]]] = [[]]
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._blocks: dict[int, int] = {}  # by storage
        self._made = 0

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> Any:
        key, before = storage._cdata, storage.nbytes()
        if key in self._blocks and not nbytes:
            self._free[before].append(self._blocks.pop(key))
        elif nbytes and not before:
            self._made += not self._free[nbytes]
            block = self._blocks[key] = self._free[nbytes].pop() if self._free[nbytes] else self._made
            self.taken[-1].append((asking() or "the user", key, nbytes, block))
        return RESIZE(storage, nbytes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for made in tree_leaves(result) if asking() else ():
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in given and made.nbytes:
                self.taken[-1].append((asking(), str(function), made.untyped_storage().nbytes(), 0))
        return result


def asking() -> str:
    """The function of the engine that runs; empty within the model's own."""
    frame: Any = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename).name in MACHINERY:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(ENGINE):
        return ""
    return f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Name and storage of what units take memory for. After a backward."""
    for unit in units_of(model):
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
            full: Any = bucket.full
            yield "gathered in place", full.whole.storage
            yield "copied out", full.copied.storage
            yield "gathered", full.staging.storage
            if full._sent is not None:
                yield "cast", full._sent.storage
            assert gradients.buffer is not None
            yield "to be reduced", gradients.buffer.storage
        for member in unit.members:
            yield "slice", member.sharded.grad.to_local().untyped_storage()


@pytest.mark.parametrize("case", TABLES)
def test_all_that_takes_memory_is_known(run_ranks: Callable, case: str) -> None:
    for steps, wandering in run_ranks(taken_in_steps, case):
        assert [dict(step) for step in steps] == [TABLES[case]] * STEPS
        assert wandering == WANDERING[case]


def taken_in_steps(case: str) -> tuple[list[Counter[tuple[str, str, int]]], set[str]]:
    """Of each steady step what was taken, how often; and the buffers whose blocks are not those of the step before."""
    layout, _, low = case.partition(", ")
    allocations = Allocations()

    def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        return allocations.resize(storage, nbytes)

    with (
        by_nccl(),
        simulated(),
        mock.patch.object(torch.UntypedStorage, "resize_", resize),
        allocations,
    ):
        model = sharded(layout=layout, **({"mp_policy": LOW} if low else {}))
        for number in range(WARM_UP + STEPS):
            allocations.taken.append([])
            backward(model, number)
            names: dict[int | str, str] = {storage._cdata: name for name, storage in buffers_of(model)}
            model.zero_grad()
    steps = allocations.taken[-STEPS:]
    found = [Counter((asks, names.get(key, str(key)), nbytes) for asks, key, nbytes, _ in step) for step in steps]
    blocks = [[(names.get(key, str(key)), block) for _, key, _, block in step] for step in steps]
    return found, {one[0] for a, b in pairwise(blocks) for one, other in zip(a, b, strict=True) if one != other}
