"""Operations of the engine's own on users' tensors, which users' dispatch modes are not to see.

Private torch API: `torch._C._len_torch_dispatch_stack` and `torch.utils._python_dispatch._disable_current_modes`. There
is no public alternative. Selective activation checkpointing counts operations in the forward and in its repetition: a
view that the engine makes in one of them only would be an error there. `tests/test_private_api.py` says when they go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

modes_active: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""How many dispatch modes this thread is in."""


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.view_as(tensor)`, unseen."""
    if not modes_active():
        return tensor.view_as(tensor)
    with _disable_current_modes():
        return tensor.view_as(tensor)
