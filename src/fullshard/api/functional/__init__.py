"""`fully_shard` and the methods of a unit's module (the FSDP2 interface)."""

from .copying import deepcopy_module
from .fully_shard import _move_buffers, find_root

__all__ = [
    "HOOKS_KEY",
    "_move_buffers",
    "deepcopy_module",
    "find_root",
    "hooks_of",
    "is_unit",
    "unit_of",
]
