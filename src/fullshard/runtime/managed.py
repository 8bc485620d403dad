"""Marks on the modules of a unit, by which libraries and dynamo know that somebody else manages their parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def is_managed(module: nn.Module) -> bool:
    """Whether a unit holds, or held, this module's parameters; a copy of such a module says so, too."""
    return "_is_fsdp_managed_module" in module.__dict__


def mark_managed(modules: Iterable[nn.Module], originals: bool) -> None:
    """Mark modules as PyTorch's front-ends do.

    Transformers generates on all ranks together if `_is_fsdp_managed_module` is there. Dynamo looks at it, too, and
    does not trace modules without `_fsdp_use_orig_params`.

    Args:
        modules: those whose parameters a unit holds.
        originals: whether they go on showing parameters of their own.
    """
    for module in modules:
        module.__dict__["_is_fsdp_managed_module"] = True
        module.__dict__["_fsdp_use_orig_params"] = originals
