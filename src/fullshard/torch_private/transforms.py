"""Whether the calling code runs inside a transform of `torch.func` (vmap, grad, jvp, ...).

Private torch API: `torch._C._functorch.peek_interpreter_stack`. There is no public alternative: only the types of
tensors show that a transform wraps them, and it does not wrap all tensors. `tests/test_private_api.py` fails when it is
gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

current_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost active transform; None outside of transforms."""
