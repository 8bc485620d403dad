"""The wrapper's mixed precision: the engine's policy, and what that does not cover (buffers, eval mode)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...forms import successor_of
from ...policies import MixedPrecisionPolicy
from ...runtime import own_modules, runner_of
from .configs import MixedPrecision


@dataclass
class FullPrecision(MixedPrecision):
    """The setting of modules exempt from mixed precision: inputs are cast up, outputs are cast back."""

    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool = False
    output_dtype: torch.dtype | None = None


def policy_of(mixed: MixedPrecision, module: nn.Module, root: bool = False) -> MixedPrecisionPolicy:
    """The engine's policy for an instance around `module`.

    `cast_root_forward_inputs` decides for the root, `cast_forward_inputs` for others.
    """
    if isinstance(mixed, FullPrecision):
        dtype = next((p.dtype for p in map(successor_of, module.parameters()) if p.is_floating_point()), torch.float32)
        return MixedPrecisionPolicy(dtype, None, mixed.output_dtype, True)
    cast = mixed.cast_root_forward_inputs if root else mixed.cast_forward_inputs
    return MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, None, cast)


_DTYPES_KEY = "_fullshard_buffer_dtypes"
"""The key in a module's `__dict__` of its buffers' dtypes before they were cast, by name."""


def cast_buffers(instance: Any) -> None:
    """Cast the floating-point buffers of the instance's own modules (not instances below, not ignored modules)."""
    dtype = instance.mixed_precision.buffer_dtype
    if dtype is None:
        return
    runner = runner_of(instance)
    for owner in own_modules(instance, runner.settings.ignored.modules if runner is not None else ()):
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner.__dict__.setdefault(_DTYPES_KEY, {}).setdefault(name, buffer.dtype)
                owner._buffers[name] = buffer.to(dtype)


def restore_buffers(instance: nn.Module) -> None:
    """Cast the buffers of the instance's own modules back to their original dtypes."""
    for owner in own_modules(instance):
        for name, dtype in owner.__dict__.get(_DTYPES_KEY, {}).items():
            if (buffer := owner._buffers.get(name)) is not None:
                owner._buffers[name] = buffer.to(dtype)


def original_dtypes(instance: nn.Module) -> dict[str, torch.dtype]:
    """The original dtypes of buffers that were cast, by qualified name within the instance."""
    return {
        f"{path}.{name}" if path else name: dtype
        for path, owner in instance.named_modules()
        for name, dtype in owner.__dict__.get(_DTYPES_KEY, {}).items()
    }


@torch.compiler.disable  # type: ignore[untyped-decorator]
def use_full_precision(root: Any, full: bool) -> None:
    """Compute in the parameters' own dtype (True) or in mixed precision (False), in all instances below `root`.

    Skips instances that do so already. Call it between steps only.
    """
    for instance in root.fsdp_modules(root):
        runner = runner_of(instance)
        if runner is None or getattr(instance, "_in_full_precision", False) == full:
            continue
        instance._in_full_precision = full
        if full:
            restore_buffers(instance)
            instance._policy_before = runner.settings.policy
            runner.set(policy=replace(runner.settings.policy, param_dtype=None, output_dtype=None))
        else:
            cast_buffers(instance)
            runner.set(policy=instance._policy_before)
        if (dtype := instance.mixed_precision.param_dtype) is not None:
            runner.reshard()
            runner.unit.compute_in(None if full else dtype)
