"""A hook on a tensor's gradient, without the handle that would remove it.

Private torch API: `Tensor._backward_hooks` and `Node._register_hook_dict`, with which `Tensor.register_hook` is
implemented. The public alternative is `Tensor.register_hook`, which takes 4 us instead of 1.5, twice per unit and step.
`tests/test_private_api.py` fails when they are gone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

_OURS, _BEFORE = -1, -2  # keys that no handle of torch has: they count from 0
_NOTHING: Callable[[object], None] = deque[object](maxlen=0).append
"""Stands where `join` puts a hook: autograd calls hooks in the order in which they entered the dict."""


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook(gradient)` when `tensor`, which requires a gradient, gets its gradient in a backward.

    Of two calls for one tensor, the hook of the second is called first: a unit around another one returned its output.
    """
    node: Any = tensor.grad_fn
    hooks: Any = tensor._backward_hooks
    if node is not None and hooks is None:
        tensor._backward_hooks = OrderedDict(((_BEFORE, _NOTHING), (_OURS, hook)))
        node._register_hook_dict(tensor)
    elif hooks and hooks.get(_BEFORE) is _NOTHING:
        put_first(hooks, hook)
        put_first(hooks, hooks.pop(_BEFORE), _BEFORE)
    else:
        tensor.register_hook(hook)


def join(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> bool:
    """Call `hook(gradient)` immediately before the hook that `on_gradient` put on this tensor, in its current state.

    Returns:
        Whether there is such a hook, not yet joined with another; if not, nothing was done.
    """
    hooks: Any = tensor._backward_hooks  # None after an in-place change
    if not hooks or hooks.get(_BEFORE) is not _NOTHING:
        return False
    hooks[_BEFORE] = hook
    return True


def hooks_of(tensor: torch.Tensor) -> Any:
    """The hooks on a tensor's gradient, to which hooks can be added even after the tensor changes in place; or None."""
    return tensor._backward_hooks


def on_gradient_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Like `on_gradient`, but before all other hooks on `tensor`; returns a function that removes the hook."""
    handle = tensor.register_hook(hook)
    hooks: Any = hooks_of(tensor)
    if hooks is not None and len(hooks) > 1:
        del hooks[handle.id]
        put_first(hooks, hook, handle.id)
    return handle.remove


def put_first(hooks: Any, hook: Callable[[torch.Tensor], None], key: object = None) -> None:
    """Call `hook(gradient)` before all other hooks in `hooks`, the `hooks_of` some tensor."""
    rest = list(hooks.items())  # autograd uses the insertion order, not `OrderedDict`'s own
    hooks.clear()
    hooks[object() if key is None else key] = hook
    hooks.update(rest)
