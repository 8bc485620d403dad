"""Which modules become units: policies, the plan that follows from a policy, and `wrap` for models that call it.

There are two kinds. A *callable* policy `policy(module, recurse, nonwrapped_numel) -> bool` is called twice for each
module: with `recurse=True` on the way down, to decide whether to look inside; with `recurse=False` on the way up, to
decide whether the module becomes an instance, with the parameters that none of its submodules has. A *class* policy
(`ModuleWrapPolicy`, `CustomPolicy`) is consulted once for each module and may return arguments for it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..errors import invalid_argument
from ..text import plain_class
from . import messages

logger = logging.getLogger("fullshard")

# Policies.


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


# The wrapping plan.

WrapPolicy = Callable[..., bool]
"""`policy(module, recurse, nonwrapped_numel) -> bool`, the signature of PyTorch's wrap policies."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the blocks that a model repeats: in every `ModuleList` or `Sequential` with at least two modules of the same
    class, all modules, of other classes too (layers may alternate). Does not search inside a list of blocks.

    Returns:
        The blocks in module order; empty if the model repeats nothing.
    """
    repeated = _blocks_of(model) if isinstance(model, nn.Sequential) else []
    if not repeated:
        _search(model, repeated, set())
    return repeated


def _search(module: nn.Module, repeated: list[nn.Module], seen: set[int]) -> None:
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        blocks = _blocks_of(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        if blocks:
            repeated.extend(blocks)
            continue
        _search(child, repeated, seen)


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    """The modules in a container that repeats a class; never bare layers or empty modules."""
    candidates = [m for m in container.children() if any(True for _ in m.children()) and _numel(m)]
    classes = Counter(type(m) for m in candidates)
    return candidates if max(classes.values(), default=0) > 1 else []


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


Planned = tuple[str, nn.Module, dict[str, Any]]
"""A submodule that becomes an instance: its qualified name, the module, and the arguments that override the root's."""


def plan_wrapping(
    module: nn.Module,
    policy: Any,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_parameters: Iterable[nn.Parameter] = (),
) -> list[Planned]:
    """List the submodules of `module` that become instances, innermost first. Changes nothing; the same on every rank.

    A module that is used in several places appears once, under its first name. `module` itself is not included.

    Args:
        module: the model.
        policy: "auto" (the repeated blocks), a set of module classes, a `ModuleWrapPolicy`, a `CustomPolicy`, or a
            callable `policy(module=, recurse=, nonwrapped_numel=)`; if a callable returns False for a module with
            `recurse=True`, it is not called for anything inside, nor for that module again. PyTorch's own policies are
            accepted.
        ignored_modules: do not become instances, nor does anything in them; their parameters do not count.
        ignored_parameters: do not count in `nonwrapped_numel`.

    Returns:
        (qualified name, module, arguments that override the root's) in the order in which to apply them.

    Raises:
        ConfigError: invalid `policy`, or `CustomPolicy`'s function returned an invalid value.
    """
    skipped = {id(inner) for outer in ignored_modules for inner in outer.modules()}
    uncounted = {id(p) for outer in ignored_modules for p in outer.parameters()} | {id(p) for p in ignored_parameters}
    names: dict[int, str] = {}
    for name, inner in module.named_modules():
        names.setdefault(id(inner), name)
    chosen: list[tuple[nn.Module, dict[str, Any]]] = []
    choose = _choice(module, policy)
    if choose is not None:
        choices = [(m, choose(m)) for m in module.modules() if id(m) not in skipped]
        answers = {id(m): answer for m, answer in choices if answer is not None}
        chosen = [(m, answers[id(m)]) for m in post_order(module) if id(m) in answers]
        if not answers:
            _warn_of_no_match(module, policy)
    else:
        chosen = [(m, {}) for m in _walk(module, policy, skipped, uncounted)]
        if not chosen and getattr(getattr(policy, "func", None), "__name__", "") == "transformer_auto_wrap_policy":
            _warn_of_no_match(module, policy)
    return [(names[id(m)], m, kwargs) for m, kwargs in chosen if m is not module]


