"""What `fully_shard` refuses of its arguments, before anything has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...errors import ArgumentTypeError, AssertedError, ConfigError, class_and_value
from ...layout import Blocks
from ...names import plain_class
from ...policies import MixedPrecisionPolicy, OffloadPolicy
from ...runtime import is_unit

LAYOUTS = ("rows", "flat", "owner")


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a container cannot, unless its class defines `forward`."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def check_policy(mp_policy: Any) -> None:
    """Refuse what is no `MixedPrecisionPolicy` of ours."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ConfigError(
            "fully_shard(mp_policy=) has an invalid type.",
            expected="a fullshard.MixedPrecisionPolicy",
            got=class_and_value(mp_policy),
            remedy="from fullshard import MixedPrecisionPolicy, and build it from that class",
            code="C004",
        )


def check_arguments(modules: Sequence[Any], offload_policy: OffloadPolicy, layout: Any, prefetch: int) -> None:
    """Refuse what no unit can be made of, or with."""
    if not modules:
        raise ConfigError("fully_shard was given an empty list of modules", code="C009")
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"fully_shard takes an nn.Module or a list of them, got {type(module).__name__}",
                remedy="give the module itself, not its parameters or its name",
                code="C010",
            )
        if not has_forward(module):
            raise ConfigError(
                f"{type(module).__name__} has no forward of its own, so it cannot be a unit: "
                "nothing would tell when to gather its parameters.",
                remedy="apply fully_shard to each module in it, or to the list of them as one unit",
                code="C011",
            )
        if is_unit(module) or any(module is earlier for earlier in modules[:index]):
            raise AssertedError(
                f"fully_shard was applied to this {plain_class(module).__name__} already.",
                remedy="apply it once to each module, innermost first",
                code="C012",
            )
    if not isinstance(offload_policy, OffloadPolicy):
        raise ConfigError(
            "fully_shard(offload_policy=) has an invalid type.",
            expected="a fullshard.OffloadPolicy or CPUOffloadPolicy",
            got=class_and_value(offload_policy),
            remedy="from fullshard import CPUOffloadPolicy, and pass CPUOffloadPolicy()",
            code="C013",
        )
    if not isinstance(layout, Blocks) and layout not in LAYOUTS:
        raise ConfigError(
            "fully_shard(layout=) has an invalid value.",
            expected=f"one of {LAYOUTS}, or Blocks(granule)",
            got=repr(layout),
            remedy='leave layout out, or take "rows" for optimizers that look at whole tensors',
            code="C014",
        )
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigError(
            "fully_shard(prefetch=) is a count.",
            expected="an int of at least 0",
            got=repr(prefetch),
            remedy="leave prefetch out, or pass how many units are gathered ahead; 0: none",
            code="C015",
        )


def check_ignored(given: Any) -> None:
    """Refuse `ignored_params` that are no parameters."""
    wrong = next((one for one in given or () if not isinstance(one, Tensor)), None)
    if wrong is not None:
        raise ArgumentTypeError(
            "ignored_params takes Parameters.",
            expected="a set of objects, such as {model.head.weight}",
            got=f"{type(wrong).__name__} {wrong!r}"[:80],
            remedy="look names up: {p for name, p in model.named_parameters() if name in names}",
            code="C276",
        )
