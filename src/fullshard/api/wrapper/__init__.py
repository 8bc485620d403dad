"""`FullyShardedDataParallel` (the FSDP1 interface)."""

from .fsdp import FullyShardedDataParallel
from .optimizer_state import from_rank0
from .settings import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictType",
    "from_rank0",
]
