"""Parameters that are DTensors before they are sharded: each rank's local part is sharded again.

Tensor parallelism splits a parameter over ranks that compute the same batch together; data parallelism splits each such
part over ranks that compute different batches. The engine sees only the local part: it plans, gathers, frees and
reduces it like any other tensor. To users it is a DTensor: over both meshes for optimizers and checkpoints, over the
tensor-parallel mesh for the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ..errors import ConfigError
from ..mesh import MeshAxes
from ..torch_private.root_mesh import joined
from ..torch_private.strided_shard import inner_shard
from .messages import placement_not_sharded_further, split_on_data_parallel_dim


@dataclass(frozen=True, eq=False)
class SpmdMesh:
    """A mesh of all kinds of parallelism, and the indices of its data-parallel dims."""

    mesh: DeviceMesh
    data_dims: tuple[int, ...]

    def check(self, placements: tuple[Placement, ...], name: str) -> None:
        """Check that a parameter with these placements is whole on every data-parallel dim.

        Raises:
            ConfigError: it is split on such a dim.
        """
        for index in self.data_dims:
            if not placements[index].is_replicate():
                raise split_on_data_parallel_dim(name, (self.mesh.mesh_dim_names or ())[index], placements[index])


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How a parameter was split before it was sharded.

    Attributes:
        mesh, placements: of the unsharded parameter.
        outer, outer_placements: of the sharded parameter: data-parallel dims first.
        shape, stride: of the whole parameter.
        data_dims: dims of `mesh` on which the parameter is whole, and over which gradients are reduced.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    outer: DeviceMesh
    outer_placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    data_dims: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, parameter: DTensor, name: str, axes: MeshAxes, dim: int, spmd: SpmdMesh | None, apart: bool = False
    ) -> TensorParallel:
        """The description of `parameter`, to be sharded on `dim` over `axes`.

        Args:
            spmd: the mesh of all kinds of parallelism, if passed to `fully_shard` (`dp_mesh_dims`).
            apart: whether the two meshes may have no common root mesh; then there is no DTensor over both.

        Raises:
            ConfigError: a placement that is not Shard or Replicate, or a mesh that cannot be combined with `axes`.
        """
        mesh, placements = parameter.device_mesh, parameter.placements
        for placement in placements:
            if not isinstance(placement, (Shard, Replicate)):
                raise placement_not_sharded_further(name, placement)
        data_dims: tuple[int, ...] = ()
        if spmd is not None and mesh == spmd.mesh:
            data_dims = spmd.data_dims
            spmd.check(placements, name)
        tensor_dims = [index for index in range(mesh.ndim) if index not in data_dims]
        splits = 1
        for index in tensor_dims:
            placement = placements[index]
            if isinstance(placement, Shard) and placement.dim == dim:
                splits *= mesh.size(index)
        inner = inner_shard(dim, splits)
        data_placements: tuple[Placement, ...] = (inner,) if axes.replicate is None else (Replicate(), inner)
        outer = axes.mesh
        if not data_dims:
            try:
                outer = joined(axes.mesh, mesh, name)
            except ConfigError:
                if not apart:
                    raise
                data_placements = ()  # no DTensor over both
        elif tensor_dims:
            outer = joined(axes.mesh, mesh[tuple((mesh.mesh_dim_names or ())[index] for index in tensor_dims)], name)
        outer_placements = (*data_placements, *(placements[index] for index in tensor_dims)) if data_placements else ()
        return cls(mesh, placements, outer, outer_placements, parameter.shape, parameter.stride(), data_dims)

    def sharded(self, local: torch.Tensor) -> DTensor:
        """The DTensor of the whole parameter over both meshes, from this rank's rows of its part."""
        return DTensor.from_local(
            local, self.outer, self.outer_placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def unsharded(self, local: torch.Tensor) -> DTensor:
        """The DTensor that the module computes with, from this rank's part."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor of the parameter's shape. No communication."""
        cut: Any = distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)
        local: torch.Tensor = cut._local_tensor
        return local

    def groups(self) -> list[Any]:
        """The groups over which the parameter's elements are split."""
        return [
            self.mesh.get_group(index)
            for index, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(index) > 1
        ]

    def local_gradient(self, gradient: Any, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of this rank's part; a partial gradient is summed over tensor-parallel ranks in `dtype`."""
        if not isinstance(gradient, DTensor):
            plain: torch.Tensor = gradient
            return plain
        placements = tuple(
            gradient.placements[index] if index in self.data_dims else placement  # about to be reduced over these dims
            for index, placement in enumerate(self.placements)
        )
        if gradient.placements == placements:
            return gradient._local_tensor
        cast: Any = gradient.to(dtype)
        summed: torch.Tensor = cast.redistribute(self.mesh, placements)._local_tensor
        return summed
