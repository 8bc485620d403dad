"""`fully_shard` and the methods of a unit's module (the FSDP2 interface)."""

from .copying import deepcopy_module
from .fully_shard import _move_buffers, find_root
from .state_dict import shape_error

__all__ = [
    "HOOKS_KEY",
    "_move_buffers",
    "deepcopy_module",
    "find_root",
    "hooks_of",
    "is_unit",
    "shape_error",
    "unit_of",
]
