"""Whether a transform of `torch.func` (vmap, grad, jvp, ...) runs the code that asks.

Private torch API: `torch._C._functorch.peek_interpreter_stack`. There is no public alternative: that a tensor is
wrapped by a transform shows in its type only, and not in all tensors that the code meets. `tests/test_private_api.py`
says when it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

current_transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
"""The innermost transform that runs; None if there is none, or where torch cannot tell."""
