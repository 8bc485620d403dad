"""Whether Dynamo is active: if so, code that it must not trace is called through its guard, else directly.

Private torch API: `torch._C._dynamo.eval_frame.get_eval_frame_callback`, which reports whether Dynamo compiles frames
of this thread now. The public alternative, used if the function is missing, is to call everything through
`torch.compiler.disable` always, 8 us per call, twice per unit and forward.
"""

from __future__ import annotations

from collections.abc import Callable

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _callback

    HAS_CALLBACK = _callback() in (None, False)
except ImportError:
    HAS_CALLBACK = False


def _always() -> bool:
    return True


dynamo_is_active: Callable[[], object] = _callback if HAS_CALLBACK else _always
"""Truthy if Dynamo compiles frames of this thread now, or if torch cannot tell."""
