"""Device meshes and process groups, as the axes along which a unit is split and replicated."""

from .axes import (
    Axis,
    MeshAxes,
    ShardPlacementResult,
    axes_of_groups,
    device_type_of,
    resolve_mesh,
    subdivide,
    unsharded_axes,
)
from .data_parallel import DataParallelMeshDims, data_parallel_mesh
from .lines import Lines, all_lines, lines_of
from .names import refuse_misread

__all__ = [
    "Axis",
    "DataParallelMeshDims",
    "Lines",
    "MeshAxes",
    "ShardPlacementResult",
    "all_lines",
    "axes_of_groups",
    "data_parallel_mesh",
    "device_type_of",
    "lines_of",
    "refuse_misread",
    "resolve_mesh",
    "subdivide",
    "unsharded_axes",
]
