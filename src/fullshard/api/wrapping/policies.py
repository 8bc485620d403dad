"""Policies that choose the submodules to wrap, and `enable_wrap`/`wrap` for models that wrap their own submodules.

There are two kinds. A *callable* policy `policy(module, recurse, nonwrapped_numel) -> bool` is called twice for each
module: with `recurse=True` on the way down, to decide whether to look inside; with `recurse=False` on the way up, to
decide whether the module becomes an instance, with the parameters that none of its submodules has. A *class* policy
(`ModuleWrapPolicy`, `CustomPolicy`) is consulted once for each module and may return arguments for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from ...errors import invalid_argument
from . import messages


class ModuleWrapPolicy:
    """A policy that wraps every module of the given classes. Works as a callable policy too.

    Args:
        module_classes: module classes; their subclasses count.

    Raises:
        ConfigError: an entry is not a module class.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = _checked_classes(module_classes, "module_classes")

    @property
    def _module_classes(self) -> set[type[nn.Module]]:
        """The classes, under the attribute name that libraries read."""
        return set(self._classes)

    def choose(self, module: nn.Module) -> dict[str, Any] | None:
        """{} if `module` becomes an instance (with the root's arguments), else None."""
        return {} if isinstance(module, self._classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({{{', '.join(cls.__name__ for cls in self._classes)}}})"


class CustomPolicy:
    """A policy that calls a function for each module, to decide whether to wrap it and with which arguments.

    Args:
        lambda_fn: `lambda_fn(module)` returns False, True (the root's arguments), or a dict of arguments that
            override the root's for this module.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def choose(self, module: nn.Module) -> dict[str, Any] | None:
        """The arguments that override the root's if `module` becomes an instance, else None.

        Raises:
            ConfigError: the function returned neither a bool nor a dict.
        """
        answer = self._lambda_fn(module)
        if isinstance(answer, dict):
            return dict(answer)
        if not isinstance(answer, bool):
            raise messages.no_answer(type(module).__name__, answer)
        return {} if answer else None


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Callable policy that wraps every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Callable policy that wraps the modules for which a function returns True. Bind it with `functools.partial`.

    Args:
        module: the module to decide on.
        recurse: on the way down, where the result is always True.
        nonwrapped_numel: elements of its parameters that no submodule has; ignored.
        lambda_fn: `lambda_fn(module)` returns whether it becomes an instance.
    """
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Callable policy that wraps modules of the given classes. Bind them with `functools.partial`.

    Args:
        module: the module to decide on.
        recurse: on the way down, where the result is always True.
        nonwrapped_numel: elements of its parameters that no submodule has; ignored.
        transformer_layer_cls: module classes; their subclasses count.
    """
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Callable policy that wraps modules with many elements, not counting those of wrapped submodules.

    Args:
        module: the module to decide on.
        recurse: True: decide whether to look inside; False: decide whether it becomes an instance.
        nonwrapped_numel: elements of its parameters that no submodule has.
        min_num_params: the fewest elements that make an instance. Default 100 million.
        force_leaf_modules: classes whose submodules are never wrapped. None:
            `size_based_auto_wrap_policy.FORCE_LEAF_MODULES`, `{nn.MultiheadAttention}`.
        exclude_wrap_modules: classes that never become instances themselves. None:
            `size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES`, `{nn.ModuleList, nn.ModuleDict}`.
    """
    if nonwrapped_numel < min_num_params:
        return False
    defaults: Any = size_based_auto_wrap_policy
    if recurse:
        excluded = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        excluded = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Callable policy that returns True if any of `policies` does, each called with the same arguments."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


_wrapping: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("wrapping", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Context in which `wrap(module)` returns `wrapper_cls(module, **wrapper_kwargs)`.

    Unlike PyTorch's, it may be nested: the innermost counts. Each thread and task has its own.

    Args:
        wrapper_cls: called with a module and keyword arguments; returns the module to use instead.
        **wrapper_kwargs: arguments for each call.

    Raises:
        ConfigError: `wrapper_cls` is not callable.
    """
    if not callable(wrapper_cls):
        raise invalid_argument("enable_wrap(wrapper_cls=)", wrapper_cls, "a callable")
    token = _wrapping.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` as the enclosing `enable_wrap` says; without one, return `module` itself.

    Args:
        module: the module.
        **wrap_overrides: arguments that override or add to those of `enable_wrap`.
    """
    current = _wrapping.get()
    if current is None:
        return module
    wrapper_cls, kwargs = current
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})


def _checked_classes(module_classes: Any, argument: str) -> tuple[type[nn.Module], ...]:
    classes = tuple(module_classes) if isinstance(module_classes, Iterable) else (module_classes,)
    for cls in classes:
        if not isinstance(cls, type):
            raise invalid_argument(argument, cls, "module classes")
    return tuple(dict.fromkeys(classes))
