"""The tests' rank functions on an accelerator: written for CPUs, they run there unchanged.

What they make lies on the device, their meshes and generators are its, and results come back on the CPU. Ranks share
one device, over gloo: what NCCL does does not show, streams, events and the device's own kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

GENERATOR = torch.Generator


def call(kind: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)` with `kind` ("cuda") as the default device, also where a mesh of CPUs is asked for."""
    make = DeviceMesh.__init__

    def mesh_on_device(mesh: DeviceMesh, device_type: str, *rest: Any, **options: Any) -> None:
        make(mesh, kind if device_type == "cpu" else device_type, *rest, **options)

    class Generator(GENERATOR):  # type: ignore[misc,valid-type]
        def __new__(cls, device: Any = kind) -> Any:
            return GENERATOR.__new__(cls, device)

    with (
        torch.device(kind),
        mock.patch.object(DeviceMesh, "__init__", mesh_on_device),
        mock.patch.object(torch, "Generator", Generator),
    ):
        result = fn(*args, **kwargs)
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, result)
