"""Scans a pickle's instructions before it is unpickled: a few bytes can make the unpickler allocate all memory.

A restricted `find_class` limits what a pickle can call. It does not see `LONG_BINPUT`, which makes room for as many
objects as a number in the file says, nor `BYTEARRAY8`. The scan finds every instruction without executing it, and
allows only those that `pickle.dump` and `torch.save` write for metadata and tensors.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

_FIXED = re.compile(
    rb"(?:"
    rb"[\x94(})\]t\x85\x86\x87aesuN\x88\x89\x8f\x90\x93Rb\x81Q]"  # containers, constants, calls, memoize
    rb"|\x80.|\x95.{8}"  # protocol, frame
    rb"|[qhK].|M..|[Jj].{4}|G.{8}"  # put and get by short numbers, small ints, floats
    rb")*+",
    re.DOTALL,
)
_COUNTED = {  # instruction -> how many bytes encode the length of its data
    **dict.fromkeys((0x8C, 0x8A, ord("C")), 1),  # short text, int, short bytes
    **dict.fromkeys((ord("X"), ord("B")), 4),  # text, bytes
}
_PUT, _GLOBAL, _STOP, _LONG = ord("r"), ord("c"), ord("."), 0x8A
HUGE = 2**61 - 1
"""The modulus of Python's hash: integers from here on can have equal hashes, and many of those as keys take hours."""
_MOST_HUGE = 10_000


def refuse_alike(count: int) -> None:
    """Refuse so many integers of 61 bits and more that they must have been chosen for equal hashes.

    Raises:
        ValueError: `count` is too large.
    """
    if count > _MOST_HUGE:
        raise ValueError(f"more than {_MOST_HUGE} integers of 61 bits and more")


class _Unpickler(pickle.Unpickler):
    """Resolves names and external references by the reader's functions."""

    def __init__(
        self, data: bytes, find_class: Callable[[str, str], Any], persistent_load: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._find_class, self._persistent_load = find_class, persistent_load

    def find_class(self, module: str, name: str) -> Any:
        return self._find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise pickle.UnpicklingError("the pickle refers to something outside itself")
        return self._persistent_load(pid)


def read_pickle(
    data: bytes, find_class: Callable[[str, str], Any], persistent_load: Callable[[Any], Any] | None = None
) -> Any:
    """Scan and load a pickle.

    Args:
        find_class: returns the class or function of a module and a name.
        persistent_load: returns an object outside the pickle; None: such references are refused.

    Raises:
        Exception: a damaged pickle may raise anything.
    """
    look_through(data)
    return _Unpickler(data, find_class, persistent_load).load()


def look_through(data: bytes) -> None:
    """Scan a pickle; see the module's docstring.

    Raises:
        pickle.UnpicklingError: it has an instruction that is not allowed, or no end.
        ValueError: see `refuse_alike`.
    """
    at, size, huge = 0, len(data), 0
    while True:
        match = _FIXED.match(data, at)
        at = match.end() if match is not None else at
        if at >= size:
            raise pickle.UnpicklingError("the pickle has no end")
        code = data[at]
        if code == _STOP:
            return
        if code == _PUT:
            number = int.from_bytes(data[at + 1 : at + 5], "little")
            if number > size:
                raise pickle.UnpicklingError(f"the pickle of {size} bytes has an object number {number}")
            at += 5
        elif code == _GLOBAL:
            at = data.find(b"\n", data.find(b"\n", at) + 1) + 1
            if not at:
                raise pickle.UnpicklingError("the pickle has no end")
        elif code in _COUNTED:
            width = _COUNTED[code]
            length = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            if code == _LONG and length > 7:
                refuse_alike(huge := huge + 1)
            at += 1 + width + length
        else:
            raise pickle.UnpicklingError(f"the pickle has an instruction {code:#x} at byte {at}")
