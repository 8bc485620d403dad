"""The mesh from which a mesh was sliced, and the mesh that combines the dims of two meshes with a common root.

Private torch API: `DeviceMesh._get_root_mesh` and `DeviceMesh._concatenate`. There is no public alternative: a sliced
mesh does not expose its root, and two meshes cannot be joined. `tests/test_private_api.py` fails when they are gone.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError


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
    if not first.mesh_dim_names or not second.mesh_dim_names:
        problem = "a mesh without dim names"
    elif len(set(names)) < len(names):
        problem = f"a dim that occurs in both: {first.mesh_dim_names} and {second.mesh_dim_names}"
    elif _holds(first._get_root_mesh(), first) and _holds(first._get_root_mesh(), second):
        return first._get_root_mesh()[tuple(names)]
    elif first._get_root_mesh() == second._get_root_mesh():  # unflattened separately from one root, as in torchtitan
        try:
            return DeviceMesh._concatenate([first, second])
        except (RuntimeError, ValueError) as error:  # a rank in both
            problem = str(error)
    else:
        problem = "two meshes that were not sliced from the same mesh"
    raise ConfigError(
        "A parameter is already a DTensor (tensor parallelism), and its mesh cannot be combined with fully_shard's.",
        parameter=name,
        expected="both meshes sliced from the same mesh, with different dims",
        got=problem,
        remedy='make one mesh, mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")); pass '
        'mesh["tp"] to parallelize_module and mesh["dp"] to fully_shard',
        topic="mesh-dims",
    )


def ranks_around(mesh: DeviceMesh) -> list[int]:
    """The ranks of the mesh from which `mesh` was sliced, or of `mesh` itself."""
    ranks: list[int] = mesh._get_root_mesh().mesh.flatten().tolist()
    return ranks


def _holds(root: DeviceMesh, part: DeviceMesh) -> bool:
    """Whether `part` equals the slice of `root` with the same dim names.

    Compares by equality, not by identity, because DTensor's caches return any equal mesh.
    """
    names = tuple(part.mesh_dim_names or ())
    if not set(names) <= set(root.mesh_dim_names or ()):
        return False
    return bool(root[names] == part)
