"""What a pickle is made of, looked at before it is read: a few bytes can make the unpickler take all memory there is.

A restricted `find_class` decides what a pickle may call. It does not see `LONG_BINPUT`, which makes room for as many
objects as a number in the file says, nor `BYTEARRAY8`. Here every instruction is found, without being obeyed; only
those are let through that `pickle.dump` and `torch.save` write for metadata and tensors.
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
_COUNTED = {  # instruction: bytes of the length of what follows
    **dict.fromkeys((0x8C, 0x8A, ord("C")), 1),  # short text, int, short bytes
    **dict.fromkeys((ord("X"), ord("B")), 4),  # text, bytes
}
_PUT, _GLOBAL, _STOP, _LONG = ord("r"), ord("c"), ord("."), 0x8A
HUGE = 2**61 - 1
"""From here on Python hashes integers alike: many of them, as keys, make a dict take hours."""
_MOST_HUGE = 10_000


def refuse_alike(huge: int) -> None:
    """Raise where so many integers of 61 bits and more come together that they must be meant to have one hash.

    Raises:
        ValueError: they are too many.
    """
    if huge > _MOST_HUGE:
        raise ValueError(f"more than {_MOST_HUGE} integers of 61 bits and more")


class _Guarded(pickle.Unpickler):
    """Gives what a pickle names, and what it refers to outside itself, as its reader says."""

    def __init__(
        self, data: bytes, find_class: Callable[[str, str], Any], persistent_load: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._find, self._refer = find_class, persistent_load

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._refer is None:
            raise pickle.UnpicklingError("the pickle refers to something outside itself")
        return self._refer(pid)


def read_pickle(
    data: bytes, find_class: Callable[[str, str], Any], persistent_load: Callable[[Any], Any] | None = None
) -> Any:
    """What a pickle holds; it was looked through, and is given nothing but what these functions return.

    Args:
        find_class: what a pickle gets for a class or function that it names, by module and name.
        persistent_load: what it gets for something outside itself; None: that is refused.

    Raises:
        Exception: whatever a damaged pickle makes of the unpickler, or `find_class` raises.
    """
    look_through(data)
    return _Guarded(data, find_class, persistent_load).load()


def look_through(data: bytes) -> None:
    """Raise unless a pickle is of the usual instructions, and whole.

    Raises:
        pickle.UnpicklingError: it is not.
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
