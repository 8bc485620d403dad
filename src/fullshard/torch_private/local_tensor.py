"""The local tensor inside a DTensor, and attribute access that bypasses `__torch_function__` of tensor subclasses.

Private torch API: `DTensor._local_tensor` and `._spec` (placements, shape and dtype, which `.data = ` does not change),
`DTensor.__new__` with these two (`with_spec`; `DTensor.from_local` is the public alternative, and takes longer),
`Tensor._base`, `._is_view`, `._version`, `._backward_hooks`, `._post_accumulate_grad_hooks`,
`torch._C.DisableTorchFunctionSubclass`, `_disabled_torch_function_impl`, and that tensors of `_make_wrapper_subclass`
raise a RuntimeError for the address of their storage.
The public alternatives are `DTensor.to_local()`, which makes a new tensor object at each call and takes 5 us, so that
identity could not be checked every step; and plain attribute access, 2 us instead of 0.1 if a class has a
`__torch_function__`. `tests/test_private_api.py` fails when one is gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .fake_tensors import is_fake

plain_access = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called."""
plain_call: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""Runs the operation as usual, called from within a `__torch_function__`."""

_grad: Any = torch.Tensor.grad  # the descriptors
read_grad: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
"""`tensor.grad`, bypassing a subclass's own property; use within `plain_access`."""
write_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
delete_grad: Callable[[torch.Tensor], None] = _grad.__delete__
_of_tensor: Any = torch.Tensor
# More of the same, for use in every step: C functions, to be mapped over many tensors.
read_requires_grad: Callable[[torch.Tensor], bool] = _of_tensor.requires_grad.__get__
read_version: Callable[[torch.Tensor], int] = _of_tensor._version.__get__
read_dtype: Callable[[torch.Tensor], torch.dtype] = _of_tensor.dtype.__get__
read_device: Callable[[torch.Tensor], torch.device] = _of_tensor.device.__get__
read_is_meta: Callable[[torch.Tensor], bool] = _of_tensor.is_meta.__get__
read_hooks: Callable[[torch.Tensor], Any] = _of_tensor._backward_hooks.__get__
read_post_hooks: Callable[[torch.Tensor], Any] = _of_tensor._post_accumulate_grad_hooks.__get__
_data: Any = torch.Tensor.data
read_data: Callable[[torch.Tensor], torch.Tensor] = _data.__get__
write_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__


local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor inside a `DTensor` or a `FlatShard`: the object itself, to detect replacement by identity."""

spec_of: Callable[[Any], Any] = attrgetter("_spec")
"""The mesh, placements, shape, stride and dtype of a `DTensor`."""


with_spec: Callable[[torch.Tensor, Any], DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)
"""A `DTensor` of a local tensor and its specification that requires no gradient: a third of the constructor's time.

`DTensor.__init__` does nothing, but is wrapped in decorators.
"""


def inside(tensor: Any) -> torch.Tensor:
    """The local tensor inside a `DTensor` or a `FlatShard`, the object itself; a plain tensor is returned unchanged."""
    plain: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return plain


def set_local(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Make a `DTensor` or a `FlatShard` a view of `local`, of the same shape and dtype."""
    parameter._local_tensor = local  # type: ignore[attr-defined]


def become(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a `DTensor` or a `FlatShard` the local tensor, dtype and device of `value`, which is split the same way."""
    with plain_access(), torch.no_grad():
        write_data(parameter, value.detach())
    if isinstance(parameter, DTensor):
        parameter._spec = value._spec  # type: ignore[attr-defined]
    set_local(parameter, local_of(value).detach())


def keep_mesh(result: Any, of: Any) -> None:
    """Put a `DTensor` on the mesh object of the `DTensor` from which it was made; do nothing for other tensors.

    torch caches the specification of an operation's result by equality of meshes. Meshes with different groups of the
    same ranks are equal, so the result may be on a mesh whose group differs or was destroyed.
    """
    if not isinstance(result, DTensor) or not isinstance(of, DTensor):
        return
    mesh = of._spec.mesh
    if result._spec.mesh is not mesh and result._spec.mesh == mesh:
        result._spec = copy.copy(result._spec)
        result._spec.mesh = mesh


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, detached: the local tensor of a `DTensor`; all of a plain tensor."""
    detached: Any = tensor.detach()
    local: torch.Tensor = detached._local_tensor if isinstance(detached, DTensor) else detached
    return local


def plain_tensors(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors inside a tensor of any class, at any depth: the objects themselves; for a plain one itself.

    Of a class that has no memory and does not list its inner tensors: those among its attributes.
    """
    if hasattr(tensor, "_local_tensor"):  # a DTensor, a FlatShard
        return plain_tensors(tensor._local_tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif has_memory(tensor):
        return [tensor]
    else:
        inner = [value for value in tensor.__dict__.values() if isinstance(value, torch.Tensor)]
    return [plain for part in inner for plain in plain_tensors(part)]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory itself, as those of `_make_wrapper_subclass` have not. Fake ones count as if."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or is_fake(tensor):
        return True
    try:
        with plain_access():
            tensor.untyped_storage().data_ptr()
    except RuntimeError:  # "invalid python storage"
        return False
    return True


def shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two plain tensors are views of one storage, even an empty one; False if either is of a subclass."""
    plain = type(first) is type(second) is torch.Tensor
    return plain and first.untyped_storage()._cdata == second.untyped_storage()._cdata


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two plain tensors begin at the same address of the same storage. Empty tensors: the same storage."""
    if first.device != second.device or first.data_ptr() != second.data_ptr():
        return False
    return bool(first.numel()) or first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


is_view: Callable[[torch.Tensor], bool] = _of_tensor._is_view
"""Whether autograd knows a tensor as a view of another tensor, its `view_base`."""


def view_base(plain: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which `plain` is a view, and which it keeps alive with its memory; None if it is not a view."""
    return plain._base


def around_local(wrapper: Any) -> torch.Tensor:
    """A new `DTensor` or `FlatShard` around the same local tensor, with that tensor's current device."""
    names, facts = wrapper.__tensor_flatten__()
    inside = {name: getattr(wrapper, name) for name in names}
    unflattened = type(wrapper).__tensor_unflatten__(inside, facts, wrapper.shape, wrapper.stride())
    result: torch.Tensor = unflattened.detach()
    keep_mesh(result, wrapper)
    return result


def follow_local(tensor: torch.Tensor) -> None:
    """Update the device of a `DTensor` or a `FlatShard` to its local tensor's; do nothing for other tensors."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None and tensor.device != local.device:
        with plain_access(), torch.no_grad():
            write_data(tensor, around_local(tensor))
