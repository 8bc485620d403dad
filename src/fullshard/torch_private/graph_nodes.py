"""Which nodes of autograd's graph were made since a given moment.

Private torch API: `torch.autograd._get_sequence_nr` and `Node._sequence_nr`. The public alternative is to make and keep
a node, and walk the whole graph to see which nodes precede it. `tests/test_private_api.py` fails when they are gone.
Numbers are counted per thread.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

next_node: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number of autograd's next node on this thread."""


number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number of a node: `number_of(tensor.grad_fn)`. Not a Python function, as it is called for every output."""
