"""`adopt`: from then on a program's imports of PyTorch's FSDP give Fullshard.

PyTorch's public names are replaced where they are defined, under every alias, and where PyTorch's own modules imported
them. A program that has imported some itself is refused: what it did with them cannot be undone. This is the one file
that imports PyTorch's front-ends, to put names into them; what is private in them is guarded by `private.py`.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
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
from ..forms import FlatParameter
from ..mesh.data_parallel import DataParallelMeshDims
from ..optim import ShardedGradScaler
from ..policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..runtime.reduce_kept import GradientReductionHandle
from ..version import VERSION
from . import adopted, messages, private

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


TOOLS: Mapping[str, Mapping[str, Any]] = {
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": {
        "apply_activation_checkpointing": adopted.apply_activation_checkpointing
    },
    "torch.distributed._tools.fsdp2_mem_tracker": {"FSDPMemTracker": adopted.FSDPMemTracker},
}
"""PyTorch's tools that reach into its private classes, and ours for them."""


@dataclass
class Adopted:
    """What `adopt` took over; as text, what it prints.

    Attributes:
        lenient: private names are warned of.
        names: of PyTorch's that are Fullshard's now, by the module they are imported from.
        notes: what changed in client libraries; grows as they are imported.
    """

    lenient: bool
    names: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"fullshard {VERSION} adopts this program (torch {torch.__version__}); taken over:"]
        lines += [f"  {module}: {len(names)} names" for module, names in self.names.items()]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def note(self, line: str) -> None:
        """A client library was imported and changed."""
        self.notes.append(line)
        _print(f"fullshard: {line}")


_adoptions: list[Adopted] = []
"""At most one: it is for good."""


def adopt(lenient: bool = False) -> Adopted:
    """Put Fullshard in the place of PyTorch's FSDP for the rest of this process.

    Every public name of `torch.distributed.fsdp`, its aliases, and the functions of
    `torch.distributed.checkpoint.state_dict` resolve to Fullshard's from then on: call it before anything imports
    them. What was taken over is printed, once on each node; so is what had to change in a client library (PEFT, ...)
    once it is imported. Programs that use PyTorch's private classes (`torch.distributed.fsdp._*`) cannot be served.

    Args:
        lenient: warn of private names, and hand out PyTorch's own, in place of an error.

    Returns:
        What was taken over. A second call changes nothing but `lenient`.

    Raises:
        PhaseError: the program has imported PyTorch's FSDP, or a library that `adopt` changes; or PyTorch's front-ends
            have sharded modules. Nothing has changed.
        PrivateNameError: later, when the program asks for a private name.
    """
    if _adoptions:
        _adoptions[0].lenient = lenient
        return _adoptions[0]
    modules = {name: importlib.import_module(name) for name in (*PUBLIC, *TOOLS)}
    taken_over = Adopted(lenient)
    pairs: Pairs = {}
    for path, module in modules.items():
        ours = TOOLS.get(path, OURS)
        for name, value in vars(module).items():
            if name in ours and value is not ours[name] and not isinstance(value, ModuleType):
                pairs[id(value)] = value, ours[name]
                taken_over.names.setdefault(path, []).append(name)
    if uses := [*_imports({*pairs, *map(id, modules.values())}), *_front_ends_in_use(modules[FSDP])]:
        raise messages.adopted_late(uses)
    _adoptions.append(taken_over)
    follow_torch()
    torch_modules = [module for module in list(sys.modules.values()) if _top(module) == "torch"]
    for module in torch_modules:
        names = vars(module)
        names.update({name: pairs[id(value)][1] for name, value in list(names.items()) if id(value) in pairs})
    private.guard([one for one in torch_modules if one.__name__.startswith(f"{FSDP}.")], lambda: taken_over.lenient)
    sys.meta_path.insert(0, _Finder(taken_over))
    _print(str(taken_over))
    return taken_over


Pairs = dict[int, tuple[Any, Any]]
"""By id of PyTorch's object: that, and ours."""


def _print(text: str) -> None:
    if dist.get_node_local_rank(fallback_rank=0) == 0:
        print(text, flush=True)


def _top(module: Any) -> str:
    """The package of a module; "" for what else stands in `sys.modules`."""
    return module.__name__.partition(".")[0] if isinstance(module, ModuleType) else ""


def _imports(theirs: Container[int]) -> Iterator[str]:
    """What the program has imported that is to be replaced: as a module's name, or a variable of whoever calls `adopt`.

    Args:
        theirs: ids of PyTorch's objects, and of the modules that they are imported from.
    """
    for path, module in list(sys.modules.items()):
        if path == "__mp_main__":  # `__main__` once more
            continue
        if path in adopted.ADJUSTED:
            yield f"{path} is imported"
        elif _top(module) not in ("", "torch", "fullshard"):
            if names := [name for name, value in list(vars(module).items()) if id(value) in theirs]:
                yield f"{path} imported {', '.join(names)}"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name != "<module>":
            for name in [name for name, value in frame.f_locals.items() if id(value) in theirs]:
                yield f"{frame.f_code.co_qualname}(), {frame.f_code.co_filename}:{frame.f_lineno}, imported {name}"
        frame = frame.f_back


def _front_ends_in_use(front_ends: ModuleType) -> Iterator[str]:
    """Classes that are derived from PyTorch's front-ends, by a program or by `fully_shard`, and wrapped modules."""
    for base in (front_ends.FSDPModule, front_ends.FullyShardedDataParallel):
        yield from (f"class {cls.__qualname__}({base.__name__})" for cls in base.__subclasses__() if not _is_own(cls))
        if any(type(one) is base for one in gc.get_referrers(base)):
            yield f"an instance of {base.__name__}"


def _is_own(cls: type) -> bool:
    """Whether PyTorch derives it, and has not sharded a module by it."""
    return cls.__name__ == "ReplicateModule" and cls.__module__.startswith("torch.")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the next finders find, and has client libraries adjusted once they have run."""

    def __init__(self, taken_over: Adopted) -> None:
        self._taken_over = taken_over

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the other finders do; what executes the module adjusts it then."""
        if fullname not in adopted.ADJUSTED:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for finder in finders if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                adopted.ADJUSTED[fullname](module, self._taken_over.note)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
