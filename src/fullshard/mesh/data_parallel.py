"""The data-parallel dims of meshes that have other dims, too."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ..torch_private.root_mesh import joined
from .messages import nothing_to_shard_on, unknown_dims, unnamed_dims


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel dims of the `mesh` passed to `fully_shard`, if it has others (names are PyTorch's).

    Attributes:
        shard: name of the dim that parameters are sharded on; several names are flattened into a single dim.
        replicate: name or names of the dims of replicas (hybrid sharding); None without replicas.

    Raises:
        ConfigError: no names, a name that occurs twice, or a value that is not a string.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = [*self.shard_names, *self.replicate_names]
        if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise unnamed_dims(self.shard, self.replicate)

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(dims: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if dims is None:
        return ()
    return (dims,) if isinstance(dims, str) else tuple(dims)


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """The 1-D (shard) or 2-D (replicate, shard) mesh that `dims` name in `mesh`. Collective if dims are flattened.

    Private torch API: `DeviceMesh._flatten`, for several names. The public alternative is a mesh with a single dim
    instead.

    Raises:
        ConfigError: an unknown name, or replicas without a dim to shard on.
    """
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in (*dims.shard_names, *dims.replicate_names) if name not in names]
    if unknown:
        raise unknown_dims(names, unknown)
    if not dims.shard_names:
        raise nothing_to_shard_on(dims.replicate)
    parts = [_flat(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    return parts[0] if len(parts) == 1 else joined(parts[0], parts[1], "(dp_mesh_dims)")


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh of these dims, flattened."""
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat
