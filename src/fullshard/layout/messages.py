"""The wording of this package's errors, in the order of the code."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LayoutError, UnevenError

# kinds.py


def scalar_in_rows(parameter: str) -> LayoutError:
    """The error for a 0-dimensional parameter in a rows layout."""
    return LayoutError(
        f"parameter {parameter} is a scalar (0 dimensions) and cannot be split into rows.",
        remedy='give it shape (1,), pass it in ignored_params, or use layout="flat"',
    )


def uneven_dim(name: str, shape: Sequence[int], dim: int, world: int) -> UnevenError:
    """The error for an uneven split of a dim other than the first."""
    return UnevenError(
        f"parameter {name} of shape {shape} cannot be sharded evenly on dim {dim} over {world} ranks.",
        remedy=f"shard on dim 0, or on a dim whose size is a multiple of {world}",
    )
