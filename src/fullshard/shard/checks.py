"""What a parameter must be to be sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, LayoutError
from ..forms import is_extension
from ..layout import Blocks
from ..mesh import MeshAxes
from ..torch_private.local_tensor import local_part
from .find import Found


def check_type(name: str, parameter: torch.Tensor, extensions: bool = True) -> None:
    """Refuse tensors that would lose what makes them special by being cut: quantised weights, lazy parameters.

    Raises:
        ConfigError: it is one.
    """
    if nn.parameter.is_lazy(parameter):
        raise ConfigError(
            "A parameter of a lazy module has no shape yet.",
            parameter=name,
            remedy="run one forward on a small input before fully_shard",
            code="C174",
        )
    inner = local_part(parameter)
    special = hasattr(inner, "fsdp_pre_all_gather") or hasattr(inner, "__tensor_flatten__")
    if special and not (extensions and not isinstance(parameter, DTensor) and is_extension(parameter)):
        raise ConfigError(
            "A parameter is a tensor subclass with inner tensors of its own (a quantised weight, say), which "
            "cannot be cut here without losing them.",
            parameter=name,
            expected="a plain tensor, or for fully_shard a class with fsdp_pre_all_gather and "
            "fsdp_post_all_gather that is not within a DTensor",
            got=type(inner).__name__,
            remedy="shard it by fully_shard, after fullshard.integrations.quantised.by_rows(model) if it is frozen; "
            "implement these two methods; or put it in ignored_params (ignored_states)",
            code="C175",
        )


def _cannot_move(item: Found) -> bool:
    """Whether a parameter that another unit has cannot be given up to the one above it."""
    if item.owner is None:  # the other unit is to be
        return isinstance(item.parameter, DTensor) or is_extension(item.parameter)
    held = [(b, m) for b in item.owner.buckets for m in b.members if m.sharded is item.parameter]
    return any(m.split is not None or not b.form.plain for b, m in held)


def check_device(name: str, device: torch.device, home: torch.device) -> None:
    """A parameter may be on the mesh's device, on the CPU (it is moved), or on meta.

    Raises:
        ConfigError: it is somewhere else.
    """
    if device.type in ("cpu", "meta") or device == home or (device.type == home.type and device.index is None):
        return
    raise ConfigError(
        "A parameter is on a device that is neither this rank's nor the CPU.",
        parameter=name,
        expected=f"{home}, cpu or meta",
        got=device,
        remedy=f"call torch.accelerator.set_device_index(local_rank) before building the model, "
        f"or move it with model.to({str(home)!r})",
        code="C176",
    )


def check_parameters(found: Sequence[Found], axes: MeshAxes, layout: str | Blocks, wrapper: bool = False) -> None:
    """Refuse what cannot be sharded, before anything changes.

    Args:
        wrapper: for local parts, which may be of DTensors but no tensor subclasses with a gather of their own.

    Raises:
        ConfigError: a parameter on another device, a DTensor in another layout than rows.
        LayoutError: two parameters that share memory without being the same object, a tensor-parallel tie.
    """
    by_address: dict[int, str] = {}
    for item in found:
        parameter = item.parameter
        if item.planned or item.owner is not None:
            if _cannot_move(item):
                raise LayoutError(
                    "A tensor-parallel parameter, or one of a tensor subclass, is tied between units.",
                    parameter=item.name,
                    remedy="let one fully_shard call take all modules that use it: shard the module around them, "
                    "or a list of them, before any of them by itself",
                    code="L011",
                )
            continue
        check_type(item.name, parameter, extensions=not wrapper)
        if isinstance(parameter, DTensor) and layout != "rows" and not wrapper:
            raise ConfigError(
                "fully_shard was given a parameter that is a DTensor already (tensor parallelism).",
                parameter=item.name,
                expected='layout="rows", whose sharded parameters say how they are split twice',
                got=f"layout={layout!r}",
                remedy='use layout="rows" for this unit, or pass the parameter in ignored_params',
                code="C177",
            )
        check_device(item.name, parameter.device, axes.device)
        if local_part(parameter).numel() and not parameter.is_meta and not is_extension(parameter):
            other = by_address.setdefault(local_part(parameter).data_ptr(), item.name)
            if other != item.name:
                raise LayoutError(
                    "Two Parameter objects share one memory: sharded separately they would drift apart.",
                    parameter=f"{other} and {item.name}",
                    remedy="tie them by assigning the same Parameter object to both modules",
                    code="L012",
                )
