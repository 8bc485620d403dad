"""Reads pickles as data: nothing in them is imported or called, and memory is bounded by their size.

Python's unpickler imports and calls whatever a pickle names, and a few bytes can make it allocate all memory, or hash
a nested key forever. `torch.load(weights_only=True)` has a list of safe functions, but these still let a small file
allocate any amount of memory (`bytearray(10**12)`), and the list excludes the classes in which other libraries wrap
their tensors. Here a pickle is read in two steps:

1. The scan finds every instruction without executing it, and allows only those that `pickle.dump` and `torch.save`
   write for metadata and tensors, with lengths and object numbers within the pickle. It replaces the instructions
   that call, set attributes or hash by references to objects outside of the pickle ("persistent ids").
2. Python's unpickler in C runs the rest. It asks `_Unpickler` for names and references, and nothing else.

    collections.OrderedDict, torch.Size, ...      become dicts, tuples: see `BUILDERS`
    torch._utils._rebuild_tensor_v2(...)          becomes a `PickledTensor`: the tensor's position in the file
    any other class or function                   becomes a `PickledName`
    any other call                                becomes a `PickledCall`: the name, the arguments, the state
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ..errors import CheckpointError
from .names import checked_shape
from .tree import DTYPES, HUGE, refuse_alike

LARGEST = 128 * 2**20  # bytes of a pickle in a file of torch.save; one with 100,000 tensors takes about 20 MiB


# The results: plain values, and records of tensors, names and calls.


@dataclass(frozen=True, slots=True)
class PickledName:
    """A class or function that a pickle names."""

    name: str


@dataclass(eq=False, repr=False, slots=True)
class PickledCall:
    """A call in a pickle, recorded but never executed.

    Attributes:
        name: dotted name of the class or function.
        arguments: its arguments.
        state: the state to set on the result, usually a dict of attributes; None: none is set.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes in the state, which is a dict or a pair (dict, slots)."""
        if type(self.state) is dict:
            return self.state
        return ChainMap(*(part for part in self.state if isinstance(part, dict)))

    def extend(self, items: list[Any]) -> None:
        """Items of a list's subclass are not needed: the class is refused."""


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A record that tensors are views of; dtype None: untyped bytes, whose dtype each tensor gives."""

    key: str
    numel: int
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class PickledTensor:
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


_SIZED = {str, bytes, tuple, list, dict, set, frozenset}
PLAIN_KEYS: frozenset[type] = frozenset((str, int, float, bool, bytes, type(None)))


def decode(data: bytes, file: str) -> Any:
    """Decode a pickle of `torch.save` into plain values and the records above.

    Args:
        data: the pickle.
        file: its name, for error messages.

    Raises:
        CheckpointError: it is damaged or not a pickle, or contains something that is not supported.
    """

    def storage(reference: Any) -> PickledStorage:
        kind, cls, key, _device, numel = reference
        name = cls.name if isinstance(cls, PickledName) else ""
        if kind != "storage" or name not in STORAGES:
            raise CheckpointError(f"{file} refers to something other than a tensor's storage{name and ': '}{name}.")
        if type(numel) is not int or numel < 0 or not isinstance(key, str):
            raise ValueError("a storage with an invalid name or size")
        return PickledStorage(key, numel, STORAGES[name])

    if len(data) > LARGEST:
        raise CheckpointError(f"{file}: the pickle is too large for a checkpoint.", expected=LARGEST, got=len(data))
    try:
        return read_pickle(data, named, storage)
    except CheckpointError:
        raise
    except UnsupportedError as error:
        raise CheckpointError(f"{file} is not supported: {error}.", topic="not-plain-values") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{file}: the pickle is damaged ({type(error).__name__}: {str(error)[:200]}).") from error


def named(module: str, name: str) -> Any:
    """The dtype of this name, or a record of it."""
    dtype = DTYPES.get(name) if module == "torch" else None
    return PickledName(f"{module}.{name}") if dtype is None else dtype


def read_pickle(
    data: bytes,
    find_class: Callable[[str, str], Any] = named,
    find_object: Callable[[Any], Any] | None = None,
    keys: frozenset[type] = PLAIN_KEYS,
) -> Any:
    """Scan and load a pickle.

    Args:
        find_class: returns a value for a module and a name; it is never called.
        find_object: returns an object outside the pickle; None: such references are refused.
        keys: types that keys of dicts may have.

    Raises:
        Exception: a damaged pickle may raise anything.
    """
    return _Unpickler(data, find_class, find_object, keys).load()


# The scan.


class UnsupportedError(pickle.UnpicklingError):
    """A valid pickle contains something that is not read, such as an instruction that no checkpoint needs."""


@functools.cache
def _fixed(octets: int, largest: int) -> re.Pattern[bytes]:
    """Matches instructions of fixed lengths; LONG_BINPUT up to a number with `largest` before its last `octets`."""
    return re.compile(
        rb"(?:"
        rb"[\x94(})\]t\x85\x86\x87aeN\x88\x89\x8f\x93Q01]"  # containers, constants, memoize, references, pop
        rb"|\x80."  # protocol
        rb"|[qhK].|M..|[Jj].{4}|G.{8}"  # put and get by short numbers, small ints, floats
        rb"|I0[01]\n|L-?\d{1,18}L?\n"  # protocol 1: booleans, ints
        rb"|r.{%d}[\x00-\x%02x]\x00{%d}"
        rb")*+" % (octets, largest, 3 - octets),
        re.DOTALL,
    )


_COUNTED = {  # instruction -> how many bytes encode the length of its data
    **dict.fromkeys((0x8C, 0x8A, ord("C")), 1),  # short text, int, short bytes
    **dict.fromkeys((ord("X"), ord("B"), 0x8B), 4),  # text, bytes, long int
}
_PUT, _GLOBAL, _STOP, _FRAME, _LONGS = ord("r"), ord("c"), ord("."), 0x95, (0x8A, 0x8B)
_CALL, _STATE, _ITEMS, _ADDED, _FROZEN = ord("R"), ord("b"), ord("u"), 0x90, 0x91
_REPLACED = {  # instruction -> others that put the tuple (target, operand, kind) on the stack, and refer to it
    _CALL: b"KR\x87Q",
    0x81: b"KR\x87Q",  # NEWOBJ
    0x92: b"\x86KR\x87Q",  # NEWOBJ_EX: the operand is (arguments, keywords)
    _STATE: b"Kb\x87Q",
    _ITEMS: b"tKu\x87Q",
    ord("s"): b"\x86Ku\x87Q",  # SETITEM
    _ADDED: b"tK\x90\x87Q",
    _FROZEN: b"tNK\x91\x87Q",
}
_HEADER = b"\x80\x04\x95"  # protocol, and a frame: the unpickler reads all of it at once


def look_through(data: bytes) -> bytearray:
    """Scan a pickle, and return the one to load; see the module's docstring.

    Raises:
        pickle.UnpicklingError: it has an instruction that is not allowed, or no end.
        ValueError: see `refuse_alike`.
    """
    at, begin, size = 0, 0, len(data)
    huge: list[int] = []
    allowed = bytearray(_HEADER + bytes(8))
    octets = min(max(size.bit_length() - 1, 0) // 8, 3)
    fixed = _fixed(octets, min(max((size >> 8 * octets) - 1, 0), 255)).match
    while True:
        match = fixed(data, at)
        at = match.end() if match is not None else at
        if at >= size:
            raise pickle.UnpicklingError("the pickle has no end")
        code = data[at]
        if (replacement := _REPLACED.get(code)) is not None:
            allowed += data[begin:at] + replacement
            begin = at = at + 1
        elif code in _COUNTED:
            start = at + 1 + _COUNTED[code]
            end = start + int.from_bytes(data[at + 1 : start], "little")
            if code in _LONGS and abs(number := int.from_bytes(data[start:end], "little", signed=True)) >= HUGE:
                huge.append(number)
            at = end
        elif code == _PUT:
            number = int.from_bytes(data[at + 1 : at + 5], "little")
            if number > size:
                raise pickle.UnpicklingError(f"the pickle of {size} bytes has an object number {number}")
            at += 5
        elif code == _GLOBAL:
            at = data.find(b"\n", data.find(b"\n", at) + 1) + 1
            if not at:
                raise pickle.UnpicklingError("the pickle has no end")
        elif code == _FRAME:
            allowed += data[begin:at]
            begin = at = at + 9
        elif code == _STOP:
            refuse_alike([number for number, _ in groupby(sorted(huge))])
            allowed += data[begin : at + 1]
            allowed[len(_HEADER) : len(_HEADER) + 8] = (len(allowed) - len(_HEADER) - 8).to_bytes(8, "little")
            return allowed
        else:
            name = next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), "an unknown one")
            raise UnsupportedError(
                f"the pickle uses {name}, an opcode that no checkpoint needs (instruction {code:#x} at byte {at})"
            )


# The unpickler.


class _Unpickler(pickle.Unpickler):
    """Resolves names and references, and does what the scan replaced. See `read_pickle`."""

    def __init__(
        self,
        data: bytes,
        find_class: Callable[[str, str], Any],
        find_object: Callable[[Any], Any] | None,
        keys: frozenset[type],
    ) -> None:
        super().__init__(io.BytesIO(look_through(data)))
        self._find_class, self._find_object, self._keys = find_class, find_object, keys
        self._copies_left = 3 * len(data)

    def find_class(self, module: str, name: str) -> Any:
        return self._find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or len(pid) != 3:
            if self._find_object is None:
                raise pickle.UnpicklingError("the pickle refers to something outside itself")
            return self._find_object(pid)
        target, operand, kind = pid
        if kind == _CALL:
            return self._call(target, operand)
        if kind == _STATE:
            if type(target) is PickledCall:  # attributes of others (an OrderedDict's `_metadata`) are not needed
                target.state = operand
        elif kind == _FROZEN:
            self._count(len(target))
            return frozenset(checked(target))
        elif type(target) is not PickledCall:  # items of other classes are not needed: the class is refused
            self._count(len(operand))
            if kind == _ITEMS and type(target) is dict:
                target.update(zip(checked(operand[::2], self._keys), operand[1::2], strict=True))
            elif kind == _ADDED and type(target) is set:
                target.update(checked(operand))
            else:
                raise TypeError(f"items set in a {type(target).__name__}")
        return target

    def _count(self, copies: int) -> None:
        """Limit the copies of elements: a pickle can pass the same list many times, at a few bytes each."""
        self._copies_left -= copies
        if self._copies_left < 0:
            raise ValueError("the pickle copies the same elements over and over")

    def _call(self, function: Any, arguments: Any) -> Any:
        """The result of calling one of `BUILDERS`; a `PickledCall` for any other function."""
        if type(arguments) is not tuple:
            raise TypeError("arguments that are not a tuple")
        if arguments:
            self._count(len(arguments) + sum([len(value) for value in arguments if type(value) in _SIZED]))
        if not isinstance(function, PickledName):
            return PickledCall("(something that is not a class or function)", arguments)
        if function.name == "torch._tensor._rebuild_from_type_v2":
            return self._from_type(*arguments)
        builder = BUILDERS.get(function.name)
        return PickledCall(function.name, arguments) if builder is None else builder(*arguments)

    def _from_type(self, function: Any, cls: Any, arguments: tuple[Any, ...], state: Any) -> Any:
        """A tensor with Python attributes, or of a subclass: attributes of PyTorch's own classes are dropped."""
        if isinstance(cls, PickledName) and cls.name in _PLAIN_CLASSES:
            return self._call(function, arguments)
        return PickledCall(cls.name if isinstance(cls, PickledName) else "(a tensor's class)", arguments, state)


