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

from ..errors import PhaseError
from ..names import clean_name
from ..shard import owner_of, successor_of


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

    def check(self) -> None:
        """Refuse trainable parameters that were added since the last check. Costs nothing if nothing was registered.

        Raises:
            PhaseError: names them.
        """
        if self._seen == _Registrations.count:
            return
        ignored, found = self._ignored(), []
        for ref in self._modules:
            module = ref()
            for name, parameter in module.named_parameters() if module is not None else ():
                if parameter.requires_grad and id(parameter) not in ignored:
                    if owner_of(successor_of(parameter)) is None and not torch.nn.parameter.is_lazy(parameter):
                        found.append(clean_name(name))
        if found:
            raise PhaseError(
                "Parameters were added to a sharded model, and no unit has them: ranks would train them apart.",
                parameter=", ".join(found),
                rank=self._rank,
                remedy="apply fully_shard to the module that holds them, or add them before the model is sharded; "
                "freeze them, or name them in ignored_params, to leave them alone",
            )
        self._seen = _Registrations.count
