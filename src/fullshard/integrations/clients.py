"""What client libraries need besides PyTorch's names; each is changed when it is imported, and it is said."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from . import pytorch
from .adopted import accelerate, lightning, peft, transformers

ADJUSTED: Mapping[str, Callable[[ModuleType, Callable[[str], None]], None]] = {
    "accelerate.state": accelerate.adjust_state,
    "accelerate.utils.dataclasses": accelerate.adjust_plugin,
    "lightning.fabric.connector": lightning.adjust_connector,
    "lightning.pytorch.trainer.connectors.accelerator_connector": lightning.adjust_connector,
    "lightning_fabric.connector": lightning.adjust_connector,
    "peft.peft_model": peft.adjust_model,
    "peft.utils.save_and_load": peft.adjust_states,
    "pytorch_lightning.trainer.connectors.accelerator_connector": lightning.adjust_connector,
    "torch.distributed._tools.fsdp2_mem_tracker": pytorch.adjust_tracker,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": pytorch.adjust_checkpoints,
    "transformers.modeling_utils": transformers.adjust_models,
}
"""By the module that is changed: what changes it, given the module and what to call with a line to print."""


def watch(told: Callable[[str], None]) -> None:
    """Adjust the client libraries that are imported, and others once they are.

    Args:
        told: called with each line that the user should read.
    """
    for name, adjust in ADJUSTED.items():
        if name in sys.modules:
            adjust(sys.modules[name], told)
    sys.meta_path.insert(0, _Finder(told))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: has the next finders' loader followed by an adjustment."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the other finders do, with a loader of ours for what is adjusted."""
        if fullname not in ADJUSTED:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, ADJUSTED[fullname], self._told)
                    return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(
        self,
        inner: importlib.abc.Loader,
        adjust: Callable[[ModuleType, Callable[[str], None]], None],
        told: Callable[[str], None],
    ) -> None:
        self._inner, self._adjust, self._told = inner, adjust, told

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # as others expect to find it
        self._adjust(module, self._told)
