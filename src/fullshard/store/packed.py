"""A value that goes to another process at every save, and is pickled at the first alone."""

from __future__ import annotations

import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Packed(Generic[T]):
    """See the module's docstring.

    Attributes:
        value: nobody changes it.
    """

    __slots__ = ("_pickled", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self._pickled: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        self._pickled = self._pickled or pickle.dumps(self.value)
        return _unpacked, (self._pickled,)


def _unpacked(pickled: bytes) -> Packed[Any]:
    return Packed(pickle.loads(pickled))  # of this process's own rank, as what it is in
