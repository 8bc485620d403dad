"""Meshes that share a root: the one that holds the dims of two of them.

Private torch API: `DeviceMesh._get_root_mesh`. There is no public alternative: a sliced mesh does not say what it was
sliced from; where the method is missing, tensor-parallel parameters are refused. `tests/test_private_api.py` says when
it goes.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError

HAS_ROOT = hasattr(DeviceMesh, "_get_root_mesh")


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
    problem = None
    if not HAS_ROOT:
        problem = "this version of torch does not tell what a mesh was sliced from"
    elif not first.mesh_dim_names or not second.mesh_dim_names:
        problem = "a mesh without dim names"
    elif len(set(names)) < len(names):
        problem = f"a dim in both: {first.mesh_dim_names} and {second.mesh_dim_names}"
    elif not _holds(first._get_root_mesh(), second):
        problem = "two meshes that were not sliced from one"
    if problem is not None:
        raise ConfigError(
            "A parameter is a DTensor already (tensor parallelism), and its mesh does not go with fully_shard's.",
            parameter=name,
            expected="both meshes sliced from one, with other dims",
            got=problem,
            remedy='make one mesh, mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")); give '
            'mesh["tp"] to parallelize_module and mesh["dp"] to fully_shard',
            code="C202",
        )
    found: DeviceMesh = first._get_root_mesh()[tuple(names)]
    return found


def _holds(root: DeviceMesh, part: DeviceMesh) -> bool:
    """Whether `part` equals what `root` has under its dims' names.

    Not whether it was sliced from this very object: DTensor's caches hand out any mesh that is equal.
    """
    names = tuple(part.mesh_dim_names or ())
    if not set(names) <= set(root.mesh_dim_names or ()):
        return False
    return bool(root[names] == part)
