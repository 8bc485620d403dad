"""Checks of `fully_shard`'s arguments, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import invalid_argument
from ...layout import Blocks
from ...mesh import check_smaller_groups
from ...policies import MixedPrecisionPolicy, OffloadPolicy
from ...runtime import is_unit
from ...text import plain_class
from ..wrapping import Planned, plan_wrapping, refuse_scripted
from . import messages

LAYOUTS = ("rows", "flat", "owner")
PER_UNIT = ("layout", "mp_policy", "prefetch", "reshard_after_forward", "shard_placement_fn")
"""The arguments that a `CustomPolicy` may override for a block."""


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers cannot, unless their class defines `forward`, nor do ScriptModules."""
    if isinstance(module, torch.jit.ScriptModule):  # looking up `forward` in its class fails
        return False
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def check_policy(mp_policy: Any, argument: str = "fully_shard(mp_policy=)") -> None:
    """Raise unless `mp_policy` is Fullshard's `MixedPrecisionPolicy`."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise invalid_argument(
            argument,
            mp_policy,
            "a fullshard.MixedPrecisionPolicy",
            "from fullshard import MixedPrecisionPolicy, and build it from that class",
        )


def check_arguments(modules: Sequence[Any], offload_policy: OffloadPolicy, layout: Any, prefetch: int) -> None:
    """Raise if these modules cannot form a unit, or a setting is invalid."""
    if not modules:
        raise messages.no_modules()
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise messages.not_a_module(type(module).__name__)
        refuse_scripted(module)
        if not has_forward(module):
            raise messages.no_forward(type(module).__name__)
        if is_unit(module) or any(module is earlier for earlier in modules[:index]):
            raise messages.applied_twice(plain_class(module).__name__)
    if not isinstance(offload_policy, OffloadPolicy):
        raise invalid_argument(
            "fully_shard(offload_policy=)",
            offload_policy,
            "a fullshard.OffloadPolicy or CPUOffloadPolicy",
            "from fullshard import CPUOffloadPolicy, and pass CPUOffloadPolicy()",
        )
    if not isinstance(layout, Blocks) and layout not in LAYOUTS:
        expected = f"one of {LAYOUTS}, or Blocks(granule)"
        remedy = 'omit layout, or use "rows" for optimizers that need whole tensors'
        raise invalid_argument("fully_shard(layout=)", layout, expected, remedy)
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        remedy = "omit prefetch, or pass the number of units to gather ahead; 0 turns it off"
        raise invalid_argument("fully_shard(prefetch=)", prefetch, "an int of at least 0", remedy)


def blocks_of(model: nn.Module, policy: Any, ignored: Iterable[nn.Parameter] = ()) -> list[Planned]:
    """The submodules that `policy` makes units, with the arguments that it overrides for each, checked.

    Skips modules that are units already, and containers without a forward (the unit around them gets their parameters).

    Args: see `plan_wrapping`.
    """
    blocks = []
    for name, block, overrides in plan_wrapping(model, policy, (), ignored):
        unknown = sorted(set(overrides) - set(PER_UNIT))
        if unknown:
            raise messages.unknown_block_arguments(name, type(block).__name__, PER_UNIT, unknown)
        if "mp_policy" in overrides:
            check_policy(overrides["mp_policy"], f"mp_policy for {name!r}")
        if is_unit(block) or not has_forward(block):
            continue
        check_arguments([block], OffloadPolicy(), overrides.get("layout", LAYOUTS[0]), overrides.get("prefetch", 0))
        reshard = overrides.get("reshard_after_forward")
        if reshard is not None and not isinstance(reshard, bool):
            raise invalid_argument(f"reshard_after_forward for {name!r}", reshard, "a bool or None")
        blocks.append((name, block, overrides))
    return blocks


def reshard_of(reshard: bool | int | None, ranks: int) -> tuple[bool | None, int]:
    """`reshard_after_forward` in two: whether units are freed, and among how many ranks slices are kept (0: none).

    Args:
        ranks: on the shard axis.

    Raises:
        ConfigError: it is not an integer, or does not divide the number of ranks.
    """
    if reshard is None or isinstance(reshard, bool):
        return reshard, 0
    if not isinstance(reshard, int):
        raise invalid_argument(
            "fully_shard(reshard_after_forward=)",
            reshard,
            "a bool, an int or None",
            "omit it; True frees parameters after forward, False keeps them for backward",
        )
    if reshard in (1, ranks):
        return reshard != 1, 0
    check_smaller_groups(reshard, ranks)
    return True, reshard


def checked_ignored(ignored_params: Any) -> list[Tensor]:
    """`ignored_params`, any iterable or None, as a list. Raises if it contains anything but parameters."""
    if isinstance(ignored_params, Tensor):
        raise messages.ignored_not_parameters(f"a tensor of shape {tuple(ignored_params.shape)}, not in a set")
    items = [] if ignored_params is None else ignored_params
    items = list(items) if isinstance(items, Iterable) else [items]
    invalid = next((item for item in items if not isinstance(item, Tensor)), None)
    if invalid is not None:
        raise messages.ignored_not_parameters(f"{type(invalid).__name__} {invalid!r}"[:80])
    return items
