"""Which nodes of autograd's graph were made since some moment.

Private torch API: `torch.autograd._get_sequence_nr` and `Node._sequence_nr`. The public alternative is to make a node
and keep it, to ask which nodes come before it in the graph, which walks all of it. `tests/test_private_api.py` says
when they go. Numbers are counted by thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
"""The number that autograd's next node on this thread will have (0 where torch cannot tell)."""


def made_since(tensor: torch.Tensor, node: int) -> bool:
    """Whether `tensor` has a graph that was made since `next_node()` gave this number."""
    made_by: Any = tensor.grad_fn
    return made_by is not None and made_by._sequence_nr() >= node


def number_of(tensor: torch.Tensor) -> int:
    """The number of the node that made `tensor`, which has one."""
    made_by: Any = tensor.grad_fn
    return int(made_by._sequence_nr())
