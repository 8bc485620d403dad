"""`adopt`: makes a program's later imports of PyTorch's FSDP resolve to Fullshard.

PyTorch's public names are replaced where they are defined, under every alias, and where PyTorch's own modules imported
them. If the program itself has imported any, `adopt` refuses, because it cannot undo their use. This is the only file
that imports PyTorch's front-ends, in order to replace their names; `private.py` guards their private names.
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

from .. import policies
from ..api import wrapping
from ..api.functional import module as functional
from ..api.functional.fully_shard import fully_shard
from ..api.functional.reduce_dtype import follow_torch
from ..api.wrapper import configs, fsdp
from ..checkpoint import functions
from ..forms import flat_parameter
from ..mesh import data_parallel
from ..optim import scaler
from ..runtime import reduce_kept
from ..text import counted
from ..version import VERSION
from . import adjustments, messages, private

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
"""Modules that programs import PyTorch's names from."""

_SAME_NAMES = (
    *(configs, data_parallel, flat_parameter, fsdp, functional, functions, policies, reduce_kept, scaler, wrapping),
)
OURS: Mapping[str, Any] = {"_or_policy": wrapping.or_policy, "fully_shard": fully_shard} | {
    name: value
    for ours in _SAME_NAMES
    for name, value in vars(ours).items()
    if not name.startswith("_") and getattr(value, "__module__", None) == ours.__name__
}
"""Fullshard's objects by PyTorch's names for them; these modules define them under the same names."""

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": {
        "apply_activation_checkpointing": adjustments.apply_activation_checkpointing
    },
    "torch.distributed._tools.fsdp2_mem_tracker": {"FSDPMemTracker": adjustments.FSDPMemTracker},
}
"""Replacements for PyTorch's tools that use its private classes, by module."""


@dataclass
class Adopted:
    """What `adopt` took over; its text is what `adopt` prints.

    Attributes:
        lenient: whether private names cause warnings instead of errors.
        names: PyTorch's names that are now Fullshard's, by module.
        notes: changes to client libraries; grows as they are imported.
    """

    lenient: bool
    names: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"fullshard {VERSION} adopts this program (torch {torch.__version__}); taken over:"]
        lines += [f"  {module}: {counted(len(names), 'name')}" for module, names in self.names.items()]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def note(self, line: str) -> None:
        """Record and print a change to a client library."""
        self.notes.append(line)
        _print(f"fullshard: {line}")


_adoptions: list[Adopted] = []
"""At most one, because it cannot be undone."""


def adopt(lenient: bool = False) -> Adopted:
    """Replace PyTorch's FSDP by Fullshard for the rest of this process.

    Every public name of `torch.distributed.fsdp`, its aliases, and the functions of
    `torch.distributed.checkpoint.state_dict` resolve to Fullshard's from then on: call it before anything imports
    them. It prints what it took over, once per node, and later each change to a client library (PEFT, ...) when the
    library is imported. Programs that use PyTorch's private classes (`torch.distributed.fsdp._*`) are not supported.

    Args:
        lenient: for private names, warn and return PyTorch's own object instead of raising an error.

    Returns:
        What was taken over. A second call only updates `lenient`.

    Raises:
        PhaseError: the program has imported PyTorch's FSDP, or a library that `adopt` changes; or PyTorch's front-ends
            have sharded modules. Nothing has changed.
        PrivateNameError: later, when the program accesses a private name.
    """
    if _adoptions:
        _adoptions[0].lenient = lenient
        return _adoptions[0]
    modules = {name: importlib.import_module(name) for name in (*PUBLIC, *TOOLS)}
    adoption = Adopted(lenient)
    replacements: dict[int, tuple[Any, Any]] = {}  # by id of PyTorch's object: the object, and Fullshard's for it
    for path, module in modules.items():
        ours = TOOLS.get(path, OURS)
        for name, value in vars(module).items():
            if name in ours and value is not ours[name] and not isinstance(value, ModuleType):
                replacements[id(value)] = value, ours[name]
                adoption.names.setdefault(path, []).append(name)
    if uses := [*_imports({*replacements, *map(id, modules.values())}), *_front_ends_in_use(modules[FSDP])]:
        raise messages.adopted_late(uses)
    _adoptions.append(adoption)
    follow_torch()
    torch_modules = [module for module in list(sys.modules.values()) if _package(module) == "torch"]
    for module in torch_modules:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                vars(module)[name] = replacements[id(value)][1]
    private.guard([m for m in torch_modules if m.__name__.startswith(f"{FSDP}.")], lambda: adoption.lenient)
    sys.meta_path.insert(0, _Finder(adoption))
    _print(str(adoption))
    return adoption


def _print(text: str) -> None:
    if dist.get_node_local_rank(fallback_rank=0) == 0:
        print(text, flush=True)


def _package(module: Any) -> str:
    """A module's top-level package; "" for other objects in `sys.modules`."""
    return module.__name__.partition(".")[0] if isinstance(module, ModuleType) else ""


def _imports(replaced: Container[int]) -> Iterator[str]:
    """Names that the program imported too early: into modules, or into local variables of the callers of `adopt`.

    Args:
        replaced: ids of PyTorch's objects that get replaced, and of the modules that contain them.
    """
    for path, module in list(sys.modules.items()):
        if path == "__mp_main__":  # an alias of `__main__`
            continue
        if path in adjustments.ADJUSTMENTS:
            yield f"{path} is imported"
        elif _package(module) not in ("", "torch", "fullshard"):
            if names := [name for name, value in list(vars(module).items()) if id(value) in replaced]:
                yield f"{path} imported {', '.join(names)}"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name != "<module>":
            for name in [name for name, value in frame.f_locals.items() if id(value) in replaced]:
                yield f"{frame.f_code.co_qualname}(), {frame.f_code.co_filename}:{frame.f_lineno}, imported {name}"
        frame = frame.f_back


def _front_ends_in_use(front_ends: ModuleType) -> Iterator[str]:
    """Subclasses of PyTorch's front-ends, defined by a program or by `fully_shard`, and wrapped modules."""
    for base in (front_ends.FSDPModule, front_ends.FullyShardedDataParallel):
        for cls in base.__subclasses__():
            if cls.__name__ != "ReplicateModule" or not cls.__module__.startswith("torch."):  # not PyTorch's own
                yield f"class {cls.__qualname__}({base.__name__})"
        if any(type(referrer) is base for referrer in gc.get_referrers(base)):
            yield f"an instance of {base.__name__}"


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find client libraries, and adjusts these after they have run."""

    def __init__(self, adoption: Adopted) -> None:
        self._adoption = adoption

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The other finders' result, with a loader that adjusts the module after executing it."""
        if fullname not in adjustments.ADJUSTMENTS:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for finder in finders if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                adjustments.ADJUSTMENTS[fullname](module, self._adoption.note)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
