"""Checks that a parameter can be sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..forms import is_extension
from ..layout import Blocks
from ..mesh import MeshAxes
from ..torch_private.local_tensor import local_part
from .find import Found
from .messages import inner_tensors, is_a_dtensor, lazy_parameter, on_another_device, share_memory, tied_between_units


def check_type(name: str, parameter: torch.Tensor, extensions: bool = True) -> None:
    """Refuse parameters that cannot be cut: quantised weights, whose inner tensors would be lost, and lazy ones.

    Raises:
        ConfigError: the parameter is of such a kind.
    """
    if nn.parameter.is_lazy(parameter):
        raise lazy_parameter(name)
    inner = local_part(parameter)
    special = hasattr(inner, "fsdp_pre_all_gather") or hasattr(inner, "__tensor_flatten__")
    if special and not (extensions and not isinstance(parameter, DTensor) and is_extension(parameter)):
        raise inner_tensors(name, type(inner).__name__)


def _cannot_move(item: Found) -> bool:
    """Whether a parameter that a different unit has cannot move to the unit above it."""
    if item.owner is None:  # the other unit is only planned
        return isinstance(item.parameter, DTensor) or is_extension(item.parameter)
    members = [(b, m) for b in item.owner.buckets for m in b.members if m.sharded is item.parameter]
    return any(m.split is not None or not b.form.plain for b, m in members)


def check_device(name: str, device: torch.device, home: torch.device) -> None:
    """Refuse a parameter that is not on the mesh's device, on the CPU (from which it is moved), or on meta.

    Raises:
        ConfigError: it is on a different device.
    """
    if device.type in ("cpu", "meta") or device == home or (device.type == home.type and device.index is None):
        return
    raise on_another_device(name, home, device)


def check_parameters(parameters: Sequence[Found], axes: MeshAxes, layout: str | Blocks, wrapper: bool = False) -> None:
    """Refuse parameters that cannot be sharded, before anything changes.

    Args:
        parameters: the parameters.
        axes: the mesh.
        layout: the layout they will have.
        wrapper: for the wrapper, whose parameters may be DTensors, but not extensions.

    Raises:
        ConfigError: a parameter on a different device, or a DTensor in a layout other than rows; see `check_type`.
        LayoutError: two different parameters share memory, or a tensor-parallel parameter or extension is tied between
            units.
    """
    by_address: dict[int, str] = {}
    for item in parameters:
        parameter = item.parameter
        if item.planned or item.owner is not None:
            if _cannot_move(item):
                raise tied_between_units(item.name)
            continue
        check_type(item.name, parameter, extensions=not wrapper)
        if isinstance(parameter, DTensor) and layout != "rows" and not wrapper:
            raise is_a_dtensor(item.name, layout)
        check_device(item.name, parameter.device, axes.device)
        if local_part(parameter).numel() and not parameter.is_meta and not is_extension(parameter):
            other = by_address.setdefault(local_part(parameter).data_ptr(), item.name)
            if other != item.name:
                raise share_memory(other, item.name)
