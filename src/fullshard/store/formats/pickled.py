"""A pickle read as data: what it would build, without building it.

Python's own unpickler imports and calls what a pickle names. `torch.load(weights_only=True)` calls only what is on a
list, but that list lets a file of a few bytes take any amount of memory (`bytearray(10**12)`), and refuses the classes
in which other libraries wrap their tensors. Here nothing is imported and nothing of the pickle's is called:

    collections.OrderedDict, torch.Size, ...      become dicts, tuples: `BUILDERS`, every one written here
    torch._utils._rebuild_tensor_v2(...)          a `Stored`: where in the file the elements lie
    any other class or function                   a `Made`: its name and what it was given, inert

Memory is bounded by the pickle's own size. Opcodes are decoded by the standard library's `pickletools`, which checks
every length against the bytes that are there.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from ...errors import CheckpointError
from ..pickles import HUGE, refuse_alike
from .built import DTYPES, STORAGES, Made, Named, Storage, build, key_of

LARGEST = 128 * 2**20  # bytes of a pickle; one with 100,000 tensors takes about 20 MiB


def decode(data: bytes, what: str) -> Any:
    """What a pickle describes: dicts, lists, tuples, numbers, strings, bytes, `Stored`, `Named`, `Made`.

    Args:
        data: the pickle.
        what: the file, for errors.

    Raises:
        CheckpointError: it is no pickle, is damaged, or does what no checkpoint does.
    """
    if len(data) > LARGEST:
        raise CheckpointError(f"{what}: its pickle is too large to be one of tensors.", expected=LARGEST, got=len(data))
    machine = _Machine(what, len(data))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
    except CheckpointError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{what}: its pickle is damaged ({type(error).__name__}: {error}).") from error
    return machine.result


class _Machine:
    """The stack machine that pickles are programs of.

    Args:
        what: the file, for errors.
        size: of the pickle, in bytes. No more elements than twice that are copied by calls: a list may be given to a
            call as often as a pickle likes, by a few bytes each time.
    """

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._left, self._huge = 2 * size, 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.result: Any = None

    def step(self, name: str, argument: Any) -> None:
        """One opcode, by `pickletools`' name."""
        if name in _VALUES:
            if type(argument) is int and abs(argument) >= HUGE:
                self._huge += 1
                refuse_alike(self._huge)
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in _HANDLERS:
            _HANDLERS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointError(
                f"{self._what}: its pickle does what no checkpoint does ({name}).", topic="not-plain-values"
            )

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def popped(self) -> Any:
        return self._stack.pop()

    def stop(self) -> None:
        (self.result,) = self._stack

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.since_mark()

    def pop_mark(self) -> None:
        self.since_mark()

    def duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def put(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def push_dict(self, items: list[Any]) -> None:
        self._stack.append({})
        self.set_items(items)

    def tuple_of(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise IndexError("nothing on the stack")
        self._stack[-count:] = [items]

    def extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            target.items += items
        elif isinstance(target, set):
            target.update(map(key_of, items))
        else:
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Made):
            target.items += pairs
        elif isinstance(target, dict):
            target.update((key_of(key), value) for key, value in pairs)
        else:
            raise TypeError(f"items set in a {type(target).__name__}")

    def named(self, argument: str) -> None:
        name = argument.replace(" ", ".", 1)
        self._stack.append(DTYPES.get(name) or Named(name))

    def named_by_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a name that is no string")
        self.named(f"{module} {name}")

    def call(self, keywords: Any = None) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError("arguments that are not a tuple")
        if keywords:
            arguments = (*arguments, keywords)
        self._left -= sum(len(argument) for argument in arguments if hasattr(argument, "__len__"))
        if self._left < 0:
            raise CheckpointError(f"{self._what}: its pickle copies the same things over and over.")
        self._stack.append(build(function, arguments))

    def set_state(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Made):
            target.state = state  # of what is built here (an OrderedDict's `_metadata`) attributes are of no use

    def storage(self) -> None:
        kind, storage, key, _device, numel = self._stack.pop()
        if kind != "storage" or not isinstance(storage, Named) or storage.name not in STORAGES:
            name = f": {storage.name}" if isinstance(storage, Named) else ""
            raise CheckpointError(f"{self._what}: it refers to something that is no tensor's storage{name}.")
        if type(numel) is not int or numel < 0 or not isinstance(key, str):
            raise ValueError("a storage without name or size")
        self._stack.append(Storage(key, numel, STORAGES[storage.name]))


_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "STOP": lambda machine, _: machine.stop(),
    "MARK": lambda machine, _: machine.mark(),
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.pop_mark(),
    "DUP": lambda machine, _: machine.duplicate(),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, index: machine.put(int(index))),
    "MEMOIZE": lambda machine, _: machine.put(),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine.get(int(index))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "DICT": lambda machine, _: machine.push_dict(machine.since_mark()),
    "FROZENSET": lambda machine, _: machine.push(frozenset(map(key_of, machine.since_mark()))),
    "APPEND": lambda machine, _: machine.extend([machine.popped()]),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda machine, _: machine.extend(machine.since_mark())),
    "SETITEM": lambda machine, _: machine.set_items([machine.popped(), machine.popped()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": lambda machine, _: machine.named_by_stack(),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, _: machine.call()),
    "NEWOBJ_EX": lambda machine, _: machine.call(machine.popped()),
    "BUILD": lambda machine, _: machine.set_state(),
    "BINPERSID": lambda machine, _: machine.storage(),
}
