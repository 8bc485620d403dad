"""Meshes that share a root: the one that holds the dims of two of them.

Private torch API: `DeviceMesh._get_root_mesh` and `DeviceMesh._concatenate`. There is no public alternative: a sliced
mesh does not say what it was sliced from, nor can two be put together. Where the first is missing, tensor-parallel
parameters are refused; where the second is, those of meshes that were unflattened apart from one root, as torchtitan's.
`tests/test_private_api.py` says when they go.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError

HAS_ROOT = hasattr(DeviceMesh, "_get_root_mesh")
HAS_CONCATENATE = hasattr(DeviceMesh, "_concatenate")


def joined(first: DeviceMesh, second: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh of `first`'s dims followed by `second`'s, both sliced from one root.

    Args:
        first: the data-parallel mesh.
        second: the mesh of a parameter that is a DTensor already.
        name: of the parameter, for errors.

    Raises:
        ConfigError: the meshes have no names, no common root, or a dim in common.
    """
    names = [*(first.mesh_dim_names or ()), *(second.mesh_dim_names or ())]
    if not HAS_ROOT:
        problem = "this version of torch does not tell what a mesh was sliced from"
    elif not first.mesh_dim_names or not second.mesh_dim_names:
        problem = "a mesh without dim names"
    elif len(set(names)) < len(names):
        problem = f"a dim in both: {first.mesh_dim_names} and {second.mesh_dim_names}"
    elif _holds(first._get_root_mesh(), first) and _holds(first._get_root_mesh(), second):
        found: DeviceMesh = first._get_root_mesh()[tuple(names)]
        return found
    elif HAS_CONCATENATE and first._get_root_mesh() == second._get_root_mesh():
        try:
            return _concatenated(first, second)
        except (RuntimeError, ValueError) as error:  # a rank in both
            problem = str(error)
    else:
        problem = "two meshes that were not sliced from one"
    raise ConfigError(
        "A parameter is a DTensor already (tensor parallelism), and its mesh does not go with fully_shard's.",
        parameter=name,
        expected="both meshes sliced from one, with other dims",
        got=problem,
        remedy='make one mesh, mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")); give '
        'mesh["tp"] to parallelize_module and mesh["dp"] to fully_shard',
        topic="mesh-dims",
    )


def _concatenated(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh of the dims of both, which have one root."""
    found: DeviceMesh = DeviceMesh._concatenate([first, second])
    return found


def _holds(root: DeviceMesh, part: DeviceMesh) -> bool:
    """Whether `part` equals what `root` has under its dims' names.

    Not whether it was sliced from this very object: DTensor's caches hand out any mesh that is equal.
    """
    names = tuple(part.mesh_dim_names or ())
    if not set(names) <= set(root.mesh_dim_names or ()):
        return False
    return bool(root[names] == part)
