"""Named ranges in a profile, which cost nothing while no profiler records.

Private torch API: `torch.autograd._profiler_enabled`. There is no public alternative; entering
`torch.profiler.record_function` unconditionally costs 2 to 5 us. `tests/test_private_api.py` fails when it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import record_function

T = TypeVar("T")

recording: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler is recording."""


def in_range(what: str, unit: str, act: Callable[[], T]) -> T:
    """Call `act` within the range "fullshard: <what> <unit>" of the current profile; returns its result."""
    with record_function(f"fullshard: {what} {unit or '(root)'}"):
        return act()
