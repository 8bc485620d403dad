"""Named ranges in a profile, which cost nothing while no profiler records.

Private torch API: `torch.autograd._profiler_enabled`. There is no public alternative that tells; entering
`torch.profiler.record_function` unasked costs 2 to 5 us. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

_recording: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_NOTHING: AbstractContextManager[Any] = nullcontext()


def named_range(what: str, unit: str) -> AbstractContextManager[Any]:
    """A range "fullshard: <what> <unit>" around a block, while a profiler records."""
    if not _recording():
        return _NOTHING
    return record_function(f"fullshard: {what} {unit or '(root)'}")
