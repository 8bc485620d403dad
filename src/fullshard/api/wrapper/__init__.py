"""`FullyShardedDataParallel` (the FSDP1 interface)."""

from .fsdp import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
