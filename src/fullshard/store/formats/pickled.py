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
from typing import Any

from ...errors import CheckpointError
from ..pickles import HUGE, refuse_alike
from .built import DTYPES, STORAGES, Call, Global, Storage, build, checked_key

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
