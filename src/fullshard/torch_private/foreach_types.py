"""Optimizers and clipping work on lists of tensors if all are of types that torch lists, exactly: no subclass counts.

Otherwise optimizers on a GPU loop over parameters, a kernel for each operation and parameter, and round differently.

Private torch API: `_foreach_supported_types` of `torch.optim.optimizer` and of `torch.utils._foreach_utils`, to which
torch adds `DTensor` itself. Public alternative: none by type; users would pass `foreach=True` to each optimizer and to
each `clip_grad_norm_`. Test: tests/test_private_api.py.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_clipping

Class = TypeVar("Class", bound=type[torch.Tensor])


def works_in_lists(cls: Class) -> Class:
    """Register a class of tensors on which `torch._foreach_` operations work; returns it."""
    for types in (of_optimizers, of_clipping):
        if cls not in types:
            types.append(cls)
    return cls
