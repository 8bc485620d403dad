"""Communication: the protocol, its kinds, and mesh axes."""

from ..errors import ConfigError
from .custom import AllGather, CustomComm, ReduceScatter, custom, separate_group
from .group_memory import GroupMemory
from .groups import axes_of_groups, device_type_of, reduce_value, unsharded_axes
from .hook import HookComm
from .mesh import Axis, MeshAxes, ShardPlacementResult, resolve_mesh, subdivide
from .protocol import Call, Comm, Costs, NullComm, Pending, RecordingComm
from .root_mesh import joined
from .spmd import DataParallelMeshDims, data_parallel_mesh
from .torch_comm import TorchComm


def make_comm(kind: "str | Comm") -> Comm:
    """The kind of that name ("torch" or "null"), or `kind` itself if it is one already.

    Raises:
        ConfigError: unknown name.
    """
    if kind == "torch":
        return TorchComm()
    if kind == "null":
        return NullComm()
    if isinstance(kind, str) or not hasattr(kind, "gather"):
        raise ConfigError(f'comm must be "torch", "null" or an object with the methods of fullshard.Comm, got {kind!r}')
    return kind


__all__ = [
    "AllGather",
    "Axis",
    "Call",
    "Comm",
    "Costs",
    "CustomComm",
    "DataParallelMeshDims",
    "GroupMemory",
    "HookComm",
    "MeshAxes",
    "NullComm",
    "Pending",
    "RecordingComm",
    "ReduceScatter",
    "ShardPlacementResult",
    "TorchComm",
    "axes_of_groups",
    "custom",
    "data_parallel_mesh",
    "device_type_of",
    "joined",
    "make_comm",
    "reduce_value",
    "resolve_mesh",
    "separate_group",
    "subdivide",
    "unsharded_axes",
]
