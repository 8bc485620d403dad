"""The engine's own operations on users' tensors, hidden from users' dispatch modes.

Private torch API: `torch._C._len_torch_dispatch_stack` and `torch.utils._python_dispatch._disable_current_modes`. There
is no public alternative. Selective activation checkpointing counts operations in the forward and in its recomputation:
a view that the engine makes in only one of them would be an error. `tests/test_private_api.py` fails when they are
gone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes active on this thread."""


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.view_as(tensor)`, hidden from dispatch modes."""
    if not modes_active():
        return tensor.view_as(tensor)
    with _disable_current_modes():
        return tensor.view_as(tensor)


def copy_hidden(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, hidden from dispatch modes."""
    if not modes_active():
        target.copy_(source)
        return
    with _disable_current_modes():
        target.copy_(source)
