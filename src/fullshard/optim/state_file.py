"""Optimizer state in a memory-mapped file without a name, which nothing can find after a crash."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..containers import tensors_in
from ..torch_private.local_tensor import plain_access, plain_tensors

AFTER_STEP_KEY = "_fullshard_after_step"
"""Attribute of an optimizer: what to call with parameters that it has stepped; see `StateFile.move`."""
ALIGN = 64  # bytes
Place = tuple[int, str, int]
"""A parameter's id, a key of its state, and the number of the plain tensor under that key."""


class StateFile:
    """This rank's optimizer state in files that have no name: the kernel frees their blocks when the process ends.

    Blocks are reserved before a tensor moves, so a full disk raises an error here and not a signal at a write. One file
    holds what was expected at the start; state beyond that (a larger dtype, say) gets files of its own.

    Ownership: files live as long as this object, or a tensor that lies in them.

    Args:
        folder: where the files are.
        expected: bytes to reserve now.

    Attributes:
        nbytes: bytes reserved.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full.
    """

    def __init__(self, folder: Path, expected: int) -> None:
        self._folder, self.nbytes = folder, 0
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # [bytes], of the file that has room
        self._used = 0  # bytes of it
        self._addresses: set[int] = set()  # of the memory of all files
        self._moving = threading.Lock()  # units may step on two threads
        self._places: dict[Place, torch.Tensor] = {}  # [bytes] each
        self._reserve(max(expected, 1))

    def _reserve(self, nbytes: int) -> None:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            mapped = mmap.mmap(file.fileno(), nbytes)
        self._memory, self._used = torch.frombuffer(mapped, dtype=torch.uint8), 0
        self._addresses.add(self._memory.untyped_storage().data_ptr())
        self.nbytes += nbytes

    def holds(self, plain: torch.Tensor) -> bool:
        """Whether a tensor lies in these files."""
        return plain.untyped_storage().data_ptr() in self._addresses

    def _place(self, place: Place, nbytes: int) -> torch.Tensor:
        """Return memory for a tensor: its previous memory, if large enough."""
        if place not in self._places or self._places[place].numel() < nbytes:
            rounded = -(-nbytes // ALIGN) * ALIGN
            if self._used + rounded > self._memory.numel():
                self._reserve(rounded)
            self._places[place] = self._memory[self._used : self._used + rounded]
            self._used += rounded
        return self._places[place][:nbytes]

    def move(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Move state of these parameters that is not in the files yet; the tensors stay the same objects.

        Raises:
            OSError: the disk is full. The state that was not moved stays in memory, and is as good as before.
        """
        with self._moving, plain_access(), torch.no_grad():
            for parameter in parameters:
                for place, plain in elementwise(parameter, optimizer.state.get(parameter) or {}):
                    if not self.holds(plain):
                        memory = self._place(place, plain.numel() * plain.element_size())
                        plain.data = memory.view(plain.dtype).view(plain.shape).copy_(plain)


def elementwise(parameter: torch.Tensor, state: dict[str, Any]) -> list[tuple[Place, torch.Tensor]]:
    """The plain tensors of a parameter's state that have an element for each of this rank's elements, with places."""
    numel = sum(plain.numel() for plain in plain_tensors(parameter))
    return [
        ((id(parameter), str(key), index), plain)
        for key, value in state.items()
        for index, plain in enumerate(plain for tensor in tensors_in(value) for plain in plain_tensors(tensor))
        if plain.numel() == numel > 1
    ]
