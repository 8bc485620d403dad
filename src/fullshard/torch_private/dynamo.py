"""Whether Dynamo is active: if so, code that it must not trace is called through its guard, else directly.

Private torch API: `torch._C._dynamo.eval_frame.get_eval_frame_callback`, which reports whether Dynamo compiles frames
of this thread now. The public alternative is to call everything through `torch.compiler.disable` always, 8 us per call,
twice per unit and forward. `tests/test_private_api.py` fails when it is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._C._dynamo.eval_frame import get_eval_frame_callback

dynamo_is_active: Callable[[], object] = get_eval_frame_callback
"""Truthy if Dynamo compiles frames of this thread now."""
