"""How many kernels an accelerator would run for a unit and step beside the model's own, counted where torch dispatches.

By torch's rules: a view is none; a copy of many tensors is one if all pairs have one form, else one a pair.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.torch_private.foreach import same_form

NONE = ("aten::detach", "aten::empty", "aten::new_empty", "profiler::")  # beginnings of names
UNITS = 2


class Kernels(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += kernels_of(func, args, kwargs)
        return func(*args, **kwargs)


def kernels_of(func: Any, args: Any, kwargs: Any) -> int:
    name = func._schema.name
    if func.is_view or name.startswith(NONE):
        return 0
    if name == "aten::_foreach_copy_":
        alike = all(map(same_form, *args)) and all(len({tensor.dtype for tensor in side}) == 1 for side in args)
        return 1 if alike else len(args[0])
    if name == "aten::split_with_sizes_copy":
        matrix, out = args[0], kwargs["out"]
        alike = all(tensor.is_contiguous() and tensor.dtype == matrix.dtype for tensor in [matrix, *out])
        return 1 if alike else len(out)
    return 1


class Block(nn.Module):
    """Applies matrices of these sizes one after the other, and a norm's weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        self.weight = nn.Parameter(torch.ones(sizes[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        for layer in self.layers:
            y = layer(y)
        return x + y


SIZES = {"llama": (64, 64, 16, 64, 192, 192, 64), "experts": (16,) * 65, "odd": (20, 37, 20), "short": (9, 17, 9)}


def kernels_a_unit(library: Any, sizes: tuple[int, ...], mixed: bool, **options: Any) -> float:
    """Of the second half of a step's units, beyond those of the same units on one device."""
    found = []
    for shards in (True, False):
        counts = []
        for units in (UNITS, 2 * UNITS):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(sizes[0], sizes[0]), *[Block(*sizes) for _ in range(units)])
            x = torch.randn(3, sizes[0])
            if shards:
                for module in [*list(model)[1:], model]:
                    library(module, **options)
            elif mixed:
                model, x = model.bfloat16(), x.bfloat16()
            for _ in range(3):
                model.zero_grad()
                with Kernels() as kernels:
                    model(x).sum().backward()
            counts.append(kernels.count)
        found.append((counts[1] - counts[0]) / UNITS)
    return found[0] - found[1]


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("layout", ["rows", "flat", "blocks"])
@pytest.mark.parametrize("kind", ["llama", "experts", "odd"])
def test_a_unit_takes_no_more_kernels_than_fsdp2(fake_world, kind, layout, mixed):
    """Two gathers and a reduction; rows are copied out twice and in once, flat in once; two casts of the shard."""
    fake_world(8)
    ours = {"layout": fullshard.Blocks("row") if layout == "blocks" else layout}
    theirs: dict[str, Any] = {}
    if mixed:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        ours["mp_policy"], theirs["mp_policy"] = fullshard.MixedPrecisionPolicy(**dtypes), TorchPolicy(**dtypes)
    count = kernels_a_unit(fullshard.fully_shard, SIZES[kind], mixed, **ours)
    as_rows = layout == "rows" or (layout == "blocks" and kind == "odd")  # whose rows are long: blocks would pad more
    assert count == 3 + (3 if as_rows else 1) + 2 * mixed
    assert count <= kernels_a_unit(torch_fully_shard, SIZES[kind], mixed, **theirs)


@pytest.mark.parametrize(("layout", "most"), [("rows", 24), ("flat", 6)])
def test_rows_that_divide_very_unevenly_are_copied_one_by_one(fake_world, layout, most):
    """Equal chunks for all ranks would take half as much memory again."""
    fake_world(8)
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    count = kernels_a_unit(fullshard.fully_shard, SIZES["short"], True, layout=layout, mp_policy=policy)
    assert 6 < count <= most if layout == "rows" else count <= most
