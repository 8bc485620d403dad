"""The tensor inside a DTensor, and reading attributes of tensor subclasses without asking them.

Private torch API: `DTensor._local_tensor` and `._spec` (placements, shape and dtype, which `.data = ` leaves as they
were), `Tensor._base`, `._is_view`, `._version`, `._backward_hooks`, `._post_accumulate_grad_hooks`,
`torch._C.DisableTorchFunctionSubclass`, `_disabled_torch_function_impl`.
The public alternatives are `DTensor.to_local()`, which makes a new tensor object at each call and takes 5 us, so that
identity could not be checked every step; and plain attribute access, 2 us in place of 0.1 where a class has a
`__torch_function__`. `tests/test_private_api.py` says when one goes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

plain_access = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not asked."""
plain_call: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""What a `__torch_function__` calls to have the operation done as usual."""

_grad: Any = torch.Tensor.grad  # the descriptors
read_grad: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
"""`tensor.grad` within `plain_access`, past a subclass's own property."""
write_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
delete_grad: Callable[[torch.Tensor], None] = _grad.__delete__
_of_tensor: Any = torch.Tensor
# More of the same kind, for those who ask in every step: C functions, to be mapped over many tensors.
read_requires_grad: Callable[[torch.Tensor], bool] = _of_tensor.requires_grad.__get__
read_version: Callable[[torch.Tensor], int] = _of_tensor._version.__get__
read_layout: Callable[[torch.Tensor], torch.layout] = _of_tensor.layout.__get__
read_dtype: Callable[[torch.Tensor], torch.dtype] = _of_tensor.dtype.__get__
read_device: Callable[[torch.Tensor], torch.device] = _of_tensor.device.__get__
read_is_meta: Callable[[torch.Tensor], bool] = _of_tensor.is_meta.__get__
read_hooks: Callable[[torch.Tensor], Any] = _of_tensor._backward_hooks.__get__
read_post_hooks: Callable[[torch.Tensor], Any] = _of_tensor._post_accumulate_grad_hooks.__get__
_data: Any = torch.Tensor.data
read_data: Callable[[torch.Tensor], torch.Tensor] = _data.__get__
write_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__


local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor inside a `DTensor` or a `FlatShard`: the very object, to tell whether it was replaced."""


def inside(tensor: Any) -> torch.Tensor:
    """The very tensor inside a `DTensor` or a `FlatShard`, whose sizes are those of the whole; a plain one itself."""
    plain: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return plain


def set_local(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Make a `DTensor` or a `FlatShard` a view of `local`, of the same shape and dtype."""
    parameter._local_tensor = local  # type: ignore[attr-defined]


def become(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Make a `DTensor` or a `FlatShard` what `value`, split as it is, shows: local tensor, dtype and device."""
    with plain_access(), torch.no_grad():
        write_data(parameter, value.detach())
    if isinstance(parameter, DTensor):
        parameter._spec = value._spec  # type: ignore[attr-defined]
    set_local(parameter, local_of(value).detach())


def keep_mesh(made: Any, of: Any) -> None:
    """Let a `DTensor` that was made of another lie on the mesh object of that one; nothing for other tensors.

    torch remembers how an operation splits its result by meshes that are equal, which those of other groups of the
    same ranks are: the result may lie on one whose group is another, or was destroyed.
    """
    if not isinstance(made, DTensor) or not isinstance(of, DTensor):
        return
    mesh = of._spec.mesh
    if made._spec.mesh is not mesh and made._spec.mesh == mesh:
        made._spec = copy.copy(made._spec)
        made._spec.mesh = mesh


def local_part(tensor: Any) -> torch.Tensor:
    """What this rank has of a tensor that may be a `DTensor`, detached; a plain tensor is all there."""
    found: Any = tensor.detach()
    local: torch.Tensor = found._local_tensor if isinstance(found, DTensor) else found
    return local


def plain_tensors(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors inside a tensor of any class, at any depth: the very objects. A plain one is its own."""
    if hasattr(tensor, "_local_tensor"):  # a DTensor, a FlatShard
        return plain_tensors(tensor._local_tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [plain for one in inner for plain in plain_tensors(one)]
    return [tensor]


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors begin at one address of one storage: empty ones have no address of their own."""
    if one.device != other.device or one.data_ptr() != other.data_ptr():
        return False
    return bool(one.numel()) or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


is_view: Callable[[torch.Tensor], bool] = _of_tensor._is_view
"""Whether autograd knows a tensor as a view of another one, `view_base`."""


def view_base(plain: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `plain` was made a view of, which it keeps alive, memory and all; None if it is no view."""
    return plain._base


def around_local(wrapper: Any) -> torch.Tensor:
    """A `DTensor` or a `FlatShard` around the same local tensor, which says the device that this is on now."""
    names, facts = wrapper.__tensor_flatten__()
    inside = {name: getattr(wrapper, name) for name in names}
    made: torch.Tensor = type(wrapper).__tensor_unflatten__(inside, facts, wrapper.shape, wrapper.stride())
    return made.detach()


def follow_local(tensor: torch.Tensor) -> None:
    """Let a `DTensor` or a `FlatShard` say the device that the tensor inside it is on now; nothing for others."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None and tensor.device != local.device:
        with plain_access(), torch.no_grad():
            write_data(tensor, around_local(tensor))
