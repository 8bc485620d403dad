"""Whether anything but the engine refers to a gradient; if not, its memory may be reused.

Private torch API: `torch._C._storage_Use_Count`. The public alternative is to allocate gradients anew every step,
which costs a `DTensor` per parameter and step. `tests/test_private_api.py` fails when it is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch

_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_references = sys.getrefcount


def holders_of_many(cdatas: Iterable[int], tensors: Iterable[object]) -> tuple[int, int]:
    """The sums of `holders` over many tensors, which change once anything but the engine refers to one of them."""
    return sum(map(_use_count, cdatas)), sum(map(_references, tensors))


def holders(cdata: int, tensors: Sequence[object]) -> tuple[int, int]:
    """The number of tensors that share the storage with this `_cdata`, and of Python references to `tensors` in all.

    Compare with the same call's result while only the engine referred to them.
    """
    return _use_count(cdata), sum(map(_references, tensors))
