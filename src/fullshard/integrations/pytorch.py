"""PyTorch's own tools, adopted, that ask for its private classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from ..api.wrapping import CustomPolicy
from ..errors import PrivateNameError
from .rebind import rebind


def adjust_checkpoints(checkpoint_wrapper: ModuleType, told: Callable[[str], None]) -> None:
    """Let `apply_activation_checkpointing` take our `CustomPolicy`, which PyTorch's private code would run.

    Args:
        checkpoint_wrapper: `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`.
        told: see `clients.watch`.
    """
    original = checkpoint_wrapper.apply_activation_checkpointing
    default = checkpoint_wrapper.checkpoint_wrapper

    @functools.wraps(original)
    def apply_activation_checkpointing(
        model: nn.Module,
        checkpoint_wrapper_fn: Callable[..., nn.Module] = default,
        check_fn: Callable[[nn.Module], bool] = lambda _: True,
        auto_wrap_policy: Any = None,
    ) -> None:
        if not isinstance(auto_wrap_policy, CustomPolicy):
            original(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)
            return
        for path, module in reversed(list(model.named_modules())):  # inner ones first
            chosen = auto_wrap_policy.choose(module)
            if chosen is not None and path:
                model.set_submodule(path, checkpoint_wrapper_fn(module, **chosen))

    rebind(original, apply_activation_checkpointing)


def adjust_tracker(tracker: ModuleType, told: Callable[[str], None]) -> None:
    """Refuse `FSDPMemTracker`, which puts methods of its own in the place of private ones.

    Args:
        tracker: `torch.distributed._tools.fsdp2_mem_tracker`.
        told: see `clients.watch`.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        raise PrivateNameError(
            "FSDPMemTracker replaces private methods of PyTorch's units, which Fullshard's do not have.",
            remedy="fullshard.memory_use(model) before a step and after it; fullshard.record_events() for what comes "
            "and goes within one",
        )

    tracker.FSDPMemTracker.__init__ = init
