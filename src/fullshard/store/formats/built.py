"""The results of decoding a pickle (`pickled.py`): plain values, and records of tensors, classes and calls.

Nothing here imports a module, calls anything that a pickle names, or allocates more than its arguments take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Global:
    """A class or function that a pickle names."""

    name: str


@dataclass(eq=False)
class Call:
    """A call in a pickle, recorded but never executed.

    Attributes:
        name: dotted name of the class or function.
        arguments: its arguments.
        state: the state to set on the result, usually a dict of attributes; None: none is set.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def attribute(self, name: str) -> Any:
        """An attribute's value in the state, which is a dict or a pair (dict, slots); None if it is absent."""
        for part in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(part, dict) and name in part:
                return part[name]
        return None


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: a strided view of a record. Offsets, sizes and strides in elements.

    Attributes:
        key: the record's name.
        numel: the record's size.
    """

    key: str
    numel: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """One rank's part of a tensor that is split over several files.

    Attributes:
        shape, dtype: of the whole tensor.
        parts: the rectangles in this file: offsets and sizes on every dim, and the tensor that holds the elements.
        world: the number of parts in all files.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], Stored], ...]
    world: int


@dataclass(frozen=True)
class Storage:
    """A record that tensors are views of; dtype None: untyped bytes, whose dtype each tensor gives."""

    key: str
    numel: int
    dtype: torch.dtype | None


def checked_key(key: Any) -> Any:
    """A dict key or set item of a plain type: hashing nested containers could take forever."""
    if type(key) not in (str, int, float, bool, bytes, type(None)):
        raise TypeError(f"a key of type {type(key).__name__}")
    return key


def build(function: Any, arguments: tuple[Any, ...]) -> Any:
    """The result of calling one of `BUILDERS`; a `Call` for any other function."""
    if not isinstance(function, Global):
        return Call("(something that is not a class or function)", arguments)
    builder = BUILDERS.get(function.name)
    return Call(function.name, arguments) if builder is None else builder(*arguments)


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
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError("a tensor with an invalid shape, stride or offset")
    return Stored(storage.key, numel, dtype, offset, shape, stride)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}


def _text(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("utf-8", "latin1"):  # Python imports a module of the encoding's name
        raise ValueError("bytes in an unsupported encoding")
    return text.encode(encoding)


_PLAIN_CLASSES = (
    "torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
)  # fmt: skip


def _from_type(function: Any, cls: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor with Python attributes, or of a subclass: attributes of PyTorch's own classes are dropped."""
    if isinstance(cls, Global) and cls.name in _PLAIN_CLASSES:
        return build(function, tuple(arguments))
    return Call(cls.name if isinstance(cls, Global) else "(a tensor's class)", tuple(arguments), state)


BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda _factory=None, pairs=(): _ordered(pairs),
    "collections.Counter": _ordered,
    "torch.Size": tuple,
    "torch.device": lambda kind="cpu", index=None: kind if index is None else f"{kind}:{index}",
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "_codecs.encode": _text,
    **dict.fromkeys(("builtins.set", "__builtin__.set"), lambda items=(): set(map(checked_key, items))),
    **dict.fromkeys(
        ("builtins.frozenset", "__builtin__.frozenset"), lambda items=(): frozenset(map(checked_key, items))
    ),
    **dict.fromkeys(("builtins.complex", "__builtin__.complex"), complex),
}
"""The functions whose calls are evaluated, by the name that a pickle uses."""

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_TYPED = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
STORAGES: dict[str, torch.dtype | None] = {
    **{f"torch.{name}Storage": dtype for name, dtype in _TYPED.items()},
    "torch.storage.UntypedStorage": None,
}
