"""Parameters that were added to a root's modules after they were sharded: a new head, adapters.

They belong to no unit, so every rank would train its own copy. PyTorch's global registration hooks count new
parameters and modules, at no cost to a step; parameters without a unit are searched for only when the count changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..forms import owner_of, successor_of
from ..text import clean_name
from .messages import added_parameters


class _Registrations:
    """Counts the parameters and modules registered on any module of this process."""

    count = 0
    installed = False

    @classmethod
    def install(cls) -> None:
        if not cls.installed:
            cls.installed = True
            register_module_parameter_registration_hook(cls._count)
            register_module_module_registration_hook(cls._count)

    @classmethod
    def _count(cls, module: nn.Module, name: str, registered: Any) -> None:
        cls.count += 1


class Additions:
    """Finds parameters under the given modules that belong to no unit.

    Args:
        modules: the root's modules; held weakly.
        ignored: returns the ids of the parameters to leave alone.
        rank: this rank, for errors.
    """

    def __init__(self, modules: Sequence[nn.Module], ignored: Callable[[], frozenset[int]], rank: int) -> None:
        _Registrations.install()
        self._modules = [weakref.ref(module) for module in modules]
        self._ignored, self._rank = ignored, rank
        self._seen = -1
        self._frozen: list[weakref.ref[nn.Parameter]] = []  # in no unit: refused once they train

    @property
    def changed(self) -> bool:
        """Whether anything has been registered on any module since the last check."""
        return self._seen != _Registrations.count

    def check(self) -> None:
        """Refuse trainable parameters added since the last check, and frozen ones that have become trainable.

        Costs nothing if nothing was registered and every frozen parameter belongs to a unit.

        Raises:
            PhaseError: such parameters exist; names them.
        """
        if not self.changed and not (self._frozen and self._trains_now()):
            return
        ignored, added, frozen = self._ignored(), [], []
        for ref in self._modules:
            module = ref()
            for name, parameter in module.named_parameters() if module is not None else ():
                if id(parameter) in ignored or owner_of(successor_of(parameter)) is not None:
                    continue
                if not parameter.requires_grad:
                    frozen.append(weakref.ref(parameter))
                elif not torch.nn.parameter.is_lazy(parameter):
                    added.append(clean_name(name))
        if added:
            raise added_parameters(added, self._rank)
        self._seen = _Registrations.count
        self._frozen = frozen

    def _trains_now(self) -> bool:
        """Whether a parameter that belongs to no unit and was frozen at the last check is trainable now."""
        return any([p is not None and p.requires_grad for ref in self._frozen for p in [ref()]])
