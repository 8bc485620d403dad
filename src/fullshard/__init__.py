"""Fullshard: fully sharded data parallel training for PyTorch.

    from fullshard import fully_shard
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

From then on `model` trains as before: parameters, gradients and optimizer state are split over the ranks.
"""

from . import wrap
from .api.functional.fully_shard import fully_shard
from .api.functional.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .api.gathered import free, keep_gathered
from .api.gradients import set_check_nonfinite, set_token_count
from .api.join import join
from .api.parking import Moved, park, resume
from .api.wrapper.fsdp import FullyShardedDataParallel
from .api.wrapper.settings import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .checkpoint import load_optimizer_state_dict, optimizer_state_dict
from .comm.protocol import Comm, NullComm, RecordingComm
from .comm.torch_comm import TorchComm
from .errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DivergenceError,
    FullshardError,
    LayoutError,
    PhaseError,
    PrivateNameError,
)
from .events import Event, record_events
from .exchange.convert import convert
from .forms import FlatParameter, FlatShard, RowShard
from .insight.describe import describe
from .insight.memory import MemoryUse, memory_use
from .insight.owner import Owned, owner_of
from .insight.verify import verify
from .integrations.adopt import adopt
from .layout import Blocks
from .mesh.axes import ShardPlacementResult
from .mesh.data_parallel import DataParallelMeshDims
from .optim import NonfiniteGradient, ShardedGradScaler, clip_grad_norm_, nonfinite_gradients, optimizer_view
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .store.background import Saving
from .store.folder import Folder
from .store.full_parameters import full_parameters
from .store.hugging_face import load_safetensors, save_safetensors
from .store.load import Loaded, load
from .store.save import save
from .version import VERSION
from .watcher import watch

__version__ = VERSION

__all__ = [
    "BackwardPrefetch",
    "Blocks",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Comm",
    "ConfigError",
    "DamagedCheckpointError",
    "DataParallelMeshDims",
    "DivergenceError",
    "Event",
    "FSDPModule",
    "FlatParameter",
    "FlatShard",
    "Folder",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullshardError",
    "FullyShardedDataParallel",
    "LayoutError",
    "Loaded",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryUse",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "Moved",
    "NonfiniteGradient",
    "NullComm",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Owned",
    "PhaseError",
    "PrivateNameError",
    "RecordingComm",
    "RowShard",
    "Saving",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TorchComm",
    "UnshardHandle",
    "adopt",
    "clip_grad_norm_",
    "convert",
    "describe",
    "free",
    "full_parameters",
    "fully_shard",
    "join",
    "keep_gathered",
    "load",
    "load_optimizer_state_dict",
    "load_safetensors",
    "memory_use",
    "nonfinite_gradients",
    "optimizer_state_dict",
    "optimizer_view",
    "owner_of",
    "park",
    "record_events",
    "register_fsdp_forward_method",
    "resume",
    "save",
    "save_safetensors",
    "set_check_nonfinite",
    "set_token_count",
    "share_comm_ctx",
    "verify",
    "watch",
    "wrap",
]
