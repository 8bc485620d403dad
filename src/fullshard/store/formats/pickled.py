"""Decode a pickle as data, without executing it.

Python's unpickler imports and calls whatever a pickle names. `torch.load(weights_only=True)` has a list of safe
functions, but these still let a file of a few bytes allocate any amount of memory (`bytearray(10**12)`), and the list
excludes the classes in which other libraries wrap their tensors. Here nothing that a pickle names is imported or
called:

    collections.OrderedDict, torch.Size, ...      become dicts, tuples: see `BUILDERS`
    torch._utils._rebuild_tensor_v2(...)          becomes a `Stored`: the tensor's position in the file
    any other class or function                   becomes a `Call`: its name and arguments

Memory is bounded by the pickle's size. The standard library's `pickletools` decodes the opcodes, and checks
every length against the bytes that are present.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from ..pickles import HUGE, refuse_alike

LARGEST = 128 * 2**20  # bytes of a pickle; one with 100,000 tensors takes about 20 MiB


def decode(data: bytes, file: str) -> Any:
    """Decode a pickle into dicts, lists, tuples, numbers, strings, bytes, `Stored`, `Global` and `Call`.

    Args:
        data: the pickle.
        file: its name, for error messages.

    Raises:
        CheckpointError: it is damaged or not a pickle, or uses an opcode that no checkpoint needs.
    """
    if len(data) > LARGEST:
        raise CheckpointError(f"{file}: the pickle is too large for a checkpoint.", expected=LARGEST, got=len(data))
    machine = _Machine(file, len(data))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        (root,) = machine.stack
    except CheckpointError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file}: the pickle is damaged ({type(error).__name__}: {error}).") from error
    return root


# The results: plain values, and records of tensors, classes and calls.


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


# The decoder.


class _Machine:
    """The stack machine whose programs are pickles.

    Args:
        file: its name, for error messages.
        size: of the pickle, in bytes. Calls may copy at most twice as many elements: a pickle can pass the same list to
            many calls at a few bytes each.
    """

    def __init__(self, file: str, size: int) -> None:
        self._file = file
        self._copies_left, self._huge = 2 * size, 0
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode, named as in `pickletools`."""
        if name in _VALUES:
            if type(argument) is int and abs(argument) >= HUGE:
                self._huge += 1
                refuse_alike(self._huge)
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _HANDLERS:
            _HANDLERS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise CheckpointError(
                f"{self._file}: the pickle uses {name}, an opcode that no checkpoint needs.", topic="not-plain-values"
            )

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._marks.pop()
        return items

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def put(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def push_dict(self, items: list[Any]) -> None:
        self.stack.append({})
        self.set_items(items)

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise IndexError("too few items on the stack")
        self.stack[-count:] = [items]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(map(checked_key, items))
        elif not isinstance(target, Call):
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, dict):
            target.update((checked_key(key), value) for key, value in pairs)
        elif not isinstance(target, Call):
            raise TypeError(f"items set in a {type(target).__name__}")

    def push_global(self, argument: str) -> None:
        name = argument.replace(" ", ".", 1)
        self.stack.append(DTYPES.get(name) or Global(name))

    def push_global_of_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a name that is not a string")
        self.push_global(f"{module} {name}")

    def call(self, keywords: Any = None) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError("arguments that are not a tuple")
        if keywords:
            arguments = (*arguments, keywords)
        self._copies_left -= sum(len(argument) for argument in arguments if hasattr(argument, "__len__"))
        if self._copies_left < 0:
            raise CheckpointError(f"{self._file}: the pickle copies the same elements over and over.")
        self.stack.append(build(function, arguments))

    def set_state(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Call):
            target.state = state  # attributes of other values (an OrderedDict's `_metadata`) are not needed

    def push_storage(self) -> None:
        kind, storage, key, _device, numel = self.stack.pop()
        if kind != "storage" or not isinstance(storage, Global) or storage.name not in STORAGES:
            name = f": {storage.name}" if isinstance(storage, Global) else ""
            raise CheckpointError(f"{self._file} refers to something other than a tensor's storage{name}.")
        if type(numel) is not int or numel < 0 or not isinstance(key, str):
            raise ValueError("a storage with an invalid name or size")
        self.stack.append(Storage(key, numel, STORAGES[storage.name]))


_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_HANDLERS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": lambda machine, _: machine.mark(),
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "DUP": lambda machine, _: machine.push(machine.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, index: machine.put(int(index))),
    "MEMOIZE": lambda machine, _: machine.put(),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine.get(int(index))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "DICT": lambda machine, _: machine.push_dict(machine.since_mark()),
    "FROZENSET": lambda machine, _: machine.push(frozenset(map(checked_key, machine.since_mark()))),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda machine, _: machine.extend(machine.since_mark())),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": _Machine.push_global,
    "STACK_GLOBAL": lambda machine, _: machine.push_global_of_stack(),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, _: machine.call()),
    "NEWOBJ_EX": lambda machine, _: machine.call(machine.stack.pop()),
    "BUILD": lambda machine, _: machine.set_state(),
    "BINPERSID": lambda machine, _: machine.push_storage(),
}
