"""Meshes that hold more than data parallelism, and which of their dims are data-parallel."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ..torch_private.root_mesh import joined
from .messages import cannot_flatten, nothing_to_shard_on, unknown_dims, unnamed_dims


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dims of the `mesh` given to `fully_shard` are data-parallel, if not all are (the names are PyTorch's).

    Attributes:
        shard: name of the dim that parameters are sharded on; several names are flattened into one dim.
        replicate: name of the dim, or names of the dims, of replicas (hybrid sharding); None if there is none.

    Raises:
        ConfigError: neither is given, a name occurs twice, or something is no name.
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


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """The 1-D (shard) or 2-D (replicate, shard) mesh that `dims` name in `mesh`. Collective if dims are flattened.

    Private torch API: `DeviceMesh._flatten`, for several names; there is no public alternative but to make the mesh
    with one dim in their place, which is what the error recommends.

    Raises:
        ConfigError: an unknown name, or replicas alone.
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
    """The mesh of one dim that stands for these."""
    if len(names) == 1:
        return mesh[names[0]]
    if not hasattr(mesh, "_flatten"):
        raise cannot_flatten(names)
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat
