"""Device meshes and process groups as the axes along which a unit is split and replicated."""

from .axes import (
    Axis,
    MeshAxes,
    ShardPlacementResult,
    axes_of_groups,
    backend_of,
    check_smaller_groups,
    device_of,
    device_type_of,
    resolve_mesh,
    subdivide,
    unsharded_axes,
)
from .data_parallel import DataParallelMeshDims, data_parallel_mesh
from .dim_names import refuse_misread
from .lines import Lines, cut_all_lines, lines_of, open_lines
