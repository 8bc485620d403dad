"""A hook on a tensor's gradient, without the handle that would remove it.

Private torch API: `Tensor._backward_hooks` and `Node._register_hook_dict`, which is what `Tensor.register_hook` is made
of. The public alternative is `Tensor.register_hook`, which takes 4 us where this takes 1.5, twice per unit and step,
and which is what is used where these are missing. `tests/test_private_api.py` says when they go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

HAS_HOOK_DICT = hasattr(torch.Tensor, "_backward_hooks") and hasattr(torch.autograd.graph.Node, "_register_hook_dict")
_OURS = -1  # a key that no handle of torch's has: they count from 0


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook(gradient)` when `tensor`, which requires a gradient, gets its own in a backward."""
    node: Any = tensor.grad_fn
    if node is not None and HAS_HOOK_DICT and tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict(((_OURS, hook),))
        node._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


def join(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> bool:
    """Call `hook(gradient)` right before the one that `on_gradient` put on this tensor, as it is now, by itself.

    Returns:
        Whether there is one, and it was not joined before; else nothing was done.
    """
    hooks: Any = HAS_HOOK_DICT and tensor._backward_hooks  # None after a change in place
    ours = hooks and hooks.get(_OURS)
    if not ours or type(ours) is partial:
        return False
    hooks[_OURS] = partial(_both, hook, ours)
    return True


def _both(first: Callable[..., Any], second: Callable[..., Any], gradient: torch.Tensor) -> None:
    first(gradient)
    second(gradient)


def hooks_of(tensor: torch.Tensor) -> Any:
    """The hooks on a tensor's gradient, to which one can be added after the tensor was changed in place; or None."""
    return tensor._backward_hooks if HAS_HOOK_DICT else None


def on_gradient_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """As `on_gradient`, before all other hooks on `tensor`; returns what takes the hook back."""
    handle = tensor.register_hook(hook)
    hooks: Any = hooks_of(tensor)
    if hooks is not None and len(hooks) > 1:
        del hooks[handle.id]
        put_first(hooks, hook, handle.id)
    return handle.remove


def put_first(hooks: Any, hook: Callable[[torch.Tensor], None], key: object = None) -> None:
    """Call `hook(gradient)` before all other hooks in `hooks`, which are somebody's `hooks_of`."""
    others = list(hooks.items())  # autograd goes by the order of insertion, not by `OrderedDict`'s own
    hooks.clear()
    hooks[object() if key is None else key] = hook
    hooks.update(others)
