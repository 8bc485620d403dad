"""Whether Dynamo is at work: what it must not see is called through its guard then, and directly where it is not.

Private torch API: `torch._C._dynamo.eval_frame.get_eval_frame_callback`, which tells whether Dynamo looks at the frames
of this thread now. The public alternative is to call everything through `torch.compiler.disable` always, 8 us for each
call, twice per unit and forward; it is what is done where the function is missing.
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
"""Truthy if Dynamo compiles frames of this thread now, or if that cannot be told."""
