"""Whether anybody but the engine holds on to a gradient, so that its memory may be used again.

Private torch API: `torch._C._storage_Use_Count`. The public alternative is to allocate gradients anew every step,
which costs a `DTensor` per parameter and step; where the call is missing this module answers "held", and the engine
does just that. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch

_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: -1)
_references = sys.getrefcount


def holders_of_many(cdatas: Iterable[int], tensors: Iterable[object]) -> tuple[int, int]:
    """The sums of what `holders` says of many: as when only the engine held them, if nobody holds any now."""
    return sum(map(_use_count, cdatas)), sum(map(_references, tensors))


def holders(cdata: int, tensors: Sequence[object]) -> tuple[int, int]:
    """How many tensors share a storage, of this `_cdata`, and how many Python references `tensors` have in all.

    Compare with what the same call said when only the engine held them; -1 where it cannot be known.
    """
    return _use_count(cdata), sum(map(_references, tensors))
