"""What the calls in a pickle are known to give: dicts, tuples, numbers, and where in a file a tensor lies.

Nothing here imports anything, calls what it is given, or makes more than it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Named:
    """A class or function that a pickle names."""

    name: str


@dataclass(eq=False)
class Made:
    """What a pickle would make by calling `name`: never called.

    Attributes:
        name: dotted, of the class or function.
        given: the arguments.
        state: what its attributes would be set to, usually a dict; None: not said.
        items: what would be put into it as a dict or list.
    """

    name: str
    given: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def attribute(self, name: str) -> Any:
        """An attribute's value; None where the state does not have it. A (dict, slots) pair is looked through."""
        for part in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(part, dict) and name in part:
                return part[name]
        return None


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: a view of a record's elements. Offsets, strides and sizes in elements.

    Attributes:
        key: of the record.
        numel: of the record.
    """

    key: str
    numel: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """One rank's part of a tensor whose elements several files hold.

    Attributes:
        shape, dtype: of the whole tensor.
        parts: what this file holds: for each rectangle the offset and size of every dim, and where it is.
        world: ranks that hold parts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], Stored], ...]
    world: int


@dataclass(frozen=True)
class Storage:
    """A record that tensors are views of; dtype None: bytes, of which the tensor says the dtype."""

    key: str
    numel: int
    dtype: torch.dtype | None


def key_of(one: Any) -> Any:
    """What may be a key: hashing what is nested could take for ever."""
    if type(one) not in (str, int, float, bool, bytes, type(None)):
        raise TypeError(f"a key that is a {type(one).__name__}")
    return one


def build(function: Any, given: tuple[Any, ...]) -> Any:
    """What calling a named function is known to give; a `Made` for all others."""
    if not isinstance(function, Named):
        return Made("(something that is no name)", given)
    known = BUILDERS.get(function.name)
    return Made(function.name, given) if known is None else known(*given)


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> Stored:
    _, _, metadata, *_ = (*rest, None, None, None)
    if metadata:  # {"conj": True}: the elements are not the values
        raise ValueError("a tensor that is a conjugated or negated view: save its resolve_conj().resolve_neg()")
    if storage.dtype is None:
        raise ValueError("a tensor of bytes without a dtype")
    return _stored(storage, storage.numel, storage.dtype, offset, shape, stride)


def _tensor_of_bytes(
    storage: Storage, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Stored:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    size = 1 if storage.dtype is None else storage.dtype.itemsize
    return _stored(storage, storage.numel * size // dtype.itemsize, dtype, offset, shape, stride)


def _stored(storage: Storage, numel: int, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Stored:
    shape, stride = tuple(shape), tuple(stride)
    whole = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(one) is not int or not 0 <= one < 2**63 for one in whole):
        raise ValueError("a tensor without shape, stride or offset")
    return Stored(storage.key, numel, dtype, offset, shape, stride)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    return {key_of(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}


def _default(_factory: Any = None, pairs: Any = ()) -> dict[Any, Any]:
    return _ordered(pairs)


def _text(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("utf-8", "latin1"):  # others' names would be looked for among Python's modules
        raise ValueError("bytes of an unknown encoding")
    return text.encode(encoding)


def _of_type(function: Any, _kind: Any, given: tuple[Any, ...], state: Any) -> Any:
    """A tensor of a class of its own, or with attributes: plain where the class is one of PyTorch's plain ones."""
    if isinstance(_kind, Named) and _kind.name in ("torch.Tensor", "torch._tensor.Tensor", *_PARAMETERS):
        return build(function, tuple(given))
    return Made(_kind.name if isinstance(_kind, Named) else "(a tensor's class)", tuple(given), state)


_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")

BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _default,
    "collections.Counter": _ordered,
    "torch.Size": tuple,
    "torch.device": lambda kind="cpu", index=None: kind if index is None else f"{kind}:{index}",
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "_codecs.encode": _text,
    **{f"{module}.set": lambda items=(): set(map(key_of, items)) for module in ("builtins", "__builtin__")},
    **{f"{module}.frozenset": lambda items=(): frozenset(map(key_of, items)) for module in ("builtins", "__builtin__")},
    **{f"{module}.complex": complex for module in ("builtins", "__builtin__")},
}
"""What is built, by name."""

DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}

_OLD = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
STORAGES: dict[str, torch.dtype | None] = {
    **{f"torch.{name}Storage": dtype for name, dtype in _OLD.items()},
    "torch.storage.UntypedStorage": None,
}
