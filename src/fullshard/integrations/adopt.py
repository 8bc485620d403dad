"""`adopt`: from then on a program's imports of PyTorch's FSDP give Fullshard, in every module.

PyTorch's public names are replaced where they are defined, under every alias, and in the globals of every module that
took them already, which are found by identity. This is the one file that imports PyTorch's front-ends, to put names
into them; what is private in them is guarded by `private.py`.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..api.functional.fully_shard import fully_shard
from ..api.functional.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ..api.functional.reduce_dtype import follow_torch
from ..api.wrapper import settings
from ..api.wrapper.fsdp import FullyShardedDataParallel
from ..api.wrapping import policies
from ..checkpoint import functions
from ..errors import PhaseError
from ..forms import FlatParameter
from ..mesh.data_parallel import DataParallelMeshDims
from ..optim import ShardedGradScaler
from ..policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..runtime.reduce_kept import GradientReductionHandle
from ..version import VERSION
from . import clients, held, private

FSDP = "torch.distributed.fsdp"
STATE_DICT = "torch.distributed.checkpoint.state_dict"
PUBLIC = (
    FSDP,
    f"{FSDP}.fully_sharded_data_parallel",
    f"{FSDP}.api",
    f"{FSDP}.wrap",
    f"{FSDP}.sharded_grad_scaler",
    "torch.distributed._composable.fsdp",
    STATE_DICT,
)
"""Where programs import PyTorch's names from."""

OURS: Mapping[str, Any] = {
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "CustomPolicy": policies.CustomPolicy,
    "DataParallelMeshDims": DataParallelMeshDims,
    "FSDPModule": FSDPModule,
    "FlatParameter": FlatParameter,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "GradientReductionHandle": GradientReductionHandle,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "ModuleWrapPolicy": policies.ModuleWrapPolicy,
    "OffloadPolicy": OffloadPolicy,
    "ShardedGradScaler": ShardedGradScaler,
    "UnshardHandle": UnshardHandle,
    "always_wrap_policy": policies.always_wrap_policy,
    "enable_wrap": policies.enable_wrap,
    "fully_shard": fully_shard,
    "get_model_state_dict": functions.get_model_state_dict,
    "get_optimizer_state_dict": functions.get_optimizer_state_dict,
    "get_state_dict": functions.get_state_dict,
    "lambda_auto_wrap_policy": policies.lambda_auto_wrap_policy,
    "_or_policy": policies.or_policy,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "set_model_state_dict": functions.set_model_state_dict,
    "set_optimizer_state_dict": functions.set_optimizer_state_dict,
    "set_state_dict": functions.set_state_dict,
    "share_comm_ctx": share_comm_ctx,
    "size_based_auto_wrap_policy": policies.size_based_auto_wrap_policy,
    "transformer_auto_wrap_policy": policies.transformer_auto_wrap_policy,
    "wrap": policies.wrap,
    **{
        name: getattr(settings, name)
        for name in (
            "BackwardPrefetch",
            "CPUOffload",
            "FullOptimStateDictConfig",
            "FullStateDictConfig",
            "LocalOptimStateDictConfig",
            "LocalStateDictConfig",
            "MixedPrecision",
            "OptimStateDictConfig",
            "OptimStateKeyType",
            "ShardedOptimStateDictConfig",
            "ShardedStateDictConfig",
            "ShardingStrategy",
            "StateDictConfig",
            "StateDictSettings",
            "StateDictType",
            "TrainingState",
        )
    },
}
"""By PyTorch's names."""


@dataclass
class Adopted:
    """What `adopt` took over; as text, what it prints.

    Attributes:
        lenient: private names are warned of.
        names: of PyTorch's that are Fullshard's now, by the module they are imported from.
        rebound: the same of modules that had taken some already.
        held: where such modules held them otherwise, in containers, default arguments, closures and classes.
        notes: what changed in client libraries; grows as they are imported.
    """

    lenient: bool
    names: dict[str, list[str]] = field(default_factory=dict)
    rebound: dict[str, list[str]] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"fullshard {VERSION} adopts this program (torch {torch.__version__}); taken over:"]
        lines += [f"  {module}: {len(names)} names" for module, names in self.names.items()]
        lines += [f"  taken earlier by {module}: {', '.join(names)}" for module, names in self.rebound.items()]
        lines += [f"  held earlier as {path}" for path in self.held]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


FRONT_ENDS = (FSDPModule, FullyShardedDataParallel, FlatParameter)
"""What programs derive classes from; settings of PyTorch's classes are taken as they are."""

_adoptions: list[Adopted] = []
"""At most one: it is for good."""


