"""Whether a pipeline's schedule asks for the gradients of a stage's inputs, and postpones those of its parameters.

Private torch API: `torch.distributed.pipelining._backward.stage_backward_input`, which zero-bubble schedules call
(InterleavedZeroBubble, ZBVZeroBubble, DualPipeV), and which calls `torch.autograd.grad`. The public alternative is a
`dw_builder` for each `PipelineStage`, of which its user would have to know. `tests/test_private_api.py` fails when the
name is gone.
"""

from __future__ import annotations

import sys
from types import FrameType

_MODULE, _FUNCTION = "torch.distributed.pipelining._backward", "stage_backward_input"


def splits_backward() -> bool:
    """Whether the caller's caller is that function, or part of it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == _MODULE:
        if frame.f_code.co_name == _FUNCTION:
            return True
        frame = frame.f_back
    return False
