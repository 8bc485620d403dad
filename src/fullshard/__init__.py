"""Fullshard: fully sharded data parallel training for PyTorch.

    from fullshard import fully_shard
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

From then on `model` trains as before: parameters, gradients and optimizer state are split over the ranks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .insight import last_words
from .version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from . import comm_hooks, errors, events, optim, policies, state_dict, wrap  # noqa: F401
    from .api.functional.fully_shard import fully_shard
    from .api.functional.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
    from .api.gathered import free, keep_gathered
    from .api.gradient_settings import set_check_nonfinite, set_token_count
    from .api.join import join
    from .api.offloading import Offloaded, offload_by_budget
    from .api.park import Moved, park, resume
    from .api.state_on_disk import StateOnDisk, optimizer_state_on_disk
    from .api.wrapper.configs import (
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
    from .api.wrapper.fsdp import FullyShardedDataParallel
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
    from .insight.describe import Owned, describe, owner_of
    from .insight.memory import MemoryUse, explain_memory, memory_use
    from .insight.monitor import Monitor
    from .insight.planner import Plan, Plans, Rates, Strategy, measure_rates, plan, solve
    from .insight.trace.event_file import trace
    from .insight.verify import verify
    from .integrations.adopt import adopt
    from .layout import Blocks
    from .mesh.axes import ShardPlacementResult
    from .mesh.data_parallel import DataParallelMeshDims
    from .optim import (
        Muon,
        NonfiniteGradient,
        OwnerOptimizer,
        ShardedGradScaler,
        StateOnHost,
        StepsInBackward,
        clip_grad_norm_,
        nonfinite_gradients,
        optimizer_state_on_host,
        optimizer_view,
        step_in_backward,
    )
    from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from .runtime.reduce_kept import GradientReductionHandle
    from .store.background import Saving
    from .store.folder import Folder
    from .store.full_parameters import full_parameters
    from .store.hugging_face import load_safetensors, save_safetensors
    from .store.load import Loaded, load
    from .store.save import save
    from .watcher import watch

_HOMES = {
    name: f".{module}"
    for module, names in {
        "api.functional.fully_shard": "fully_shard",
        "api.functional.module": "FSDPModule UnshardHandle register_fsdp_forward_method share_comm_ctx",
        "api.gathered": "free keep_gathered",
        "api.gradient_settings": "set_check_nonfinite set_token_count",
        "api.join": "join",
        "api.offloading": "Offloaded offload_by_budget",
        "api.park": "Moved park resume",
        "api.state_on_disk": "StateOnDisk optimizer_state_on_disk",
        "api.wrapper.fsdp": "FullyShardedDataParallel",
        "api.wrapper.configs": (
            "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig "
            "LocalStateDictConfig MixedPrecision OptimStateDictConfig OptimStateKeyType "
            "ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy StateDictConfig "
            "StateDictSettings StateDictType"
        ),
        "checkpoint": "load_optimizer_state_dict optimizer_state_dict",
        "comm.protocol": "Comm NullComm RecordingComm",
        "comm.torch_comm": "TorchComm",
        "errors": (
            "CheckpointError ConfigError DamagedCheckpointError DivergenceError FullshardError LayoutError "
            "PhaseError PrivateNameError"
        ),
        "events": "Event record_events",
        "exchange.convert": "convert",
        "forms": "FlatParameter FlatShard RowShard",
        "insight.describe": "Owned describe owner_of",
        "insight.memory": "MemoryUse explain_memory memory_use",
        "insight.monitor": "Monitor",
        "insight.planner": "Plan Plans Rates Strategy measure_rates plan solve",
        "insight.trace.event_file": "trace",
        "insight.verify": "verify",
        "integrations.adopt": "adopt",
        "layout": "Blocks",
        "mesh.axes": "ShardPlacementResult",
        "mesh.data_parallel": "DataParallelMeshDims",
        "optim": "Muon NonfiniteGradient OwnerOptimizer ShardedGradScaler StateOnHost StepsInBackward clip_grad_norm_ "
        "nonfinite_gradients optimizer_state_on_host optimizer_view step_in_backward",
        "policies": "CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy",
        "runtime.reduce_kept": "GradientReductionHandle",
        "store.background": "Saving",
        "store.folder": "Folder",
        "store.full_parameters": "full_parameters",
        "store.hugging_face": "load_safetensors save_safetensors",
        "store.load": "Loaded load",
        "store.save": "save",
        "watcher": "watch",
    }.items()
    for name in names.split()
}
"""Where each public name is defined. Modules are imported on first use: `import fullshard` alone imports no torch."""

_MODULES = ("comm_hooks", "errors", "events", "optim", "policies", "state_dict", "wrap")
"""Modules that are attributes of the package without an explicit import."""


if not TYPE_CHECKING:  # with it, type checkers would accept any misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562)."""
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
            if name in ("fully_shard", "FullyShardedDataParallel"):
                last_words.install()
            return value
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


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
    "GradientReductionHandle",
    "LayoutError",
    "Loaded",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryUse",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "Monitor",
    "Moved",
    "Muon",
    "NonfiniteGradient",
    "NullComm",
    "OffloadPolicy",
    "Offloaded",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Owned",
    "OwnerOptimizer",
    "PhaseError",
    "Plan",
    "Plans",
    "PrivateNameError",
    "Rates",
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
    "StateOnDisk",
    "StateOnHost",
    "StepsInBackward",
    "Strategy",
    "TorchComm",
    "UnshardHandle",
    "adopt",
    "clip_grad_norm_",
    "convert",
    "describe",
    "explain_memory",
    "free",
    "full_parameters",
    "fully_shard",
    "join",
    "keep_gathered",
    "load",
    "load_optimizer_state_dict",
    "load_safetensors",
    "measure_rates",
    "memory_use",
    "nonfinite_gradients",
    "offload_by_budget",
    "optimizer_state_dict",
    "optimizer_state_on_disk",
    "optimizer_state_on_host",
    "optimizer_view",
    "owner_of",
    "park",
    "plan",
    "record_events",
    "register_fsdp_forward_method",
    "resume",
    "save",
    "save_safetensors",
    "set_check_nonfinite",
    "set_token_count",
    "share_comm_ctx",
    "solve",
    "step_in_backward",
    "trace",
    "verify",
    "watch",
    "wrap",
]
