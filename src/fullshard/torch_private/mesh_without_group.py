"""A `DeviceMesh` of any size without communication, for ranks that do not exist: layouts, and DTensors on fake tensors.

Public alternative: `init_device_mesh` under the `fake` backend, which takes the place of the process's default group.
Test: tests/planner/test_planned_runs.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


class AbsentGroup(ProcessGroup):
    """The ranks of an axis, none of which exists. An all-to-all over it leaves its output as it is, and is counted.

    Attributes:
        sent: bytes that this rank would send to others, by exchange.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.sent: list[int] = []
        self._rank = rank

    def all_to_all_single(self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, *_: Any) -> Any:
        """Count an exchange; called by `torch.distributed.all_to_all_single`."""
        self.sent.append((sum(input_splits) - input_splits[self._rank]) * tensor.element_size())

    alltoall_base: Any = all_to_all_single  # its name up to torch 2.12


_groups: dict[str, AbsentGroup] = {}  # by name; torch's registry does not keep them alive


def _group(dim: int, rank: int, size: int) -> Any:
    """The name of a group without a backend, which is in torch's registry for code that asks for its size."""
    name: Any = f"no group {dim}: rank {rank} of {size}"
    if name not in _groups:
        _groups[name] = AbsentGroup(rank, size)
    try:
        _resolve_process_group(name)
    except RuntimeError:  # not yet there, or `destroy_process_group` has emptied the registry
        _register_process_group(name, _groups[name])
    return name


def mesh_without_group(shape: tuple[int, ...], device_type: str = "cpu", rank: int = 0) -> DeviceMesh:
    """A mesh of this shape, seen from `rank`. Functional collectives over it run on fake tensors only."""
    ranks = torch.arange(torch.Size(shape).numel(), device="cpu").reshape(shape)
    # DTensor caches sharding decisions by equality of meshes, names included: no other mesh may equal this one.
    names = tuple(f"no group {dim} of rank {rank}" for dim in range(len(shape)))
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    places = mesh.get_coordinate()
    assert places is not None
    mesh._dim_group_names = [
        _group(dim - len(shape), place, size) for dim, (place, size) in enumerate(zip(places, shape, strict=True))
    ]
    return mesh
