"""Meshes that hold more than data parallelism, and which of their dims are data-parallel."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from ..torch_private.root_mesh import joined


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
            raise ConfigError(
                "DataParallelMeshDims needs the names of data-parallel mesh dims, each once.",
                expected='DataParallelMeshDims(shard="dp") or (shard=("dp", "cp"), replicate="pods")',
                got=f"shard={self.shard!r}, replicate={self.replicate!r}",
                code="C148",
            )

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
        raise ConfigError(
            "dp_mesh_dims names a dim that the mesh does not have.",
            expected=f"names among {names}",
            got=", ".join(map(repr, unknown)),
            code="C149",
        )
    if not dims.shard_names:
        raise ConfigError(
            "dp_mesh_dims gives replicas and nothing to shard on.",
            expected="shard=, the name of at least one dim",
            got=f"replicate={dims.replicate!r} alone",
            remedy="use DistributedDataParallel, or name one of these dims in shard=",
            code="C150",
        )
    parts = [_flat(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    return parts[0] if len(parts) == 1 else joined(parts[0], parts[1], "(dp_mesh_dims)")


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of one dim that stands for these."""
    if len(names) == 1:
        return mesh[names[0]]
    if not hasattr(mesh, "_flatten"):
        raise ConfigError(
            f"this version of torch cannot flatten mesh dims {names}: make the mesh with one dim in their place",
            code="C151",
        )
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat
