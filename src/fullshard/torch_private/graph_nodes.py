"""Which nodes of autograd's graph were made since some moment.

Private torch API: `torch.autograd._get_sequence_nr` and `Node._sequence_nr`. The public alternative is to make a node
and keep it, to ask which nodes come before it in the graph, which walks all of it. `tests/test_private_api.py` says
when they go. Numbers are counted by thread.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
"""The number that autograd's next node on this thread will have (0 where torch cannot tell)."""


number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number of a node: `number_of(tensor.grad_fn)`. Called for every output, so that it is no Python function."""
