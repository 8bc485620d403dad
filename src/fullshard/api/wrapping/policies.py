"""Policies that say which submodules become instances, and `enable_wrap`/`wrap` for models that say so themselves.

Two kinds. A *callable* policy `policy(module, recurse, nonwrapped_numel) -> bool` is asked twice for each module:
with `recurse=True` on the way down, whether to look inside; with `recurse=False` on the way up, whether the module
becomes an instance of the parameters that none of its submodules took. A *class* policy (`ModuleWrapPolicy`,
`CustomPolicy`) is asked once for each module and may give arguments for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from . import messages


class ModuleWrapPolicy:
    """Every module of the given classes becomes an instance. Can be called as a callable policy too.

    Args:
        module_classes: module classes; their subclasses count.

    Raises:
        ConfigError: something in it is not a module class.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = _checked_classes(module_classes, "module_classes")

    @property
    def _module_classes(self) -> set[type[nn.Module]]:
        """The classes, under the name by which libraries read them."""
        return set(self._classes)

    def choose(self, module: nn.Module) -> dict[str, Any] | None:
        """Arguments for `module`'s instance (none of its own), or None: no instance."""
        return {} if isinstance(module, self._classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({{{', '.join(cls.__name__ for cls in self._classes)}}})"


class CustomPolicy:
    """A function says for each module whether it becomes an instance, and with which arguments.

    Args:
        lambda_fn: `lambda_fn(module)` returns False, True (the root's arguments), or a dict of arguments that
            replace the root's for this module.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def choose(self, module: nn.Module) -> dict[str, Any] | None:
        """Arguments that replace the root's for `module`'s instance, or None: no instance.

        Raises:
            ConfigError: the function returned something else than a bool or a dict.
        """
        answer = self._lambda_fn(module)
        if isinstance(answer, dict):
            return dict(answer)
        if not isinstance(answer, bool):
            raise messages.no_answer(type(module).__name__, answer)
        return {} if answer else None


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Callable policy: every module becomes an instance."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Callable policy: modules for which a function says so. Give the function with `functools.partial`.

    Args:
        module: the module asked about.
        recurse: on the way down: always True is returned.
        nonwrapped_numel: elements in its parameters that no submodule took; not looked at.
        lambda_fn: `lambda_fn(module)`: whether it becomes an instance.
    """
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Callable policy: modules of the given classes. Give the classes with `functools.partial`.

    Args:
        module: the module asked about.
        recurse: on the way down: always True is returned.
        nonwrapped_numel: elements in its parameters that no submodule took; not looked at.
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
    """Callable policy: modules that still hold many elements once their submodules have taken theirs.

    Args:
        module: the module asked about.
        recurse: True: whether to look inside; False: whether it becomes an instance.
        nonwrapped_numel: elements in its parameters that no submodule took.
        min_num_params: at least so many elements make an instance. Default 100 million.
        force_leaf_modules: classes that are not looked into. None: `size_based_auto_wrap_policy.FORCE_LEAF_MODULES`,
            `{nn.MultiheadAttention}`.
        exclude_wrap_modules: classes that never become instances themselves. None:
            `size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES`, `{nn.ModuleList, nn.ModuleDict}`.
    """
    if nonwrapped_numel < min_num_params:
        return False
    own: Any = size_based_auto_wrap_policy
    if recurse:
        refused = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        refused = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(refused))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Callable policy: any of `policies` says so, each asked with the same arguments."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


_wrapping: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("wrapping", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap(module)` returns `wrapper_cls(module, **wrapper_kwargs)`; what held before holds again after it.

    May be nested, which PyTorch's may not: the innermost one counts. Each thread and task has its own.

    Args:
        wrapper_cls: called with a module and keyword arguments; returns the module to use instead.
        **wrapper_kwargs: arguments for each call.

    Raises:
        ConfigError: `wrapper_cls` cannot be called.
    """
    if not callable(wrapper_cls):
        raise messages.wrapper_not_callable(wrapper_cls)
    before = _wrapping.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(before)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """`module` wrapped as the `enable_wrap` around this call says; outside of any, `module` itself.

    Args:
        module: the module.
        **wrap_overrides: arguments that replace or add to those given to `enable_wrap`.
    """
    current = _wrapping.get()
    if current is None:
        return module
    wrapper_cls, kwargs = current
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})


def _checked_classes(given: Any, argument: str) -> tuple[type[nn.Module], ...]:
    classes = tuple(given) if isinstance(given, Iterable) else (given,)
    for cls in classes:
        if not isinstance(cls, type):
            raise messages.not_module_classes(argument, cls)
    return tuple(dict.fromkeys(classes))
