"""Checkpoints tensor by tensor, whatever their format: what conversion, export and inspection read and write.

    Source   names, shapes and dtypes first; then any rectangle of any tensor
    Sink     all names, shapes and dtypes first; then one whole tensor after the other, in that order

    model.layers.0.weight                             a parameter or buffer
    optimizer.state.layers.0.weight.exp_avg           optimizer state of a parameter
    values["optimizer"]["param_groups"], ...          whatever is not a tensor

Everything here runs in one process, without process groups, and holds one tensor at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError

MODEL = "model."
"""What the names of parameters and buffers begin with."""
OPTIMIZER = "optimizer.state."
"""What the names of optimizer state begin with: then the parameter's name, a dot, and the key."""


def state_path(name: str, parameters: Container[str]) -> tuple[str, str] | None:
    """The parameter and the key in the name of optimizer state, by the longest parameter's name that fits, or None."""
    rest = name.removeprefix(OPTIMIZER)
    parameter = rest
    while parameter := parameter.rpartition(".")[0]:
        if parameter in parameters:
            return parameter, rest.removeprefix(f"{parameter}.")
    return None


_MOST_DIMS = 64  # of torch's tensors
MOST_NAME = 2000
"""Characters of a tensor's name: names are taken apart at their dots, which takes long if there are a million."""


def checked_name(name: object) -> str:
    """A tensor's name.

    Raises:
        ValueError: it is too long to be one.
    """
    if len(text := str(name)) > MOST_NAME:
        raise ValueError(f"a name of {len(text)} characters")
    return text


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of a tensor.

    Args:
        name: of the tensor, for errors.

    Raises:
        ValueError: no tensor has it.
    """
    extents = tuple(shape) if isinstance(shape, Sequence) else None
    are_counts = extents is not None and all(type(extent) is int and extent >= 0 for extent in extents)
    if extents is None or not are_counts or len(extents) > _MOST_DIMS or math.prod(max(n, 1) for n in extents) >= 2**62:
        raise ValueError(f"{name[:100]!r} has shape {str(shape)[:100]}")
    return extents


@dataclass(frozen=True)
class Entry:
    """What a checkpoint says of one tensor before it is read.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}"


class Source(ABC):
    """A checkpoint that can be read. Close it, or use it in a `with`.

    Attributes:
        entries: by name, in the order in which reading is fastest.
        values: what is not a tensor: nested dicts and lists of plain Python values.
        ties: other names of an entry, by name: `{"model.head.weight": "model.embedding.weight"}`.
    """

    entries: Mapping[str, Entry]
    values: Mapping[str, Any]
    ties: Mapping[str, str]

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor in host memory, to be read only: it may share memory with the file.

        Args:
            name: of an entry.
            offsets, sizes: the rectangle to read, an index and an extent for every dim; None: the whole tensor.

        Raises:
            CheckpointError: the file is damaged there.
        """

    @abstractmethod
    def close(self) -> None:
        """Let files go. More than once does no harm."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Sink(ABC):
    """A checkpoint that is being written. Nothing is at its path before `finish` returns.

    Used in a `with`, which calls `abort` if `finish` was not reached.

    Args:
        entries: all tensors, in the order in which they will be written.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._unwritten = dict(entries)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one whole tensor. Once for every entry, in their order.

        Raises:
            CheckpointError: its shape or dtype differs from that of its entry, or it was written before.
        """
        announced, entry = self._unwritten.pop(name, None), Entry(tuple(tensor.shape), tensor.dtype)
        if announced != entry:
            raise CheckpointError(
                "A tensor is not what was announced.", parameter=name, expected=announced or "no tensor", got=entry
            )
        self._put(name, tensor)

    def finish(self) -> None:
        """Put the checkpoint in its place, in one step.

        Raises:
            CheckpointError: not all tensors were written.
        """
        if self._unwritten:
            raise CheckpointError("Not all tensors were written.", parameter=next(iter(self._unwritten)))
        self._end()

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written so far. After `finish`, nothing."""

    @abstractmethod
    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor."""

    @abstractmethod
    def _end(self) -> None:
        """Write what follows the tensors, wait until all is on the disk, and put it in its place."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()
