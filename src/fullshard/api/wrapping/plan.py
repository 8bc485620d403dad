"""The wrapping plan: which modules of a model a policy makes units."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...names import plain_class
from . import messages
from .policies import CustomPolicy, ModuleWrapPolicy

logger = logging.getLogger("fullshard")

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
