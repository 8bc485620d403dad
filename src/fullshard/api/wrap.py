"""Which modules of a model become units."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ConfigError

logger = logging.getLogger("fullshard")

WrapPolicy = Callable[..., bool]
"""`policy(module, recurse, nonwrapped_numel) -> bool`, as PyTorch's wrap policies."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: in every `ModuleList` or `Sequential` with at least two modules of one class,
    the modules of the class that holds most parameters. Outermost lists only; containers are looked through.

    Returns:
        The blocks in module order; empty if the model repeats nothing.
    """
    found: list[nn.Module] = []
    _search(model, found, set())
    return found


def _search(module: nn.Module, found: list[nn.Module], seen: set[int]) -> None:
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        blocks = _blocks_of(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        if blocks:
            found.extend(blocks)
            continue
        _search(child, found, seen)


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    """The repeated class' modules in one list, unless they are bare layers or hold next to nothing."""
    candidates = [m for m in container.children() if any(True for _ in m.children()) and _numel(m)]
    classes = Counter(type(m) for m in candidates)
    repeated = [cls for cls, count in classes.items() if count >= 2]
    if not repeated:
        return []
    best = max(repeated, key=lambda cls: sum(_numel(m) for m in candidates if type(m) is cls))
    return [m for m in candidates if type(m) is best]


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def modules_to_wrap(model: nn.Module, policy: Any) -> list[nn.Module]:
    """The submodules of `model` that `policy` makes units, innermost first; `model` itself is not among them.

    Args:
        model: the model to be sharded.
        policy: "auto" (the repeated blocks), a set of module classes, or a callable
            `policy(module=, recurse=, nonwrapped_numel=)` as PyTorch's wrap policies are.

    Raises:
        ConfigError: neither of these.
    """
    if policy == "auto":
        chosen = repeated_blocks(model)
        logger.info(
            "auto_wrap_policy: %d blocks become units: %s",
            len(chosen),
            ", ".join(f"{n} x {cls.__name__}" for cls, n in Counter(type(m) for m in chosen).items()) or "none found",
        )
        return chosen
    if isinstance(policy, (set, frozenset, tuple, list)):
        classes = tuple(policy)
        if not all(isinstance(cls, type) for cls in classes):
            raise ConfigError(f"auto_wrap_policy must hold module classes, got {policy!r}")
        return [m for m in _post_order(model) if isinstance(m, classes)]
    if callable(policy):
        chosen = []
        _wrap_recursively(model, policy, chosen)
        return chosen
    raise ConfigError(f'auto_wrap_policy must be "auto", a set of module classes or a callable, got {policy!r}')


def _post_order(model: nn.Module) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    for child in model.children():
        for module in (*_post_order(child), child):
            found.setdefault(id(module), module)
    return list(found.values())


def _wrap_recursively(module: nn.Module, policy: WrapPolicy, chosen: list[nn.Module]) -> int:
    """Ask the policy as PyTorch does: children first, each with the parameters that no unit has taken yet."""
    taken = 0
    for child in module.children():
        numel = _numel(child)
        if policy(module=child, recurse=True, nonwrapped_numel=numel):
            below = _wrap_recursively(child, policy, chosen)
            left = numel - below
            if policy(module=child, recurse=False, nonwrapped_numel=left):
                if child not in chosen:
                    chosen.append(child)
                below = numel
            taken += below
    return taken
