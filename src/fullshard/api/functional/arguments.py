"""Checks of `fully_shard`'s arguments, made before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ...layout import Blocks
from ...names import plain_class
from ...policies import MixedPrecisionPolicy, OffloadPolicy
from ...runtime import is_unit
from . import messages

LAYOUTS = ("rows", "flat", "owner")


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers cannot, unless their class defines `forward`."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def check_policy(mp_policy: Any) -> None:
    """Raise unless `mp_policy` is Fullshard's `MixedPrecisionPolicy`."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise messages.mixed_precision_policy_type(mp_policy)


def check_arguments(modules: Sequence[Any], offload_policy: OffloadPolicy, layout: Any, prefetch: int) -> None:
    """Raise if no unit can be made from these modules or with these settings."""
    if not modules:
        raise messages.no_modules()
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise messages.not_a_module(type(module).__name__)
        if not has_forward(module):
            raise messages.no_forward(type(module).__name__)
        if is_unit(module) or any(module is earlier for earlier in modules[:index]):
            raise messages.applied_twice(plain_class(module).__name__)
    if not isinstance(offload_policy, OffloadPolicy):
        raise messages.offload_policy_type(offload_policy)
    if not isinstance(layout, Blocks) and layout not in LAYOUTS:
        raise messages.unknown_layout(LAYOUTS, layout)
    if not isinstance(prefetch, int) or prefetch < 0:
        raise messages.prefetch_not_a_count(prefetch)


def check_ignored(ignored_params: Any) -> None:
    """Raise if `ignored_params` contains anything but parameters."""
    items = [] if ignored_params is None else ignored_params
    items = items if isinstance(items, Iterable) else [items]
    invalid = next((item for item in items if not isinstance(item, Tensor)), None)
    if invalid is not None:
        raise messages.ignored_not_parameters(invalid)
