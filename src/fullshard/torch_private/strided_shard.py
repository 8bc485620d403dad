"""A placement for a dim that tensor parallelism splits first, and data parallelism within each part.

Private torch API: `torch.distributed.tensor.placement_types._StridedShard`. There is no public alternative: the
data-parallel split is the inner one, although its mesh dim is the outer one.
`tests/test_private_api.py` fails when it is gone.
"""

from __future__ import annotations

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def inner_shard(dim: int, splits: int) -> Placement:
    """`Shard(dim)` within each of the `splits` parts into which other mesh dims split the dim."""
    return Shard(dim) if splits == 1 else _StridedShard(dim, split_factor=splits)