def checked(keys: Collection[Any], kinds: frozenset[type] = PLAIN_KEYS) -> Collection[Any]:
    """Keys of a dict or items of a set, of plain types: hashing nested containers could take forever."""
    if not kinds.issuperset(map(type, keys)):
        raise UnsupportedError(f"a dict or set has a key of type {min({*map(type, keys)} - kinds, key=str).__name__}")
    return keys


def _tensor(storage: PickledStorage, offset: int, shape: Any, stride: Any, *rest: Any) -> PickledTensor:
    _, _, metadata, *_ = (*rest, None, None, None)
    if metadata:  # {"conj": True}: the elements are not the values
        raise UnsupportedError("a tensor is a conjugated or negated view: save its resolve_conj().resolve_neg()")
    if storage.dtype is None:
        raise ValueError("a tensor of bytes without a dtype")
    return _view(storage, storage.numel, storage.dtype, offset, shape, stride)


def _tensor_of_bytes(
    storage: PickledStorage, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> PickledTensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    size = 1 if storage.dtype is None else storage.dtype.itemsize
    return _view(storage, storage.numel * size // dtype.itemsize, dtype, offset, shape, stride)


def _view(
    storage: PickledStorage, numel: int, dtype: torch.dtype, offset: int, shape: Any, stride: Any
) -> PickledTensor:
    shape, stride = checked_shape("a tensor", shape), tuple(stride)
    if len(shape) != len(stride) or any(type(step) is not int or not 0 <= step < 2**63 for step in (offset, *stride)):
        raise ValueError("a tensor with an invalid stride or offset")
    return PickledTensor(storage.key, numel, dtype, offset, shape, stride)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    if not isinstance(pairs, dict):
        checked([key for key, _ in pairs])
    return dict(pairs)


def _device(kind: Any = "cpu", index: Any = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):  # the text of nested lists can take all memory
        raise TypeError("an invalid device")
    return kind if index is None else f"{kind}:{index}"


def _text(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("utf-8", "latin1"):  # Python imports a module of the encoding's name
        raise ValueError("bytes in an unsupported encoding")
    return text.encode(encoding)


_PLAIN_CLASSES = (
    "torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
)  # fmt: skip


BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda _factory=None, pairs=(): _ordered(pairs),
    "collections.Counter": _ordered,
    "torch.Size": tuple,
    "torch.device": _device,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "_codecs.encode": _text,
    **dict.fromkeys(("builtins.set", "__builtin__.set"), lambda items=(): set(checked(items))),
    **dict.fromkeys(("builtins.frozenset", "__builtin__.frozenset"), lambda items=(): frozenset(checked(items))),
    **dict.fromkeys(("builtins.complex", "__builtin__.complex"), complex),
}
"""The functions whose calls are evaluated, by the name that a pickle uses."""

STORAGES: dict[str, torch.dtype | None] = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool, "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128, "torch.storage.UntypedStorage": None,
}  # fmt: skip
"""The dtypes of storages, by the name that a pickle uses; None: bytes."""
