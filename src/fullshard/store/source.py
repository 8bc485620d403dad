"""Checkpoints of any format, tensor by tensor: the interface of conversion, export and inspection.

    Source   names, shapes and dtypes first; then any rectangle of any tensor
    Sink     all names, shapes and dtypes first; then whole tensors, in the same order

    model.layers.0.weight                             a parameter or buffer
    optimizer.state.layers.0.weight.exp_avg           optimizer state of a parameter
    values["optimizer"]["param_groups"], ...          everything that is not a tensor

Everything here runs in one process, without process groups, and has one tensor in memory at a time.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError

MODEL = "model."
"""The prefix of parameters and buffers."""
OPTIMIZER = "optimizer.state."
"""The prefix of optimizer state; the parameter's name, a dot, and the key follow."""

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
"""The keys under which programs save a model and its optimizer, in one nested state dict."""


def state_path(name: str, parameters: Container[str]) -> tuple[str, str] | None:
    """Split the name of optimizer state into parameter and key, by the longest parameter name that matches; or None."""
    rest = name.removeprefix(OPTIMIZER)
    parameter = rest
    while parameter := parameter.rpartition(".")[0]:
        if parameter in parameters:
            return parameter, rest.removeprefix(f"{parameter}.")
    return None


_MOST_DIMS = 64  # torch's limit
MOST_NAME = 2000
"""The most characters in a tensor's name: names are split at their dots, which is slow for a million of them."""


def checked_name(name: object) -> str:
    """A tensor's name.

    Raises:
        ValueError: it is not text, or too long.
    """
    if not isinstance(name, str):
        raise ValueError(f"a name that is a {type(name).__name__}")
    if len(name) > MOST_NAME:
        raise ValueError(f"a name of {len(name)} characters")
    return name


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of a tensor.

    Args:
        name: of the tensor, for error messages.

    Raises:
        ValueError: it is not a valid shape.
    """
    extents = tuple(shape) if isinstance(shape, Sequence) else None
    are_counts = extents is not None and all(type(extent) is int and extent >= 0 for extent in extents)
    if extents is None or not are_counts or len(extents) > _MOST_DIMS or math.prod(max(n, 1) for n in extents) >= 2**62:
        # Not `str`: the text of nested tuples can take all memory.
        raise ValueError(f"{name[:100]!r} has shape {reprlib.repr(shape)}")
    return extents


@dataclass(frozen=True)
class TensorEntry:
    """A checkpoint's description of a tensor.

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
        entries: by name, in the order that is fastest to read.
        values: everything that is not a tensor: nested dicts and lists of plain Python values.
        ties: further names, each with the name of its entry: `{"model.head.weight": "model.embedding.weight"}`.
    """

    entries: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    ties: Mapping[str, str]

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor into host memory. Do not write to it: it may share memory with the file.

        Args:
            name: of an entry.
            offsets, sizes: the rectangle to read, first index and extent on every dim; None: the whole tensor.

        Raises:
            CheckpointError: the file is damaged there.
        """

    @abstractmethod
    def files_of(self, name: str) -> list[str]:
        """The names of the files that contain an entry."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. May be called again."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Sink(ABC):
    """A checkpoint to write. Its path does not exist before `finish` returns.

    Use it in a `with`, which calls `abort` at the end.

    Args:
        entries: all tensors, in the order in which they will be written.
    """

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._unwritten = dict(entries)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor. Called once for every entry, in their order.

        Raises:
            CheckpointError: its shape or dtype differs from that of its entry, or it was written before.
        """
        expected, entry = self._unwritten.pop(name, None), TensorEntry(tuple(tensor.shape), tensor.dtype)
        if expected != entry:
            raise CheckpointError(
                "A tensor does not match its entry.", parameter=name, expected=expected or "no tensor", got=entry
            )
        self._put(name, tensor)

    def finish(self) -> None:
        """Publish the checkpoint at its path, atomically.

        Raises:
            CheckpointError: not all tensors were written.
        """
        if self._unwritten:
            raise CheckpointError("Not all tensors were written.", parameter=next(iter(self._unwritten)))
        self._end()

    @abstractmethod
    def abort(self) -> None:
        """Remove everything written so far. Does nothing after `finish`."""

    @abstractmethod
    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""

    @abstractmethod
    def _end(self) -> None:
        """Write everything that follows the tensors, and wait until it is on the disk."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()
