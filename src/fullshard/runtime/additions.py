"""Parameters that were added to a root's modules after they were sharded: a new head, adapters.

No unit has them, so that every rank would train a copy of its own. That something was registered is noticed by torch's
own global hooks, at no cost to a step; which parameters no unit has is looked up then.
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
from ..names import clean_name
from .messages import added_parameters


class _Registrations:
    """Counts parameters and modules that were registered on any module of this process."""

    count = 0
    installed = False

    @classmethod
    def install(cls) -> None:
        if not cls.installed:
            cls.installed = True
            register_module_parameter_registration_hook(cls._noticed)
            register_module_module_registration_hook(cls._noticed)

    @classmethod
    def _noticed(cls, module: nn.Module, name: str, what: Any) -> None:
        cls.count += 1


class Additions:
    """Finds parameters under some modules that no unit has.

    Args:
        modules: of the root; held weakly.
        ignored: ids of parameters that were to be left alone.
        rank: for errors.
    """

    def __init__(self, modules: Sequence[nn.Module], ignored: Callable[[], frozenset[int]], rank: int) -> None:
        _Registrations.install()
        self._modules = [weakref.ref(module) for module in modules]
        self._ignored, self._rank = ignored, rank
        self._seen = -1
        self._frozen: list[weakref.ref[nn.Parameter]] = []  # that no unit has: refused once they train

    @property
    def changed(self) -> bool:
        """Whether anything was registered on any module since the last check."""
        return self._seen != _Registrations.count

    def check(self) -> None:
        """Refuse trainable parameters that were added since the last check, or frozen ones that train since.

        Costs nothing if nothing was registered and nothing that no unit has is frozen.

        Raises:
            PhaseError: names them.
        """
        if not self.changed and not self._trains_now():
            return
        ignored, found, frozen = self._ignored(), [], []
        for ref in self._modules:
            module = ref()
            for name, parameter in module.named_parameters() if module is not None else ():
                if id(parameter) in ignored or owner_of(successor_of(parameter)) is not None:
                    continue
                if not parameter.requires_grad:
                    frozen.append(weakref.ref(parameter))
                elif not torch.nn.parameter.is_lazy(parameter):
                    found.append(clean_name(name))
        if found:
            raise added_parameters(found, self._rank)
        self._seen = _Registrations.count
        self._frozen = frozen

    def _trains_now(self) -> bool:
        """Whether a parameter that was frozen at the last check, and that no unit has, is not any more."""
        return any([p is not None and p.requires_grad for ref in self._frozen for p in [ref()]])
