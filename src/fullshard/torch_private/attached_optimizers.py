"""Optimizers that programs attach to parameters, to step in backward as soon as a gradient is complete.

Private torch API: the attribute `_in_backward_optimizers` that `torch.distributed.optim._apply_optimizer_in_backward`
sets. It has no public alternative; the hooks that it also registers are on a parameter's autograd nodes, which never
run for a sharded parameter. `tests/corners/test_optimizer_in_backward.py` fails when it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

KEY = "_in_backward_optimizers"


def attached_to(parameter: torch.Tensor) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that are attached to `parameter`."""
    optimizers: Sequence[torch.optim.Optimizer] = parameter.__dict__.get(KEY, ())
    return optimizers
