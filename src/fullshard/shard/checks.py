"""What a parameter must be to be sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from .extension import is_extension
from .tensor_parallel import local_part


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
            remedy="implement these two methods, put it in ignored_params (ignored_states), or shard the weight "
            "before it is quantised",
        )


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
    )
