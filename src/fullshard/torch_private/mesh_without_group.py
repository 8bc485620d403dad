"""A `DeviceMesh` of any size without communication, for ranks that do not exist: layouts, and DTensors on fake tensors.

Public alternative: `init_device_mesh` under the `fake` backend, which takes the place of the process's default group.
Test: tests/planner/test_costs.py, tests/planner/test_planned_runs.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_groups: dict[int, ProcessGroup] = {}  # by size; torch's registry does not keep them alive


def _group(size: int) -> Any:
    """The name of a group of this size that has no backend: what asks for its size finds it in torch's registry."""
    name: Any = f"no group of {size}"
    if size not in _groups:
        _groups[size] = ProcessGroup(0, size)  # type: ignore[call-arg]
    try:
        _resolve_process_group(name)
    except RuntimeError:  # not yet there, or `destroy_process_group` has emptied the registry
        _register_process_group(name, _groups[size])
    return name


def mesh_without_group(shape: tuple[int, ...], device_type: str = "cpu") -> DeviceMesh:
    """A mesh of this shape, seen from rank 0. Functional collectives over it run on fake tensors only."""
    ranks = torch.arange(torch.Size(shape).numel(), device="cpu").reshape(shape)
    # DTensor remembers how it splits by meshes that are equal, names included: no mesh with groups may equal this one.
    names = tuple(f"no group {dim}" for dim in range(len(shape)))
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
    mesh._dim_group_names = [_group(size) for size in shape]
    return mesh
