"""Named ranges in a profile, which cost nothing while no profiler records.

Private torch API: `torch.autograd._profiler_enabled`. There is no public alternative that tells; entering
`torch.profiler.record_function` unasked costs 2 to 5 us. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import record_function

recording: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler records now."""


def begin_range(what: str, unit: str) -> Callable[[], object]:
    """Begin the range "fullshard: <what> <unit>" in the profile that is recorded now; returns what ends it."""
    entered = record_function(f"fullshard: {what} {unit or '(root)'}")
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)