def refuse_scripted(module: nn.Module) -> None:
    """Raise if `module` is, or contains, a ScriptModule with parameters: TorchScript has no place for sharded ones.

    It makes a new tensor at each access, so its parameters cannot be told apart to be ignored either.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule) and next(inner.parameters(), None) is not None:
            raise messages.scripted(name)


def _choice(model: nn.Module, policy: Any) -> Callable[[nn.Module], dict[str, Any] | None] | None:
    """The policy as a function of a module; None for a callable policy."""
    if isinstance(policy, str) and policy == "auto":
        blocks = repeated_blocks(model)
        logger.info(
            "auto_wrap_policy: %d blocks become units: %s",
            len(blocks),
            ", ".join(f"{n} x {cls.__name__}" for cls, n in Counter(type(m) for m in blocks).items()) or "none",
        )
        chosen = {id(block) for block in blocks}
        return lambda module: {} if id(module) in chosen else None
    if isinstance(policy, (set, frozenset, tuple, list)):
        if not all(isinstance(cls, type) for cls in policy):
            raise messages.not_classes(policy)
        return ModuleWrapPolicy(policy).choose
    if isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        return policy.choose
    if type(policy).__name__ == "CustomPolicy" and hasattr(policy, "_lambda_fn"):  # PyTorch's own, not callable
        return CustomPolicy(policy._lambda_fn).choose
    is_class = isinstance(policy, type)  # callable, but as a constructor
    if callable(policy) and not is_class:
        try:
            inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
        except TypeError:
            expected = "a function policy(module=, recurse=, nonwrapped_numel=), which returns a bool"
            remedy = "functools.partial(lambda_auto_wrap_policy, lambda_fn=...) takes a function of the module alone"
            raise invalid_argument("auto_wrap_policy", policy, expected, remedy) from None
        except ValueError:  # a function in C, which has no signature
            pass
        return None
    raise messages.not_a_policy(policy, is_class)


def _warn_of_no_match(model: nn.Module, policy: Any) -> None:
    """Warn that "auto", or a policy that names classes, matched nothing: the whole model becomes a single unit."""
    if isinstance(policy, CustomPolicy) or type(policy).__name__ == "CustomPolicy":
        return  # the user's function may reject every module
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if module is not model and any(True for _ in module.children()) and not isinstance(module, nn.ModuleList):
            sizes[plain_class(module).__name__] += _numel(module)
    largest = ", ".join(name for name, _ in sizes.most_common(8)) or "none with submodules"
    warnings.warn(messages.nothing_chosen(policy == "auto", plain_class(model).__name__, largest), stacklevel=5)


def post_order(model: nn.Module) -> list[nn.Module]:
    """All submodules of `model`, each once, children before parents; without `model` itself."""
    modules: dict[int, nn.Module] = {}
    for child in model.children():
        for module in (*post_order(child), child):
            modules.setdefault(id(module), module)
    return list(modules.values())


def _walk(model: nn.Module, policy: WrapPolicy, skipped: set[int], uncounted: set[int]) -> list[nn.Module]:
    """The submodules that a callable policy chooses, children first.

    Args:
        skipped: ids of modules that are not visited.
        uncounted: ids of parameters that do not count.
    """
    chosen: list[nn.Module] = []
    wrapped_numel: dict[int, int] = {}  # by id of a visited module: the elements in it that instances own now

    def visit(module: nn.Module) -> int:
        if id(module) in wrapped_numel:
            return wrapped_numel[id(module)]
        numel = sum(p.numel() for p in module.parameters() if id(p) not in uncounted)
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            wrapped = sum(visit(child) for child in module.children() if id(child) not in skipped)
            if module is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
                chosen.append(module)
                wrapped = numel
        wrapped_numel[id(module)] = wrapped
        return wrapped

    visit(model)
    return chosen