def adopt(lenient: bool = False) -> Adopted:
    """Put Fullshard in the place of PyTorch's FSDP for the rest of this process.

    Every public name of `torch.distributed.fsdp`, its aliases, and the functions of
    `torch.distributed.checkpoint.state_dict` resolve to Fullshard's, also in modules that were imported before. What
    was taken over is printed, once on each node; so is what had to change in a client library (Accelerate, ...) once
    it is imported. Programs that use PyTorch's private classes (`torch.distributed.fsdp._*`) cannot be served.

    Args:
        lenient: warn of private names, and hand out PyTorch's own, in place of an error.

    Returns:
        What was taken over. A second call changes nothing but `lenient`.

    Raises:
        PhaseError: modules were sharded by PyTorch's front-ends already; or a running function, or a class that was
            derived from one of PyTorch's, holds what cannot be replaced (with `lenient`: a warning).
        PrivateNameError: later, when the program asks for a private name.
    """
    if _adoptions:
        _adoptions[0].lenient = lenient
        return _adoptions[0]
    modules = {name: importlib.import_module(name) for name in PUBLIC}
    _check_unused(modules[FSDP])
    adopted = Adopted(lenient)
    pairs = {}
    for module, name in _to_replace(modules):
        theirs = vars(module)[name]
        pairs[id(theirs)] = theirs, OURS[name]
        adopted.names.setdefault(module.__name__, []).append(name)
    _change_classes(pairs, lenient)
    _adoptions.append(adopted)
    follow_torch()
    _replace(pairs, adopted)
    adopted.held += held.search({at: ours for at, (_, ours) in pairs.items()})
    private.guard(adopted, [one for name, one in list(sys.modules.items()) if _guarded(name)], pairs.values())
    clients.watch(_told)
    if dist.get_node_local_rank(fallback_rank=0) == 0:
        print(adopted, flush=True)
    return adopted


def _told(note: str) -> None:
    """A client library was imported and changed."""
    _adoptions[0].notes.append(note)
    if dist.get_node_local_rank(fallback_rank=0) == 0:
        print(f"fullshard: {note}", flush=True)


def _guarded(name: str) -> bool:
    return name.startswith(f"{FSDP}.") and isinstance(sys.modules[name], ModuleType)


def _to_replace(modules: Mapping[str, ModuleType]) -> Iterator[tuple[ModuleType, str]]:
    """PyTorch's names that have one of ours, where they are imported from."""
    for module in modules.values():
        for name, value in vars(module).items():
            if name in OURS and value is not OURS[name] and not isinstance(value, ModuleType):
                yield module, name


Pairs = Mapping[int, tuple[Any, Any]]
"""By id of PyTorch's object: that, and ours."""


def _replace(pairs: Pairs, told: Adopted) -> None:
    """Put ours where PyTorch's objects are the globals of any module."""
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] == __name__.partition(".")[0]:
            continue  # ours call PyTorch's for models that are not sharded
        taken = vars(module)
        for name, value in list(taken.items()):
            if id(value) in pairs:
                taken[name] = pairs[id(value)][1]
                if module_name not in told.names and not module_name.startswith(f"{FSDP}."):
                    told.rebound.setdefault(module_name, []).append(name)


def _change_classes(pairs: Pairs, lenient: bool) -> None:
    """Derive the program's classes from ours, and refuse what cannot be changed, before anything else is.

    Raises:
        PhaseError: see `adopt`.
    """
    held.refuse([f"local variable {one}" for one in held.in_use(pairs)], lenient)
    stay = held.rebase(pair for pair in pairs.values() if pair[1] in FRONT_ENDS)
    held.refuse(
        [f"class {cls.__module__}.{cls.__qualname__} is derived from {base.__name__}" for cls, base in stay], lenient
    )


def _check_unused(front_ends: ModuleType) -> None:
    """Refuse to adopt once PyTorch's front-ends hold modules, which the program could no longer steer."""
    unit, wrapper = front_ends.FSDPModule, front_ends.FullyShardedDataParallel
    made = [cls for cls in unit.__subclasses__() if not held.is_programs(cls.__module__)]
    found = [cls.__name__ for cls in made if cls.__name__ != "ReplicateModule"]  # which is PyTorch's
    wrappers = [wrapper, *wrapper.__subclasses__()]
    found += [type(one).__name__ for cls in wrappers for one in gc.get_referrers(cls) if type(one) is cls]
    if found:
        raise PhaseError(
            "PyTorch's front-ends have sharded modules in this process already.",
            got=", ".join(sorted(set(found))),
            remedy="call fullshard.adopt() first, or start the program by: python -m fullshard adopt SCRIPT",
        )
