"""A `DeviceMesh` of any size without process groups, for layouts of ranks that do not exist.

Public alternative: `init_device_mesh` under the `fake` backend, which takes the place of the process's default group.
Test: tests/planner/test_costs.py.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh


def mesh_without_group(shape: tuple[int, ...], device_type: str = "cpu") -> DeviceMesh:
    """A mesh of this shape, seen from rank 0. Collectives over it are impossible."""
    ranks = torch.arange(torch.Size(shape).numel(), device="cpu").reshape(shape)
    return DeviceMesh(device_type, ranks, _init_backend=False, _rank=0)
